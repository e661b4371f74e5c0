"The demo of both papers: the parts that are asked for, the files it promises, and nothing of the user's lost"
from functools import partial

import pytest

from freerep import demo
from freerep.core import InputError, read_json
from freerep.demo import RETRIEVAL_PARTS, RetrievalSize, run_demo
from freerep.phantom_demo import SEGMENTATION_PARTS, SegmentationSize

SMALL = dict(retrieval=RetrievalSize(train=2, test=2, frames=300, steps=2),
             segmentation=SegmentationSize(train=3, test=1, slices=8, retriever_steps=2, steps=2, queries=4, k=2))


@pytest.fixture
def small(monkeypatch):
    "The demo with parts that take seconds"
    for name, (make, *show) in demo.DEMO_PARTS.items(): monkeypatch.setitem(demo.DEMO_PARTS, name, (partial(make, size=SMALL[name]), *show))


def test_both_parts(small, tmp_path):
    out = tmp_path/"demo"
    text = run_demo(out, seed=100)
    assert {p.name for p in out.iterdir()} == {".freerep", "metrics.json", "report.html", *RETRIEVAL_PARTS, *SEGMENTATION_PARTS}
    metrics = read_json(out/"metrics.json")
    for row in ("untrained", "trained"): assert {"retrieval", "reid", "few_shot"} <= set(metrics[row])
    assert set(metrics["baselines"]) == {"mean_colour", "thumbnail"}
    for row in ("before", "after", "wrong_context", "random_context"): assert 0 <= metrics["segmentation"][row]["dice"] <= 1
    assert {"retrieval", "segmentation", "training", "segmenter"} <= set(metrics["seconds"]) and metrics["seed"] == 100
    page = (out/"report.html").read_text()
    assert all(words in page for words in ("Retrieval, in percent", "Segmentation, Dice in percent", "Held-out slices")) and "http://" not in page
    assert "Retrieval, in percent" in text and "Segmentation, in percent" in text and "no measure of quality" in text


def test_one_part_and_once_more(small, tmp_path):
    "One part leaves the files of that part; --force replaces what a demo made, and nothing else"
    out = tmp_path/"demo"
    run_demo(out, seed=100, only="segmentation")
    (out/"mine.txt").write_text("kept")
    metrics = read_json(out/"metrics.json")
    assert "segmentation" in metrics and "trained" not in metrics and set(SEGMENTATION_PARTS) <= {p.name for p in out.iterdir()}
    with pytest.raises(InputError, match="--force"): run_demo(out, only="segmentation")
    run_demo(out, seed=100, only="segmentation", force=True)
    assert (out/"mine.txt").read_text() == "kept"
    again = read_json(out/"metrics.json")
    assert again["segmentation"] == metrics["segmentation"] and again["confidence_correlation"] == metrics["confidence_correlation"]


def test_force_spares_a_folder_that_is_called_like_a_part(small, tmp_path):
    "Somebody's train/ is not a demo's"
    (tmp_path/"train").mkdir(); (tmp_path/"train"/"case7.mp4").write_text("mine")
    with pytest.raises(InputError, match="holds train, not written by a demo"): run_demo(tmp_path, force=True)
    assert [p.name for p in tmp_path.rglob("*")] == ["train", "case7.mp4"]


def test_what_is_missing_is_said_first(small, tmp_path, monkeypatch):
    "Without sam2 the demo stops before the first part, and says how to go on; retrieval alone does not ask for it"
    def absent(*args, **kwargs): raise InputError("the package sam2 is not installed")
    monkeypatch.setattr(demo, "load_segmenter", absent)
    with pytest.raises(InputError, match="sam2 is not installed; or leave the segmentation out: --only retrieval"): run_demo(tmp_path/"demo")
    assert not (tmp_path/"demo").exists()
    run_demo(tmp_path/"demo", only="retrieval")
    assert (tmp_path/"demo"/"index").is_dir()


@pytest.mark.parametrize("only", ["magic", "retrieval,magic", ""])
def test_unknown_part(only, tmp_path):
    with pytest.raises(InputError, match="expected retrieval, segmentation"): run_demo(tmp_path/"demo", only=only)
    assert not list(tmp_path.iterdir())
