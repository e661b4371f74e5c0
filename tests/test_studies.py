"""The study of paper B: its settings, the split, the followed first slice against SAM2's own predictor, resuming, and what is refused."""
import contextlib
import io

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from freerep import studies
from freerep.bank import ExampleBank
from freerep.core import InputError, rng, write_json
from freerep.examples import ArrayQuery, array_examples, grey_to_rgb, open_examples
from freerep.phantom import write_phantoms
from freerep.segmenter import load_segmenter, plain_predictor
from freerep.studies import (ICL_SETTINGS, ORGANS, Setting, context_folder, first_slices, follow_first, paper_results, read_results, run_setting, split_scans,
                             study_figure, study_icl, study_table, study_text)

HOW = dict(sam2="nano", retriever="random", n_context=2, n_test=1)
FEW = [Setting("image", 2), Setting("image", 2, "random"), Setting("video", 2), Setting("first", paper=(2, "SAM-2 (mask prompt)")), Setting("first", finetuned=True)]


@pytest.fixture(scope="module")
def source(tmp_path_factory): return write_phantoms(tmp_path_factory.mktemp("studies")/"FLARE_phantoms", volumes=3, slices=4, size=64, seed=5)


@pytest.fixture(scope="module")
def study(source, tmp_path_factory):
    "(folder, results) of a study with random weights, really run"
    out = tmp_path_factory.mktemp("studies")/"study"
    return out, study_icl(source, out, settings=FEW, **HOW)


@pytest.fixture
def counted(monkeypatch):
    "`run_setting` replaced by one that only notes what it was asked for"
    asked = []
    def fake(setting, bank, scans, *, seed=0):
        asked.append(setting.name)
        return pd.DataFrame([dict({k: float(i) for i, k in enumerate(studies._SCORES)}, **{"class": c}) for c in bank.ids])
    monkeypatch.setattr(studies, "run_setting", fake)
    return asked


# ---------------------------------------------------------------- the paper and the settings

def test_paper_rows_are_consistent():
    paper = paper_results()
    assert list(paper.columns) == [*ORGANS.values(), "Avg"] and len(paper) == 14 and paper.index.is_unique
    assert (paper[list(ORGANS.values())].mean(axis=1) - paper.Avg).abs().max() < 2e-4     # a wrong digit in a cell would show
    assert ((paper > .3) & (paper < 1)).to_numpy().all()
    assert paper.loc[(2, "Temporal (ctx=10, fine-tuned)"), "Avg"] == .9223


def test_settings_answer_every_question():
    for ft in (False, True):
        image = {(s.k, s.strategy) for s in ICL_SETTINGS if s.task == "image" and s.finetuned == ft}
        assert {(5, "diverse"), (10, "diverse"), (20, "diverse"), (5, "topk"), (10, "topk"), (10, "random")} == image
        assert {s.task for s in ICL_SETTINGS if s.finetuned == ft} == {"image", "video", "first"}
    assert len({s.name for s in ICL_SETTINGS}) == len(ICL_SETTINGS)
    assert all(("ft" in s.paper[1] or "fine-tuned" in s.paper[1]) == s.finetuned and (s.paper[0] == 1) == (s.task == "image") for s in ICL_SETTINGS if s.paper)


@pytest.mark.parametrize("seed", range(20))
def test_split(seed):
    names = [f"scan{i:02d}" for i in range(50)]
    context, test = split_scans(names, seed=seed)
    assert len(context) == 40 and len(test) == 10 and {*context, *test} == set(names)
    assert split_scans(rng(seed).permutation(names).tolist(), seed=seed) == (context, test)
    assert split_scans(names, seed=seed + 1) != (context, test)


def test_split_refused():
    with pytest.raises(InputError, match="9 labelled scans are too few for 8 with context and 2"): split_scans(map(str, range(9)), n_context=8, n_test=2)
    with pytest.raises(InputError, match="at least 1"): split_scans("abc", n_context=0, n_test=2)


def test_context_folder(source, tmp_path):
    examples = open_examples(source)
    names = list(examples.volumes)[1:]
    few = open_examples(context_folder(examples, names, tmp_path/"context"))
    assert list(few.volumes) == names and few.classes == examples.classes and few.colours == examples.colours
    at = [i for n in names for i in examples.volumes[n]]
    assert all((few[j].labels == examples[i].labels).all() and (few[j].image == examples[i].image).all() for j, i in enumerate(at))
    with pytest.raises(InputError, match="exists already"): context_folder(examples, names, tmp_path/"context")


def test_context_folder_without_links(source, tmp_path, monkeypatch):
    def no(*a, **k): raise OSError("no links here")
    monkeypatch.setattr(studies.os, "symlink", no)
    examples = open_examples(source)
    out = context_folder(examples, list(examples.volumes)[:1], tmp_path/"context")
    assert not any(p.is_symlink() for p in out.rglob("*")) and len(open_examples(out).volumes) == 1


# ---------------------------------------------------------------- the first slice given

def moving(n=6, side=64, classes=3):
    "A noisy film of discs that move, and its labels; class c begins on frame c - 1"
    r, (y, x) = rng(1, "moving"), np.mgrid[:side, :side]/side
    images, labels = r.normal(90, 15, (n, side, side)), np.zeros((n, side, side), np.uint8)
    for t in range(n):
        for c in range(1, classes + 1):
            inside = (x - .2*c - .02*t)**2 + (y - .25*c)**2 < .012
            images[t][inside] += 40*c
            if t >= c - 1: labels[t][inside] = c
    return [grey_to_rgb(i.clip(0, 255).astype(np.uint8)) for i in images], labels


@pytest.fixture(scope="module")
def shaken():
    "A nano segmenter whose random weights are large enough that a wrong memory shows"
    seg, g = load_segmenter("nano", device="cpu"), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, w in seg.model.named_parameters():
            if w.ndim < 2: w.add_(torch.randn(w.shape, generator=g)*.05)
            elif name.startswith(("memory_attention", "memory_encoder", "sam_mask_decoder", "obj_ptr_proj")): w.mul_(3.)
        seg.model.sam_mask_decoder.pred_obj_score_head.layers[-1].bias.add_(3)
    return seg


@pytest.mark.parametrize("c", [1, 3])
def test_follows_as_sam2_does(shaken, c, tmp_path):
    images, labels = moving()
    predictor = plain_predictor(shaken)
    for t, im in enumerate(images): Image.fromarray(im).save(tmp_path/f"{t}.jpg", quality=95)
    for t, im in enumerate(images): images[t] = np.asarray(Image.open(tmp_path/f"{t}.jpg"))
    found, given = follow_first(shaken, ArrayQuery(images), labels, [c])
    with contextlib.redirect_stderr(io.StringIO()):
        state = predictor.init_state(str(tmp_path))
        predictor.add_new_mask(state, c - 1, 0, torch.tensor(labels[c - 1] == c))
        video = {t: m[0, 0].numpy() > 0 for t, _, m in predictor.propagate_in_video(state)}
    assert given == {c: c - 1} and not found[:c - 1].any()
    assert ((found[c - 1] == c) == (labels[c - 1] == c)).all()
    after = range(c, len(images))
    assert sum(((found[t] == c) != video[t]).sum() for t in after) <= 1
    assert any(video[t].any() for t in after)


def test_one_look_and_bounded_memory(shaken, monkeypatch):
    images, labels = moving(n=24, classes=2)
    held, track = [], type(shaken).track
    monkeypatch.setattr(type(shaken), "track", lambda self, f, **k: held.append(len(k["recent"])) or track(self, f, **k))
    before = shaken.encodings
    _, given = follow_first(shaken, ArrayQuery(images), labels, [1, 2, 3])
    assert given == {1: 0, 2: 1} and shaken.encodings - before == 24
    assert max(held) == shaken.reach and len(held) == 23 + 22


def test_nothing_to_follow(shaken):
    images, labels = moving(n=2)
    before = shaken.encodings
    found, given = follow_first(shaken, ArrayQuery(images), labels*0, [1, 2])
    assert not found.any() and given == {} and shaken.encodings == before
    assert first_slices(labels, [1, 2, 9]) == {1: 0, 2: 1}


# ---------------------------------------------------------------- one setting

class Fixed:
    "A volume of labels in memory"
    def __init__(self, labels): self._labels = labels
    def labels(self): return self._labels


def test_scores_leave_given_masks_out(monkeypatch):
    images, labels = moving(n=4)
    bank = ExampleBank(array_examples(images, list(labels), classes={1: "a", 2: "b", 3: "c"}), retriever="random", segmenter=load_segmenter("nano", device="cpu"))
    found = labels.copy()
    found[1:][found[1:] == 2] = 0                                  # class 2 is right on frame 1 alone ...
    found[1][labels[1] == 2] = 2
    monkeypatch.setitem(studies._TASKS, "first", lambda *a: (found, {2: 1}))   # ... whose mask was given
    monkeypatch.setattr(studies, "VolumeQuery", lambda v: None)
    scores = run_setting(Setting("first"), bank, [("x", None, Fixed(labels)), ("y", None, Fixed(labels))]).set_index("class")
    assert scores.dice_slice.to_dict() == {1: 1, 2: 0, 3: 1} and scores.dice_volume.to_dict() == {1: 1, 2: 0, 3: 1}
    assert scores.slices.to_dict() == {1: 8, 2: 4, 3: 4} and scores.volumes.to_dict() == {1: 2, 2: 2, 3: 2}


def test_images_are_the_slices_that_show_something(source, monkeypatch):
    examples = open_examples(source)
    seen = []
    def everywhere(bank, image, *, k, strategy, seed):
        seen.append((k, strategy, seed))
        return type("R", (), dict(labels=np.ones(image.shape[:2], np.int32)))
    monkeypatch.setattr(studies, "segment_image", everywhere)
    truth = np.zeros((4, 64, 64), np.uint8)
    truth[1, :9], truth[2] = 1, 7                                  # 7 is none of the bank's classes
    query = studies.VolumeQuery(examples.items[0].volume)
    found, given = studies._by_slice(type("B", (), dict(ids=[1, 2])), query, truth, Setting("image", 3, "random"), 0)
    assert found.any((1, 2)).tolist() == [False, True, False, False] and given == {} and [s[:2] for s in seen] == [(3, "random")]
    truth[3, 0, 0] = 2
    studies._by_slice(type("B", (), dict(ids=[1, 2])), query, truth, Setting("image", 3, "random"), 0)
    assert seen[0] == seen[1] and seen[2][2] != seen[1][2]         # each slice has its own draw, always the same


# ---------------------------------------------------------------- the study

def test_study_is_complete(study):
    out, results = study
    assert results.groupby("setting", sort=False)["class"].apply(list).to_dict() == {s.name: list(ORGANS) for s in FEW}
    shown = results["class"].isin([1, 2, 3, 5, 9, 11, 13])
    run = ~results.finetuned
    assert results.dice_volume[run & shown].between(0, 1).all() and (results.reason[run & shown] == "").all()
    assert results.dice_slice[run & ~shown].isna().all() and (results.reason[run & ~shown] == "no scan is labelled with it").all()
    assert results[studies._SCORES][~run].isna().to_numpy().all() and (results.reason[~run] == "no fine-tuned checkpoint was given").all()
    assert (results.weights[run] == "random").all() and results.segmenter[run].str.startswith("sam2-nano-64-").all() and results.seconds[run].gt(0).all()
    for column in ("seed", "torch", "device", "cores", "retriever", "context_scans", "test_scans"): assert (results[column].astype(str) != "").all()
    pd.testing.assert_frame_equal(read_results(out), results)
    assert {"results.csv", "table.txt", "figure.png", "split.json", "context"} <= {p.name for p in out.iterdir()}


def test_study_shows_paper_and_warning(study):
    out, results = study
    text = (out/"table.txt").read_text()
    assert text.startswith("The segmenter's weights are random") and "not run: first slice given, fine-tuned (no fine-tuned checkpoint was given)" in text
    assert "77.57" in text and "blank: Panc." in text
    table = study_table(results, 2)
    assert table.loc[("first slice given", "paper"), "Liver"] == pytest.approx(91.21) and table.loc[("Medical SAM-2 (mask prompt)", "paper"), "Avg"] == pytest.approx(77.23)
    mine = results[results.setting == "first slice given"]
    assert table.loc[("first slice given", "per volume"), "Avg"] == pytest.approx(100*mine.dice_volume.mean())
    assert "random weights" in study_figure(results).axes[0].get_xlabel()
    assert not study_text(results.assign(weights="given")).startswith("The segmenter")


def test_resume_repeats_nothing(study, source, counted, tmp_path):
    out, results = study
    again = study_icl(source, out, settings=FEW, **HOW)
    assert counted == []
    pd.testing.assert_frame_equal(again, results)


def test_interrupted_then_fine_tuned(source, tmp_path, counted, monkeypatch):
    fake, out = studies.run_setting, tmp_path/"study"
    def stops(setting, *a, **k):
        if len(counted) == 2: raise KeyboardInterrupt
        return fake(setting, *a, **k)
    monkeypatch.setattr(studies, "run_setting", stops)
    with pytest.raises(KeyboardInterrupt): study_icl(source, out, settings=FEW, **HOW)
    assert set(read_results(out).setting) == {s.name for s in FEW[:2]}
    monkeypatch.setattr(studies, "run_setting", fake)
    study_icl(source, out, settings=FEW, **HOW)
    assert counted == [s.name for s in FEW[:4]]
    load_segmenter("nano", seed=1, device="cpu").save(tmp_path/"second.safetensors")
    for finetuned in (tmp_path/"second.safetensors", None):        # what was run stays, with the checkpoint or without
        results = study_icl(source, out, settings=FEW, finetuned=finetuned, **HOW)
        assert counted == [s.name for s in FEW] and list(results.setting.unique()) == [s.name for s in FEW]
        assert (results.weights[results.finetuned] == "fine-tuned").all() and results.seconds.notna().all()


def test_another_study_is_refused(study, source, counted, tmp_path):
    out, _ = study
    before = (out/"results.csv").read_bytes()
    load_segmenter("nano", seed=9, device="cpu").save(tmp_path/"other.safetensors")
    with pytest.raises(InputError, match="another seed: 0, not 1"): study_icl(source, out, settings=FEW, **{**HOW, "seed": 1})
    with pytest.raises(InputError, match="another context"): study_icl(source, out, settings=FEW, **{**HOW, "n_context": 1})
    with pytest.raises(InputError, match="another segmenter"): study_icl(source, out, settings=FEW, checkpoint=tmp_path/"other.safetensors", **HOW)
    with pytest.raises(InputError, match="another segmenter"): study_icl(source, out, settings=FEW, image_size=96, **HOW)
    (tmp_path/"full").mkdir()
    (tmp_path/"full"/"letter.txt").write_text("dear")
    with pytest.raises(InputError, match="exists already"): study_icl(source, tmp_path/"full", **HOW)
    assert (out/"results.csv").read_bytes() == before and counted == []
    with pytest.raises(InputError, match="holds no results"): read_results(tmp_path)


def test_wrong_sources(source, tmp_path):
    for i in range(3):
        for kind in ("images", "masks"):
            (tmp_path/"pictures"/kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.eye(32, dtype=np.uint8)*(i + 1)).save(tmp_path/"pictures"/kind/f"{i}.png")
    with pytest.raises(InputError, match="holds pictures: expected scans"): study_icl(tmp_path/"pictures", tmp_path/"out", **HOW)
    with pytest.raises(InputError, match="too few for 40"): study_icl(source, tmp_path/"out", sam2="nano", retriever="random")
    assert not (tmp_path/"out").exists()


def test_retriever_is_trained_once(source, tmp_path, counted, monkeypatch):
    monkeypatch.setattr(studies, "_TRAINING", dict(preset="tiny", steps=1, frames=4, stride=1, clips=1, size=32))
    how = {**HOW, "retriever": None}
    first = study_icl(source, tmp_path/"study", settings=FEW[:1], **how)
    second = study_icl(source, tmp_path/"study", settings=FEW[:2], **how)
    third = study_icl(source, tmp_path/"study", settings=FEW[:3], **{**how, "retriever": tmp_path/"study"/"retriever"})
    assert first.retriever.nunique() == third.retriever.nunique() == 1 and first.retriever[0] == second.retriever[0] == third.retriever[0]
    assert first.retriever[0].startswith("retriever-32-") and counted == [s.name for s in FEW[:3]]
    with pytest.raises(InputError, match="another retriever"): study_icl(source, tmp_path/"study", settings=FEW[:4], **HOW)


def test_a_leak_is_told(source, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(studies, "note", told.append)
    run = tmp_path/"FT"
    write_json(dict(kind="finetune", data=dict(path=str(source))), run/"config.json")
    monkeypatch.setattr(studies, "load_finetuned", lambda path: type("Run", (), dict(path=path)))
    assert studies._weights_file(run, source) == run/"last.safetensors" and "worth nothing" in told[0]
    write_json(dict(kind="finetune", data=dict(path=str(tmp_path/"context"))), run/"config.json")
    assert studies._weights_file(run, source) == run/"last.safetensors" and len(told) == 1
    assert studies._weights_file(None, source) is None and studies._weights_file(tmp_path/"x.pt", source) == tmp_path/"x.pt"
