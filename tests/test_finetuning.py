"Fine-tuning: episodes that are fair, a loss that is the formula, a training that resumes to the bit"
import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from freerep import finetuning
from freerep.core import InputError, override, rng
from freerep.examples import array_examples, open_examples
from freerep.finetuning import (FREEZABLE, EpisodeBatches, EpisodeTable, FinetuneConfig, SquareExamples, draw_classes, draw_clip, draw_similar, episode_loss,
                                example_vectors, anchors, finetune, load_finetuned, look_through, mask_losses, ranked_others)
from freerep.learner import Callback
from freerep.phantom import write_phantoms
from freerep.pretraining import load_run
from freerep.segmenter import Prediction, load_segmenter
from freerep.time_contrast import load_retriever


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    return open_examples(write_phantoms(tmp_path_factory.mktemp("ph")/"phantoms", 3, slices=10, size=64, seed=3))


@pytest.fixture(scope="module")
def squares(examples): return SquareExamples(examples, 64)


@pytest.fixture(scope="module")
def table(squares): return look_through(squares, example_vectors(squares.examples, Thumbnails()))


class Thumbnails:
    fingerprint = "thumbnails"
    def embed(self, images): return F.adaptive_avg_pool2d(torch.as_tensor(images).float().mean(-1), 8).flatten(1).numpy() - 100


def random_table(seed, n=24, o=5, groups=4, vectors=True, partial=True):
    r = np.random.default_rng(seed)
    known = r.random((n, o)) < (.7 if partial else 2)
    group = np.sort(r.integers(0, groups, n))
    v = r.normal(size=(n, 3))
    return EpisodeTable(list(range(1, o + 1)), (r.random((n, o)) < .4) & known, known, group, v/np.linalg.norm(v, axis=1, keepdims=True) if vectors else None)


def queries(t): return [(i, c) for i in range(len(t)) for c in np.flatnonzero(t.shown[i])]


@pytest.mark.parametrize("seed", range(12))
def test_context_is_fair(seed):
    t = random_table(seed, vectors=seed % 3 > 0, groups=1 if seed % 4 == 3 else 4)
    for n, (i, anchor) in enumerate(queries(t)):
        order = ranked_others(t, i, anchor, rng(seed, n))
        ref = [j for j in range(len(t)) if j != i and t.known[j, anchor] and t.group[j] != t.group[i]]
        if not t.shown[ref, anchor].any(): ref = [j for j in range(len(t)) if j != i and t.known[j, anchor]]
        assert sorted(order.tolist()) == ref
        k = 1 + n % 4
        context = draw_similar(t, i, anchor, k, rng(seed, n, "x"), pool=6)
        assert len(context) == (k if ref else 0)
        assert i not in context and set(context.tolist()) <= set(ref)
        if len(ref) >= k: assert len(set(context.tolist())) == k
        if t.shown[ref, anchor].any(): assert t.shown[context, anchor].any()
        if t.vectors is not None: assert (np.diff(t.vectors[context] @ t.vectors[i]) >= -1e-12).all()


def test_pool_is_the_nearest():
    t = random_table(1, partial=False)
    t.shown[:] = True
    for i in range(len(t)):
        others = [j for j in np.argsort(-(t.vectors @ t.vectors[i])) if t.group[j] != t.group[i]]
        seen = {int(j) for n in range(60) for j in draw_similar(t, i, 0, 2, rng(n), pool=5)}
        assert seen == {int(j) for j in others[:5]}
        assert draw_similar(t, i, 0, 5, rng(0), pool=5).tolist() == [int(j) for j in others[:5][::-1]]


def test_random_context_takes_all():
    t = random_table(2, vectors=False, partial=False)
    t.shown[:] = True
    seen = np.bincount(np.concatenate([draw_similar(t, 0, 0, 2, rng(n), pool=5) for n in range(600)]), minlength=len(t))
    others = t.group != t.group[0]
    assert seen[~others].sum() == 0 and (seen[others] > 20).all()


@pytest.mark.parametrize("seed", range(2))
def test_clips_are_real_clips(seed):
    t = random_table(seed)
    for i in range(len(t)):
        line = np.flatnonzero(t.group == t.group[i]).tolist()
        for k in (1, 2, 3, 5):
            possible = [[line[line.index(i) + s*a] for a in range(k, 0, -1)] for s in (-3, -2, -1, 1, 2, 3) if all(0 <= line.index(i) + s*a < len(line) for a in range(1, k + 1))]
            drawn = [draw_clip(t, i, k, rng(seed, n)) for n in range(40)]
            if not possible: assert drawn == [None]*40
            else: assert {tuple(d.tolist()) for d in drawn} == {tuple(p) for p in possible}


@pytest.mark.parametrize("seed", range(8))
def test_classes_have_a_definition(seed):
    t, o = random_table(seed), 3
    away = total = 0
    for n, (i, anchor) in enumerate(queries(t)):
        context = draw_similar(t, i, anchor, 2, rng(seed, n))
        if not len(context): continue
        c = draw_classes(t, i, context, anchor, o, rng(seed, n, "classes"))
        assert len(c) == o and anchor in c
        assert t.known[i, c].all() and t.known[np.ix_(context, c)].all()
        for x in c:                                              # the query shows it and no context does: only a class that no other image shows
            if t.shown[i, x]: assert t.shown[context, x].any() or not np.delete(t.shown[:, x], i).any()
        away, total = away + (~t.shown[i, c]).sum(), total + o
    assert 0 < away < total


def test_slots_mean_nothing(table):
    i = int(np.flatnonzero(table.shown.sum(1) >= 3)[0])
    anchor = int(np.flatnonzero(table.shown[i])[0])
    drawn = np.array([draw_classes(table, i, draw_similar(table, i, anchor, 3, rng(n)), anchor, 3, rng(n, "c")) for n in range(600)])
    share = (drawn == anchor).mean(0)
    np.testing.assert_allclose(share, 1/3, atol=.07)
    assert share.sum() == pytest.approx(1)


def test_table_says_what_is_there(examples, table):
    ids = list(examples.classes)
    for i, e in enumerate(examples):
        assert table.shown[i].tolist() == [(e.labels == c).any() for c in ids]
    assert table.known.all()
    assert [np.flatnonzero(table.group == g).tolist() for g in range(3)] == list(examples.volumes.values())


def partly_labelled(known, labels=None):
    "Pictures of the classes 1 and 2, of whose labels only some are known"
    images = [np.full((40, 50, 3), 90 + i, np.uint8) for i in range(len(known))]
    labels = labels or [np.zeros((40, 50), int) for _ in images]
    for l, k in zip(labels, known): l[5:20, 5:20], l[25:35, 30:45] = 1*(1 in k), 2*(2 in k)
    return array_examples(images, labels, classes={1: "a", 2: "b"}, known=known)


def fair(t, query, context, classes):
    "Every class is known to all images, and if the query shows it then so does a context image"
    assert query not in context and t.known[query, classes].all() and t.known[np.ix_(context, classes)].all()
    assert t.shown[context][:, classes].any(0)[t.shown[query, classes]].all()


def test_partly_labelled_pictures():
    ex = partly_labelled([{1}, {1, 2}, {1, 2}, {2}])
    t = look_through(SquareExamples(ex, 64))
    assert t.known.tolist() == [[True, False], [True, True], [True, True], [False, True]]
    assert (t.shown <= t.known).all() and len(set(t.group.tolist())) == 4
    for epoch in range(5):
        for episode in EpisodeBatches(SquareExamples(ex, 64), t, batch=4, context=2, classes=2).plan(epoch, 0): fair(t, *episode)


@pytest.mark.parametrize("own", [0., 1.])
def test_partly_labelled_scans(own):
    "Clips of the query's own scan, in which every other picture says nothing about class b"
    ex = partly_labelled([{1, 2} if i % 2 else {1} for i in range(16)])
    t = look_through(SquareExamples(ex, 64))
    t.group[:] = np.arange(16)//8
    batches = EpisodeBatches(SquareExamples(ex, 64), t, batch=8, context=2, classes=2, own=own)
    for epoch in range(25):
        for episode in batches.plan(epoch, 0): fair(t, *episode)


@pytest.mark.parametrize("seed", range(12))
def test_every_episode_is_fair(squares, seed):
    t = random_table(seed, n=14, o=5, groups=3, vectors=seed % 2 > 0)
    t.classes = list(squares.examples.classes)[:5]
    t.shown[1:, 0] = False
    t.shown[t.group != t.group[0], 1] = False                     # a class that only one scan shows
    t.shown[0, 0] = t.known[0, 0] = True                          # and one that only one image shows
    batches = EpisodeBatches(squares, t, batch=4, context=3, own=.5, seed=seed)
    assert batches.queries.tolist() == [i for i in range(14) if any(t.shown[i, c] and np.delete(t.shown[:, c], i).any() for c in range(5))]
    for epoch in range(10):
        for number in range(len(batches)):
            for query, context, classes in batches.plan(epoch, number):
                fair(t, query, context, classes)
                assert anchors(t)[query, classes].any()


def test_a_class_of_a_single_image_is_told_before_training(tmp_path, capsys):
    ex = partly_labelled([{1}, {1}, {1}, {1, 2}])
    squares = SquareExamples(ex, 64)
    batches = EpisodeBatches(squares, look_through(squares), batch=4, context=2, classes=2, own=0.)
    assert "'b': shown by a single image" in capsys.readouterr().err
    assert all(len(batches.plan(epoch, 0)) == 4 for epoch in range(40))          # none of them asks for b
    only = partly_labelled([{1}, {2}])
    with pytest.raises(InputError, match="'a', 'b' is shown by two images"): EpisodeBatches(SquareExamples(only, 64), look_through(SquareExamples(only, 64)))


def test_batches_hold_what_the_plan_says(squares, table):
    b = EpisodeBatches(squares, table, batch=4, context=3, classes=3, own=.4, seed=1)
    lengths = set()
    for epoch in range(4):
        b.set_epoch(epoch)
        asked = [i for n in range(len(b)) for i, _, _ in b.plan(epoch, n)]
        assert len(set(asked)) == len(asked) == 4*len(b)
        for n, (images, masks, truth) in enumerate(b):
            lengths.add(images.shape[1])
            for e, (i, context, columns) in enumerate(b.plan(epoch, n)):
                ids = np.array(table.classes)[columns][:, None, None]
                np.testing.assert_array_equal(images[e, -1], squares.load(i)[0])
                np.testing.assert_array_equal(truth[e], squares.load(i)[1] == ids)
                for t, j in enumerate(context):
                    np.testing.assert_array_equal(images[e, t], squares.load(j)[0])
                    np.testing.assert_array_equal(masks[e, t], squares.load(j)[1] == ids)
                assert i not in context
    assert lengths == {3, 4}


def test_batches_depend_on_seed_epoch_and_number(squares, table):
    make = lambda seed=0, **kw: EpisodeBatches(squares, table, batch=4, seed=seed, **kw)
    a, b = make(), make(workers=2)
    for x, y in zip(a.iter_from(2), list(b)[2:], strict=True):
        for p, q in zip(x, y, strict=True): np.testing.assert_array_equal(p, q)
    same = lambda p, q: str(p) == str(q)
    assert same(a.plan(0, 0), b.plan(0, 0)) and not same(a.plan(0, 0), a.plan(1, 0)) and not same(a.plan(0, 0), a.plan(0, 1)) and not same(a.plan(0, 0), make(1).plan(0, 0))


def test_processes_share_an_epoch(squares, table, monkeypatch):
    asked = []
    for rank in (0, 1):
        monkeypatch.setattr(finetuning, "rank_and_world", lambda: (rank, 2))
        b = EpisodeBatches(squares, table, batch=3, context=3)
        plans = [b.plan(0, n) for n in range(len(b))]
        asked.append([i for p in plans for i, _, _ in p])
        if rank == 0: lengths = [len(p[0][1]) for p in plans]
        else: assert [len(p[0][1]) for p in plans] == lengths
    assert not set(asked[0]) & set(asked[1]) and len(asked[0]) == len(asked[1])


def test_fewer_images_than_a_batch(squares, table, examples):
    few = examples.subset([3, 4, 12])
    s = SquareExamples(few, 64)
    b = EpisodeBatches(s, look_through(s), batch=8, context=4)
    assert len(b) == 1 and len(b.make(0, 0)[0]) == 8


def test_images_of_any_size_become_squares():
    r = np.random.default_rng(0)
    images = [r.integers(0, 255, (h, w, 3), dtype=np.uint8) for h, w in ((50, 80), (120, 64), (64, 64))]
    labels = [np.zeros(i.shape[:2], int) for i in images]
    for l in labels: l[10:40, 20:60], l[0:8, 0:8] = 7, 300
    s = SquareExamples(array_examples(images, labels), 64)
    seg = load_segmenter("nano", device="cpu")
    for i in range(3):
        image, small = s.load(i)
        assert image.shape == (64, 64, 3) and small.shape == (64, 64) and set(np.unique(small)) == {0, 7, 300}
        a, b = seg.encode(image[None]).maps, seg.encode(images[i][None]).maps
        for x, y in zip(a, b): assert torch.equal(x, y)                                   # as the segmenter itself would see it


# the loss

@pytest.mark.parametrize("seed", range(6))
def test_mask_losses_against_definitions(seed):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 3, 6, 5, generator=g, dtype=torch.float64)*3, (torch.rand(2, 3, 6, 5, generator=g) < .3).double()
    bce, dice, iou = mask_losses(x, y, 2.5)
    p = x.sigmoid()
    torch.testing.assert_close(bce, -(2.5*y*p.log() + (1 - y)*(1 - p).log()).mean((-2, -1)))
    torch.testing.assert_close(dice, 1 - (2*(p*y).sum((-2, -1)) + 1)/((p + y).sum((-2, -1)) + 1))
    for a in range(2):
        for b in range(3):
            m, t = {tuple(v) for v in (x[a, b] > 0).nonzero().tolist()}, {tuple(v) for v in (y[a, b] > 0).nonzero().tolist()}
            assert iou[a, b].item() == pytest.approx(len(m & t)/max(1, len(m | t)))
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: mask_losses(v, y)[:2], (x,))


def prediction(b=2, o=3, m=3, side=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *s: torch.randn(*s, generator=g).requires_grad_()
    c = rand(b, o, m, side, side)
    return Prediction(c[:, :, 0], rand(b, o), rand(b, o), c, rand(b, o, m))


def test_only_the_best_proposal_learns():
    p = prediction()
    truth = torch.zeros(2, 3, 32, 32, dtype=torch.bool)
    truth[:, :, 4:20, 8:24] = True
    with torch.no_grad(): p.candidates[0, 1, 2] = F.interpolate(truth[:1, :1].float(), size=(8, 8), mode="area")[0, 0]*8 - 4
    loss, parts = episode_loss(p, truth, iou=0.)
    loss.backward()
    touched = p.candidates.grad.flatten(3).abs().sum(-1) > 0
    assert (touched.sum(-1) == 1).all() and touched[0, 1].tolist() == [False, False, True]
    assert set(parts) == {"bce", "soft_dice", "score", "iou"}


def test_absent_classes():
    p, truth = prediction(m=1), torch.zeros(2, 3, 32, 32, dtype=torch.bool)
    truth[0, 0, :9, :9] = True
    base, parts = episode_loss(p, truth)
    p2 = prediction(m=1)
    with torch.no_grad(): p2.candidate_iou[0, 1:] += 5; p2.candidate_iou[1] += 5
    assert episode_loss(p2, truth)[0].item() == pytest.approx(base.item())                # the IoU of what is not there is nobody's business
    sure = torch.where(truth.flatten(2).any(-1), 9., -9.)
    good, bad = (episode_loss(Prediction(p.logits, p.iou, s, p.candidates, p.candidate_iou), truth)[0] for s in (sure, -sure))
    assert good < base < bad
    dark = Prediction(p.logits, p.iou, p.object_score, torch.where(truth.flatten(2).any(-1)[:, :, None, None, None], p.candidates, -9.), p.candidate_iou)
    assert episode_loss(dark, truth)[0] < base                                            # less claimed where nothing is
    no_class = episode_loss(p, torch.zeros_like(truth))[1]
    assert no_class["soft_dice"] == 0 and no_class["iou"] == 0


def test_perfect_prediction_costs_nothing():
    truth = torch.zeros(1, 2, 32, 32, dtype=torch.bool)
    truth[0, 0, 8:24, 8:24] = True
    x = truth[:, :, None].float()*60 - 30
    loss, _ = episode_loss(Prediction(x[:, :, 0], None, torch.tensor([[30., -30.]]), x, torch.tensor([[[1.], [.3]]])), truth)
    assert loss.item() == pytest.approx(0, abs=1e-4)


# settings

def test_presets():
    paper, nano = FinetuneConfig(), FinetuneConfig("nano")
    assert (paper.segmenter, paper.lr, paper.batch, paper.epochs, paper.pool) == ("base_plus", 1e-5, 1, 100, 10)
    assert (nano.segmenter, nano.lr, nano.batch, nano.schedule, nano.classes, nano.pos_weight, nano.checkpoint) == ("nano", 1e-3, 8, "cosine", 3, 3., None)
    assert FinetuneConfig(**json.loads(json.dumps(vars(override(nano, ["freeze=memory_encoder"]))))) == override(nano, ["freeze=memory_encoder"])


@pytest.mark.parametrize("changes, words", [(dict(preset="huge"), "presets are paper, nano"), (dict(rate=1), "unknown setting 'rate'"), (dict(lr=0), "lr=0"), (dict(lr=float("nan")), "lr=nan"),
    (dict(context=0), "context=0"), (dict(classes=0), "classes=0"), (dict(own=1.5), "own=1.5"), (dict(schedule="linear"), "schedule='linear'"), (dict(freeze=("neck",)), "freeze='neck'"),
    (dict(batch=0), "batch=0"), (dict(steps=-1), "steps=-1"), (dict(score=float("inf")), "score=inf")])
def test_bad_settings(changes, words):
    with pytest.raises(InputError, match=words): FinetuneConfig(**changes)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(FinetuneConfig) if isinstance(f.default, (int, float)) and not isinstance(f.default, bool)] + ["steps", "image_size"])
def test_numbers_are_finite(field):
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(InputError, match=f"{field}="): FinetuneConfig(**{field: value})


def test_freezable_parts_exist():
    model = load_segmenter("nano", device="cpu").model
    for part in FREEZABLE: assert any(True for _ in model.get_submodule(part).parameters())


# training

TINY = FinetuneConfig("nano", steps=7, batch=2, context=2, seed=2)


def weights(run): return (run.path/"last.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(examples, tmp_path_factory):
    return finetune(examples, TINY, retriever=Thumbnails(), out=tmp_path_factory.mktemp("run")/"whole", device="cpu")


def test_a_run_is_a_folder(whole):
    assert {p.relative_to(whole.path).as_posix() for p in whole.path.rglob("*") if p.is_file()} == {"config.json", "log.csv", "loss.png", "last.safetensors", "state/last.pt"}
    facts = json.loads((whole.path/"config.json").read_text())
    assert facts["kind"] == "finetune" and facts["config"]["steps"] == 7 and facts["retriever"] == "thumbnails" and facts["segmenter"]["name"] == "nano"
    log = whole.log
    assert log.step.tolist() == list(range(1, 8)) and np.isfinite(log[["loss", "bce", "soft_dice", "score", "iou"]].values).all()
    assert (log.loss > log.bce).all() and log.soft_dice.between(0, 1).all() and log.iou.between(0, 1).all()
    seg = load_segmenter("nano", whole.path/"last.safetensors", device="cpu")
    assert seg.fingerprint == load_finetuned(whole.path).segmenter("cpu").fingerprint != load_segmenter("nano", device="cpu", seed=2).fingerprint
    assert not seg.model.training


class Stop(Callback):
    "Interrupts at the end of a step, or breaks down in the middle of the next"
    def __init__(self, step, how): self.step, self.how = step, how
    def after_batch(self):
        if self.how == "interrupt" and self.learn.step == self.step - 1: self.learn.stop()
    def before_batch(self):
        if self.how == "crash" and self.learn.step == self.step: raise RuntimeError("power cut")


@pytest.mark.parametrize("step, how", [(2, "interrupt"), (6, "interrupt"), (3, "crash")])
def test_resume_is_bit_identical(examples, whole, tmp_path, step, how):
    cfg = override(TINY, dict(save_minutes=0.))                           # 0: the state is saved after each step
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        finetune(examples, cfg, retriever=Thumbnails(), out=tmp_path/"run", device="cpu", cbs=[Stop(step, how)])
    assert len(pd.read_csv(tmp_path/"run"/"log.csv")) == step
    if not (tmp_path/"run"/"last.safetensors").exists():
        with pytest.raises(InputError, match="--resume"): load_finetuned(tmp_path/"run")
    run = finetune(examples, cfg, retriever=Thumbnails(), out=tmp_path/"run", device="cpu", resume=True)
    assert weights(run) == weights(whole)
    pd.testing.assert_frame_equal(run.log.drop(columns=["frames_per_s", "seconds"]), whole.log.drop(columns=["frames_per_s", "seconds"]))


def test_resume_refuses_another_training(examples, whole, tmp_path):
    go = lambda ex=examples, cfg=TINY, retriever=Thumbnails(), **kw: finetune(ex, cfg, retriever=retriever, out=whole.path, resume=True, device="cpu", **kw)
    before = weights(whole)
    with pytest.raises(InputError, match="begun with lr=0.001"): go(cfg=override(TINY, ["lr=0.01"]))
    with pytest.raises(InputError, match="begun with data"): go(ex=examples.subset(range(12)))
    with pytest.raises(InputError, match="begun with retriever=thumbnails, and now retriever=random"): go(retriever=None)
    with pytest.raises(InputError, match="begun with segmenter"): go(segmenter=load_segmenter("nano", device="cpu", seed=9))
    with pytest.raises(InputError, match="exists already"): finetune(examples, TINY, out=whole.path)
    assert weights(whole) == before
    assert weights(go(cfg=override(TINY, ["save_minutes=3", "workers=1"]))) == before      # nothing is left to do, and these two settings may change


def test_resume_refuses_other_pictures_and_vectors(tmp_path):
    r = np.random.default_rng(0)
    images, labels, vectors = r.integers(0, 255, (6, 64, 64, 3), dtype=np.uint8), np.zeros((6, 64, 64), int), r.normal(size=(6, 3))
    labels[:, 10:40, 10:40] = 1
    def go(im=images, v=vectors, known=None, **kw):
        return finetune(array_examples(list(im), list(labels), classes={1: "a"}, known=known), override(TINY, dict(steps=1)), retriever=v, out=tmp_path/"run", device="cpu", **kw)
    before = weights(go())
    with pytest.raises(InputError, match="begun with data"): go(255 - images, resume=True)
    with pytest.raises(InputError, match="begun with retriever=vectors-[0-9a-f]{16}, and now retriever=vectors-"): go(v=vectors[::-1], resume=True)
    assert weights(go(resume=True)) == before


def test_a_run_of_another_kind_is_named(examples, whole, tmp_path):
    with pytest.raises(InputError, match="holds a run of `freerep finetune`: expected one of `freerep train`"): load_run(whole.path)
    with pytest.raises(InputError, match="holds a run of `freerep finetune`: expected one of `freerep retriever` or"): load_retriever(whole.path)
    with pytest.raises(InputError, match="is a file: expected the folder of a run of `freerep finetune`"): load_finetuned(whole.path/"last.safetensors")
    (tmp_path/"run").mkdir()
    with pytest.raises(InputError, match="holds no run: .*`freerep finetune`"): load_finetuned(tmp_path/"run")
    (tmp_path/"run"/"config.json").write_text(json.dumps({**json.loads((whole.path/"config.json").read_text()), "kind": "pretrain"}))
    with pytest.raises(InputError, match="holds a run of `freerep train`: expected one of `freerep finetune`"): load_finetuned(tmp_path/"run")
    with pytest.raises(InputError, match="holds a run of `freerep train`"): finetune(examples, TINY, out=tmp_path/"run", resume=True)


def test_frozen_parts_and_the_given_segmenter_stay(examples, tmp_path):
    seg = load_segmenter("nano", device="cpu", seed=5)
    before = {k: v.clone() for k, v in seg.model.state_dict().items()}
    cfg = FinetuneConfig("nano", steps=2, batch=2, context=2, freeze=("image_encoder.trunk", "memory_attention"), accumulate=2)
    run = finetune(examples, cfg, segmenter=seg, out=tmp_path/"run")
    after = run.segmenter("cpu").model.state_dict()
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert not any(k.startswith(("image_encoder.trunk", "memory_attention")) for k in changed)
    assert any(k.startswith("image_encoder.neck") for k in changed) and any(k.startswith("sam_mask_decoder") for k in changed) and any(k.startswith("memory_encoder") for k in changed)
    assert all(torch.equal(v, before[k]) for k, v in seg.model.state_dict().items()) and all(p.requires_grad for p in seg.model.parameters())
    assert len(run.log) == 2


def test_begins_with_a_file(examples, whole, tmp_path):
    cfg = override(TINY, dict(steps=0, checkpoint=str(whole.path/"last.safetensors")))
    assert json.loads((finetune(examples, cfg, out=tmp_path/"run", device="cpu").path/"config.json").read_text())["segmenter"]["fingerprint"] == whole.segmenter("cpu").fingerprint


def test_learns_by_heart(examples, tmp_path):
    cfg = FinetuneConfig("nano", steps=30, batch=4, context=1, classes=2, own=0.)
    log = finetune(examples.subset([5, 6, 14, 15]), cfg, out=tmp_path/"run", device="cpu").log
    assert log.loss[-6:].mean() < .75*log.loss[:3].mean()


@pytest.mark.parametrize("vectors", [np.zeros((4, 3)), np.full((30, 3), np.nan), np.zeros(30)])
def test_bad_vectors(examples, vectors, tmp_path):
    with pytest.raises(InputError, match="expected finite vectors"): finetune(examples, TINY, retriever=vectors, out=tmp_path/"run")
    assert not (tmp_path/"run").exists()


def test_nothing_to_learn_from(tmp_path):
    image, empty = np.zeros((64, 64, 3), np.uint8), np.zeros((64, 64), int)
    some = empty.copy(); some[:9] = 1
    with pytest.raises(InputError, match="at least two"): finetune(array_examples([image]*3, [empty, empty, some], classes={1: "a"}), TINY, out=tmp_path/"run")
    only = array_examples([image]*2, [some, some*2], classes={1: "a", 2: "b"}, known=[{1}, {2}])
    with pytest.raises(InputError, match="is shown by two images"): finetune(only, TINY, out=tmp_path/"run")
    with pytest.raises(InputError, match="does not exist"): load_finetuned(tmp_path/"nowhere")
