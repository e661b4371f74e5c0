"""freerep.evaluation: the dictionary that is written, labels that only score, and input that cannot be scored."""
import json, math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

import freerep.evaluation as evaluation
from freerep.core import InputError, write_json
from freerep.evaluation import evaluate, evaluate_path, evaluate_source, metrics_table
from freerep.index import Index, embed
from freerep.metrics import few_shot
from helpers import scene, write_realcolon
from test_index import Run, films, table


def labelled(seed=0, n=80, polyps=12, videos=4, d=8):
    "An index whose embeddings know something of polyps and videos"
    g = np.random.default_rng(seed)
    who = g.integers(0, polyps, n)
    x = g.normal(size=(polyps, d))[who] + g.normal(size=(videos, d))[who % videos] + g.normal(size=(n, d))
    t = table(n).assign(video=[f"00{v % videos}" for v in who], identity=[f"00{v % videos}_{v}" for v in who])
    return Index(x/np.linalg.norm(x, axis=1, keepdims=True), t, dict(run="runs/a", view="BoxCrop(factor=5.0)", versions=dict(torch="old")))


def figures(m): return [v for part in ("retrieval", "reid", "few_shot", "few_shot_fixed") for v in m[part].values() if not isinstance(v, dict)]


def test_the_dictionary_is_the_one_that_was_agreed(tmp_path):
    m = evaluate(labelled(), seed=3)
    assert set(m) == {"retrieval", "reid", "few_shot", "few_shot_fixed", "n_tracklets", "n_polyps", "n_videos", "config", "versions"}
    assert {"mAP", "HR@1", "HR@5", "within_video_mAP", "queries", "skipped"} <= set(m["retrieval"])
    assert set(m["reid"]) == {"AUROC", "AUPR", "pairs"}
    assert set(m["few_shot"]) == {"1", "2", "3", "5", "10", "draws", "skipped"} and set(m["few_shot"]["skipped"]) == {"1", "2", "3", "5", "10"}
    assert set(m["few_shot_fixed"]) == {"1", "2", "3", "5", "10", "polyps"} and m["few_shot"]["draws"] == 50
    assert (m["n_tracklets"], m["n_polyps"], m["n_videos"]) == (80, 12, 4)
    assert m["config"] == dict(seed=3, run="runs/a", view="BoxCrop(factor=5.0)") and m["versions"]["torch"] != "old"
    fractions = [v for part in ("retrieval", "reid", "few_shot", "few_shot_fixed") for k, v in m[part].items() if isinstance(v, float)]
    assert fractions and all(0 <= v <= 1 for v in fractions)
    write_json(m, tmp_path/"m.json")
    again = json.loads((tmp_path/"m.json").read_text())
    assert again == json.loads(json.dumps(m)) and again["few_shot"]["1"] == m["few_shot"]["1"]


@pytest.mark.parametrize("seed", range(6))
def test_figures_equal_scikit_learn(seed):
    index = labelled(seed)
    m, x, t = evaluate(index, seed=seed), index.embeddings.astype(np.float64), index.table
    s, ids, vid = x @ x.T, t.identity.to_numpy(str), t.video.to_numpy(str)
    i, j = np.triu_indices(len(x), 1)
    assert m["reid"]["AUROC"] == pytest.approx(roc_auc_score(ids[i] == ids[j], s[i, j]), abs=1e-6)
    assert m["reid"]["AUPR"] == pytest.approx(average_precision_score(ids[i] == ids[j], s[i, j]), abs=1e-6)
    for key, same in (("mAP", np.zeros(len(x))), ("within_video_mAP", vid)):
        ap = []
        for q in range(len(x)):
            rest = (np.arange(len(x)) != q) & (same == same[q])
            rel = ids[rest] == ids[q]
            if rel.any() and not rel.all(): ap.append(average_precision_score(rel, s[q][rest]))
        assert m["retrieval"][key] == pytest.approx(np.mean(ap), abs=1e-6)
    shots = few_shot(x, ids, seed=seed)
    assert all(m["few_shot"][k] == pytest.approx(shots[k]) for k in ("1", "5") if shots[k] is not None)


@given(st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_labels_only_score(seed):
    "Names and the order of rows do not matter (few-shot draws go by name and row, so only their kind is compared)"
    index, g = labelled(seed, n=50), np.random.default_rng(seed)
    m = evaluate(index)
    renamed = dict(zip(index.table.identity.unique(), g.permutation(index.table.identity.nunique()).astype(str)))
    a = evaluate(Index(index.embeddings, index.table.assign(identity=index.table.identity.map(renamed))))
    order = g.permutation(50)
    b = evaluate(Index(index.embeddings[order], index.table.iloc[order].assign(row=np.arange(50))))
    for other in (a, b):
        assert other["retrieval"] == pytest.approx(m["retrieval"], abs=1e-9) and other["reid"] == pytest.approx(m["reid"], abs=1e-9)
        assert other["few_shot"]["skipped"] == m["few_shot"]["skipped"]


def test_the_embedding_of_a_source_does_not_know_the_names():
    "The same boxes under other names give the same vectors"
    run, source, renamed = Run(), films(), films()
    for v in renamed: v.annotations["identity"] = v.annotations.identity.map(lambda s: "z" + s[::-1])
    a, b = (embed(s, run, boxes=True) for s in (source, renamed))
    pairs = a.table.merge(b.table, on=["video", "start_frame", "x0"], suffixes=("_a", "_b"))
    assert len(pairs) == len(a)
    np.testing.assert_allclose(a.embeddings[pairs.row_a], b.embeddings[pairs.row_b], atol=1e-6)


def test_one_seed_one_answer():
    index = labelled()
    assert figures(evaluate(index)) == figures(evaluate(index)) and figures(evaluate(index, seed=1)) != figures(evaluate(index))


def test_tracklets_without_identity_are_left_out_with_a_note(capsys):
    index = labelled()
    hidden = index.table.assign(identity=np.where(np.arange(80) % 4 == 0, "", index.table.identity))
    keep = np.flatnonzero(np.arange(80) % 4)
    part = Index(index.embeddings[keep], index.table.iloc[keep].assign(row=np.arange(60)))
    assert figures(evaluate(Index(index.embeddings, hidden))) == figures(evaluate(part))
    assert "20 of 80 tracklets have no identity" in capsys.readouterr().err


def test_videos_of_one_name_in_two_sources_are_two_videos():
    index = labelled()
    t = index.table.assign(video="clip.mp4", source=index.table.video)
    assert evaluate(Index(index.embeddings, t))["n_videos"] == 4
    assert evaluate(Index(index.embeddings, t))["retrieval"] == evaluate(index)["retrieval"]


@pytest.mark.parametrize("identities, word", [([""]*6, "no tracklet of the index has an identity.*--boxes"), (list("aaaaaa"), "at least two polyps"),
                                              (list("abcdef"), "two tracklets of one"), (["a", "a", "", "", "", ""], "at least two polyps")])
def test_an_index_that_cannot_be_scored(identities, word):
    with pytest.raises(InputError, match=word): evaluate(Index(np.eye(6), table(6).assign(identity=identities)))


def test_an_empty_index():
    with pytest.raises(InputError, match="identity"): evaluate(Index(np.zeros((0, 4)), table(0)))


def test_figures_that_do_not_exist_are_null():
    "Every polyp in a video of its own, and none with more than two tracklets"
    t = table(6).assign(identity=list("aabbcc"), video=list("aabbcc"))
    m = evaluate(Index(np.random.default_rng(0).normal(size=(6, 4)), t))
    assert m["retrieval"]["within_video_mAP"] is None and m["few_shot"]["2"] is None and m["few_shot"]["skipped"] == {"1": 0, "2": 3, "3": 3, "5": 3, "10": 3}
    assert math.isnan(metrics_table(m).loc["", "within-video mAP"]) and math.isnan(metrics_table(m).loc["", "K=10"])


def test_the_table_is_in_percent_with_one_decimal():
    m = evaluate(labelled())
    shown = metrics_table({"a": m, "b": m})
    assert shown.index.tolist() == ["a", "b"] and shown.columns.tolist() == ["mAP", "HR@1", "HR@5", "within-video mAP", "AUROC", "AUPR", "K=1", "K=2", "K=3", "K=5", "K=10"]
    assert shown.loc["a", "mAP"] == round(100*m["retrieval"]["mAP"], 1) and shown.loc["a", "K=5"] == round(100*m["few_shot"]["5"], 1)
    pd.testing.assert_series_equal(metrics_table(m).loc[""], shown.loc["b"], check_names=False)


# ---- from a source or a path

@pytest.fixture(scope="module")
def procedures(tmp_path_factory):
    "Two procedures on disk; polyp a comes twice, b twice, c once"
    folder = tmp_path_factory.mktemp("evaluate")/"procedures"
    box = lambda who, first, last: [(f, who, 20, 10, 50, 40) for f in range(first, last)]
    write_realcolon(folder, "901-001", [scene(t) for t in range(60)], box("901-001_1", 0, 12) + box("901-001_1", 20, 34) + box("901-001_2", 40, 60))
    write_realcolon(folder, "901-002", [scene(t, seed=1) for t in range(40)], box("901-002_1", 0, 15) + box("901-002_1", 20, 38))
    return folder


def test_source_index_and_path_agree(procedures, tmp_path):
    run = Run()
    index = embed(procedures, run, boxes=True)
    index.save(tmp_path/"index")
    m = evaluate(index, seed=2)
    assert (m["n_tracklets"], m["n_polyps"], m["n_videos"]) == (5, 3, 2) and m["retrieval"]["skipped"] == 1
    for other in (evaluate_source(procedures, run, seed=2), evaluate_path(procedures, run, seed=2), evaluate_path(tmp_path/"index", seed=2)):
        assert figures(other) == pytest.approx(figures(m), abs=1e-9, nan_ok=True)
        assert other["config"] == json.loads(json.dumps(m["config"]))
    masked = evaluate_path(procedures, run, mask_polyp=True, crop_scale=2.)
    assert masked["config"]["mask_polyp"] is True and masked["config"]["view"] == "BoxCrop(factor=2.0)"


def test_a_run_is_given_by_its_path(procedures, monkeypatch):
    import freerep.index as index_module
    asked = []
    monkeypatch.setattr(index_module, "load_run", lambda path: asked.append(path) or Run())
    evaluate_path(procedures, "runs/a")
    assert asked == ["runs/a"]


def test_paths_and_wishes_that_do_not_fit(procedures, tmp_path):
    labelled().save(tmp_path/"index")
    with pytest.raises(InputError, match="--run"): evaluate_path(procedures)
    with pytest.raises(InputError, match="holds no pixels"): evaluate_path(tmp_path/"index", mask_polyp=True)
    with pytest.raises(InputError, match="holds no pixels"): evaluate_path(tmp_path/"index", crop_scale=1.3)
    with pytest.raises(InputError, match="nowhere"): evaluate_path(tmp_path/"nowhere", Run())
    with pytest.raises(InputError, match="crop_scale=0"): evaluate_source(procedures, Run(), crop_scale=0)
    with pytest.raises(InputError, match="does not exist"): evaluate_path(procedures, tmp_path/"no-run")


def test_embeddings_from_elsewhere(tmp_path):
    "Two files, no meta, vectors that are not of length one"
    index = labelled()
    np.save(tmp_path/"embeddings.npy", 7*index.embeddings.astype(np.float64))
    index.table.to_csv(tmp_path/"tracklets.csv", index=False)
    m = evaluate_path(tmp_path)
    assert figures(m) == pytest.approx(figures(evaluate(index)), abs=1e-6) and m["config"] == dict(seed=0)


def test_the_tables_columns_exist_in_the_results():
    m = evaluate(labelled())
    for part, key in evaluation._TABLE.values(): assert key in m[part]
