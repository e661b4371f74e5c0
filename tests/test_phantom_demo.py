"The demo of segmentation: rows that compare what they say, scores that are those of the files, and parts that are left usable"
import numpy as np
import pandas as pd
import pytest
from fastcore.xml import to_xml
from PIL import Image

from freerep.bank import ExampleBank, open_bank
from freerep.core import InputError
from freerep.examples import array_examples, open_examples
from freerep.image_segmentation import segment_image
from freerep.phantom_demo import (QUICK_SEGMENTATION, SEGMENTATION_PARTS, SegmentationSize, choose_contexts, copied, demo_answers, from_bank, mistaken, rank_correlation,
                                       score_answers, segmentation_demo, segmentation_section, segmentation_table, spread, summarise)
from freerep.segmenter import load_segmenter

SIZE = SegmentationSize(train=4, test=2, slices=12, retriever_steps=2, steps=2, queries=5, k=3)
ROWS = ("before", "copied", "wrong_context", "followed", "random_context", "after")


def blocks(seed, n=6, classes=(1, 3, 4, 9), side=48):
    "Pictures of noise with labels in blocks of eight pixels, some classes missing here and there"
    r = np.random.default_rng(seed)
    labels = np.kron(r.choice([0, *classes], (n, side//8, side//8)), np.ones((8, 8), int))
    return array_examples(list(r.integers(0, 256, (n, side, side), dtype=np.uint8)), list(labels), classes={c: f"organ {c}" for c in classes})


@pytest.fixture(scope="module")
def segmenter(): return load_segmenter("nano", device="cpu", seed=1)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")/"out"
    return out, segmentation_demo(out, seed=103, size=SIZE)


@pytest.mark.parametrize("seed", range(5))
def test_mistaken_moves_every_class(seed):
    "No pixel keeps its class, background stays, and a full turn leads back"
    e = blocks(seed)
    wrong, back = mistaken(e), e
    for _ in e.classes: back = mistaken(back)
    assert wrong.classes == e.classes and wrong.names == e.names
    for i in range(len(e)):
        a, b = e.labels(i), wrong.labels(i)
        np.testing.assert_array_equal(wrong.image(i), e.image(i))
        np.testing.assert_array_equal(a == 0, b == 0)
        assert (a != b)[a > 0].all()
        assert sorted(np.unique(b, return_counts=True)[1]) == sorted(np.unique(a, return_counts=True)[1])
        np.testing.assert_array_equal(back.labels(i), a)


def test_mistaken_keeps_what_is_unlabelled():
    "A class is known in the wrong examples where the class whose mask it carries was known"
    r = np.random.default_rng(0)
    e = array_examples(list(r.integers(0, 256, (2, 8, 8), dtype=np.uint8)), [np.full((8, 8), 1), np.full((8, 8), 3)], classes={1: "a", 2: "b", 3: "c"}, known=[{1, 2}, {3}])
    wrong = mistaken(e)
    assert [wrong.known(i) for i in range(2)] == [{2, 3}, {1}]
    with pytest.raises(InputError, match="at least two classes"): mistaken(array_examples([np.zeros((8, 8), np.uint8)], [np.ones((8, 8), int)]))


@pytest.mark.parametrize("n,most", [(1, 1), (1, 9), (7, 7), (10, 3), (100, 17), (144, 72)])
def test_spread(n, most):
    at = spread(n, most)
    assert len(at) == min(n, most) and at == sorted(set(at)) and at[0] == 0 and (len(at) == 1 or at[-1] == n - 1)
    if len(at) > 1: assert np.ptp(np.diff(at)) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_rank_correlation_is_that_of_scipy(seed):
    stats = pytest.importorskip("scipy.stats")
    r = np.random.default_rng(seed)
    a = r.integers(0, 8, 40)
    b = a + r.normal(0, 3, 40).round()
    assert rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert np.isnan(rank_correlation(a, np.ones(40)))


@pytest.mark.parametrize("seed", range(4))
def test_scores_equal_counting(seed, tmp_path):
    "Any answer is scored as pixel sets are counted, and written as it was scored"
    e, r = blocks(seed), np.random.default_rng(seed)
    given = {i: np.where(r.random((48, 48)) < .5, e.labels(i), r.choice([0, 1, 3], (48, 48))) for i in (0, 2, 5)}
    queue = iter(given.values())
    table = score_answers(e, {i: np.array([1]) for i in given}, lambda image, context: (next(queue), {c: c/10 for c in e.classes}), tmp_path)
    rows = table.set_index(["query", "class"])
    expected = 0
    for i, p in given.items():
        t = e.labels(i)
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path/f"{e.names[i]}.png")), p)
        for c in e.classes:
            if not (p == c).any() and not (t == c).any(): continue
            expected += 1
            assert rows.dice[e.names[i], c] == pytest.approx(2*((p == c) & (t == c)).sum()/((p == c).sum() + (t == c).sum()))
            assert rows.confidence[e.names[i], c] == pytest.approx(c/10)
    assert len(table) == expected


def test_copied_fits_the_query(segmenter):
    "Labels of the best match, brought to the size of the query"
    e = blocks(1)
    answer = copied(ExampleBank(e, retriever="random", segmenter=segmenter))
    labels, confidence = answer(np.zeros((96, 144, 3), np.uint8), np.array([3, 0, 4]))
    np.testing.assert_array_equal(labels, np.kron(e.labels(4), np.ones((2, 3), int)))
    assert confidence == {}


def test_rows_differ_only_in_what_they_say(segmenter):
    "Wrong masks and untrained get the contexts of the trained row; random ones are others for each query, and the same again"
    e, q = blocks(2, n=9), blocks(3)
    bank = ExampleBank(e, retriever="random", segmenter=segmenter)
    rows, again = (demo_answers(bank, load_segmenter("nano", device="cpu", seed=2), q, [0, 1, 4], 3) for _ in range(2))
    assert tuple(rows) == ROWS
    near = rows["after"][1]
    for name in ("before", "copied", "wrong_context", "followed"): assert rows[name][1] is near
    assert rows["followed"][2] is rows["wrong_context"][2]
    for name in set(ROWS) - {"followed"}: assert rows[name][0] is q
    np.testing.assert_array_equal(rows["followed"][0].labels(1), mistaken(q).labels(1))
    for i, context in near.items(): np.testing.assert_array_equal(context, bank.select(q.image(i), 3))
    random = rows["random_context"][1]
    assert len({tuple(sorted(c)) for c in random.values()}) > 1
    for i in random: np.testing.assert_array_equal(random[i], again["random_context"][1][i])
    wrong = ExampleBank(mistaken(e), retriever=bank.retriever, segmenter=segmenter)
    for name, expected in (("after", bank), ("wrong_context", wrong)):
        labels, confidence = rows[name][2](q.image(4), near[4])
        result = segment_image(expected, q.image(4), context=near[4])
        np.testing.assert_array_equal(labels, result.labels)
        assert confidence == result.confidence


def test_demo_scores_are_those_of_its_files(demo):
    "Dice from the written masks and the phantoms, counted here, is what the demo reports; so is the correlation"
    out, metrics = demo
    test = open_examples(out/"phantoms_test")
    scores = pd.read_csv(out/"segmentation"/"scores.csv")
    assert {p.name for p in out.iterdir()} == set(SEGMENTATION_PARTS)
    assert set(scores.row) <= set(ROWS) and scores[scores.row == "after"]["query"].nunique() == SIZE.queries
    for row in ROWS:
        truth = mistaken(test) if row == "followed" else test
        found = {c: [] for c in test.classes}
        files = sorted((out/"segmentation"/row).glob("*.png"))
        assert len(files) == SIZE.queries
        for f in files:
            p, t = np.asarray(Image.open(f)), truth.labels([n.replace("/", "_") for n in test.names].index(f.stem))
            for c in found:
                if (p == c).any() or (t == c).any(): found[c].append(2*((p == c) & (t == c)).sum()/((p == c).sum() + (t == c).sum()))
        assert metrics["segmentation"][row]["dice"] == pytest.approx(np.mean(sum(found.values(), [])))
        for c, name in test.classes.items():
            said = metrics["segmentation"]["per_class"][name][row]
            assert said is None if not found[c] else said == pytest.approx(np.mean(found[c]))
    after = scores[scores.row == "after"]
    assert metrics["confidence_correlation"] == pytest.approx(rank_correlation(after.confidence, after.dice), abs=1e-6, nan_ok=True)
    stages = {k: v for k, v in metrics["seconds"].items() if k != "segmentation"}
    assert set(stages) == {"phantoms", "retriever", "segmenter", "segmenting"} and metrics["seconds"]["segmentation"] == pytest.approx(sum(stages.values()), abs=.1)


def test_demo_leaves_a_bank(demo):
    "The bank on disk gives the mask that was scored, and train and test phantoms are different ones"
    out, _ = demo
    test, train = open_examples(out/"phantoms_test"), open_examples(out/"phantoms_train")
    assert not {e.image.tobytes() for e in test} & {e.image.tobytes() for e in train}
    bank = open_bank(out/"bank", device="cpu")
    i = spread(len(test), SIZE.queries)[2]
    labels = segment_image(bank, test.image(i), context=choose_contexts(bank, test, [i], SIZE.k)[i]).labels
    np.testing.assert_array_equal(labels, np.asarray(Image.open(out/"segmentation"/"after"/f"{test.names[i].replace('/', '_')}.png")))
    assert from_bank(bank)(test.image(i), np.array([0]))[1].keys() == bank.classes.keys()


def test_table_and_section(demo):
    out, metrics = demo
    table = segmentation_table(metrics)
    assert len(table) == len(ROWS) and list(table.columns) == ["per slice", "per scan", *metrics["segmentation"]["per_class"]]
    for column, key in (("per slice", "dice"), ("per scan", "dice_scan")): assert table[column].tolist() == [round(100*metrics["segmentation"][r][key], 1) for r in ROWS]
    page = "".join(map(to_xml, segmentation_section(metrics, out, shown=2)))
    assert page.count("<img") == 3 and "://" not in page
    assert all(n in page for n in metrics["segmentation"]["per_class"])


def test_demo_keeps_what_is_there(demo, tmp_path):
    "An earlier part is named and left alone, before anything is made"
    (tmp_path/"segmenter").mkdir()
    (tmp_path/"segmenter"/"mine").write_text("x")
    with pytest.raises(InputError, match="segmenter exists already"): segmentation_demo(tmp_path, size=SIZE)
    assert [p.name for p in tmp_path.iterdir()] == ["segmenter"]


def test_summary_of_a_class_that_never_shows():
    t = pd.DataFrame(dict(scan=["s", "s", "t"], query=["a", "a", "b"], dice=[.2, .4, .9], both=[1, 2, 9], pred=[5, 5, 10], truth=[5, 5, 10])).assign(**{"class": [1, 2, 1]})
    found = summarise({"after": t}, {1: "x", 2: "y", 3: "z"})
    assert found["after"] == {"dice": pytest.approx(.5), "dice_scan": pytest.approx(.5)}
    assert found["per_class"] == {"x": {"after": pytest.approx(.55)}, "y": {"after": pytest.approx(.4)}, "z": {"after": None}}


@pytest.mark.parametrize("seed", range(4))
def test_dice_per_scan_is_that_of_the_whole_scan(seed):
    "Slices of a scan put together and scored as one picture"
    r = np.random.default_rng(seed)
    scans = {f"scan {v}": [(f"{v}/{s}", r.integers(0, 4, (6, 6)), r.integers(0, 4, (6, 6))*(r.random() < .7)) for s in range(3)] for v in range(3)}
    rows = [dict(scan=scan, query=name, **{"class": c}, both=((p == c) & (t == c)).sum(), pred=(p == c).sum(), truth=(t == c).sum()) for scan, slices in scans.items()
            for name, p, t in slices for c in (1, 2, 3) if ((p == c) | (t == c)).any()]
    table = pd.DataFrame(rows).assign(dice=lambda d: 2*d.both/(d.pred + d.truth))
    whole = []
    for slices in scans.values():
        p, t = (np.concatenate([s[i] for s in slices]) for i in (1, 2))
        whole += [2*((p == c) & (t == c)).sum()/((p == c).sum() + (t == c).sum()) for c in (1, 2, 3) if ((p == c) | (t == c)).any()]
    assert summarise({"row": table}, {1: "x", 2: "y", 3: "z"})["row"]["dice_scan"] == pytest.approx(np.mean(whole))


def test_quick_is_smaller():
    quick, full = vars(QUICK_SEGMENTATION), vars(SegmentationSize())
    assert all(quick[k] <= full[k] for k in full) and 5 <= quick["k"] <= 10 and 5 <= full["k"] <= 10
