"""freerep.metrics against loops, scikit-learn and torchmetrics, over many seeds; ties, signs and faults."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score
from torchmetrics.retrieval import RetrievalHitRate, RetrievalMAP

import freerep.metrics as metrics
from freerep.core import InputError, rng
from freerep.metrics import (average_precision, cosine, few_shot, few_shot_polyps, hit_rate, pair_areas, positive_ranks,
                             query_results, reid, retrieval, unit)

SEEDS = range(12)


def gallery(seed, n=90, d=6, polyps=18, videos=5):
    "Embeddings that know something of polyps and videos; some polyps are seen once, and row order is random"
    g = np.random.default_rng(seed)
    ids = g.integers(0, polyps, n)
    vid = ids % videos
    x = g.normal(size=(polyps, d))[ids] + g.normal(size=(videos, d))[vid] + g.normal(size=(n, d))
    return x.astype(np.float32), ids, vid


def reference_queries(x, ids, videos):
    "(query, relevant, scores) of every query that counts, the slow and plain way"
    x = x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
    for q in range(len(x)):
        keep = (np.arange(len(x)) != q) & (videos == videos[q])
        rel = ids[keep] == ids[q]
        if rel.any() and not rel.all(): yield q, rel, (x @ x[q])[keep]


# ---- one list

def test_three_items_that_one_can_count():
    assert average_precision([1, 0, 1]) == 5/6
    assert average_precision([1, 1, 0]) == 1
    assert average_precision([0, 0, 1]) == pytest.approx(1/3)
    assert [hit_rate([0, 0, 1], k=k) for k in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert positive_ranks([0, 1, 1, 0]).tolist() == [2, 3]


@given(st.lists(st.tuples(st.booleans(), st.integers(-6, 6)), min_size=1, max_size=40).filter(lambda x: any(r for r, _ in x)))
@settings(max_examples=200, deadline=None)
def test_ties_count_against_us_and_order_never_matters(items):
    rel, s = np.array([r for r, _ in items]), np.array([v for _, v in items])
    worst = rel[np.lexsort((rel, -s))]                       # of equal scores the irrelevant first
    assert average_precision(rel, s) == pytest.approx(average_precision(worst), abs=1e-12)
    shuffled = np.random.default_rng(len(s)).permutation(len(s))
    assert average_precision(rel[shuffled], s[shuffled]) == average_precision(rel, s)
    assert average_precision(rel, s - 100) == average_precision(rel, s + 100)      # the sign means nothing


@given(st.lists(st.tuples(st.booleans(), st.integers(-4, 4)), min_size=2, max_size=40).filter(lambda x: 0 < sum(r for r, _ in x) < len(x)))
@settings(max_examples=200, deadline=None)
def test_pair_areas_equal_scikit_learn_with_ties(items):
    rel, s = np.array([r for r, _ in items]), np.array([v for _, v in items])
    auroc, aupr = pair_areas(rel, s)
    assert auroc == pytest.approx(roc_auc_score(rel, s), abs=1e-12)
    assert aupr == pytest.approx(average_precision_score(rel, s), abs=1e-12)


# ---- retrieval

@pytest.mark.parametrize("seed", SEEDS)
def test_retrieval_equals_scikit_learn(seed):
    x, ids, vid = gallery(seed)
    m = retrieval(x, ids, videos=vid)
    whole = list(reference_queries(x, ids, np.zeros(len(ids))))
    inside = list(reference_queries(x, ids, vid))
    assert m["mAP"] == pytest.approx(np.mean([average_precision_score(r, s) for _, r, s in whole]), abs=1e-6)
    assert m["within_video_mAP"] == pytest.approx(np.mean([average_precision_score(r, s) for _, r, s in inside]), abs=1e-6)
    for k in (1, 5):
        assert m[f"HR@{k}"] == pytest.approx(np.mean([r[np.argsort(-s)[:k]].any() for _, r, s in whole]), abs=1e-12)
    assert m["queries"] == len(whole) and m["skipped"] == len(x) - len(whole) and m["within_video_queries"] == len(inside)


@pytest.mark.parametrize("seed", SEEDS)
def test_retrieval_equals_torchmetrics(seed):
    x, ids, _ = gallery(seed)
    m = retrieval(x, ids)
    parts = [(np.full(len(s), q), r, s) for q, r, s in reference_queries(x, ids, np.zeros(len(ids)))]
    q, r, s = (torch.from_numpy(np.concatenate(p)) for p in zip(*parts))
    s = s + 2                                                # torchmetrics drops relevant items whose score is not positive
    assert m["mAP"] == pytest.approx(RetrievalMAP()(s, r, indexes=q).item(), abs=1e-6)
    assert m["HR@1"] == pytest.approx(RetrievalHitRate(top_k=1)(s, r, indexes=q).item(), abs=1e-6)
    assert m["HR@5"] == pytest.approx(RetrievalHitRate(top_k=5)(s, r, indexes=q).item(), abs=1e-6)


def test_negative_scores_are_ranked_like_any_others():
    "All polyps point away from each other and the pairs are all below zero; torchmetrics would drop the relevant items"
    s = np.full((6, 6), -.9)
    ids = np.array([0, 0, 1, 1, 2, 2])
    s[ids[:, None] == ids] = -.1
    assert retrieval(s, ids, precomputed=True)["mAP"] == 1
    assert reid(s, ids, precomputed=True)["AUROC"] == 1


@pytest.mark.parametrize("vector", [np.ones(7), np.random.default_rng(0).normal(size=128), -np.arange(1, 65.)])
def test_constant_embeddings_earn_nothing(vector):
    ids = np.repeat(np.arange(20), 10)                       # a table sorted by polyp: a stable sort would shine
    x = np.tile(vector, (200, 1)).astype(np.float32)
    m, r, f = retrieval(x, ids, videos=ids // 4), reid(x, ids), few_shot(x, ids, draws=3)
    base = 9/199
    assert m["mAP"] < base and m["HR@1"] == 0 and m["HR@5"] == 0
    assert r["AUROC"] == .5 and r["AUPR"] == pytest.approx(base)
    assert f["1"] < base
    shuffled = np.random.default_rng(1).permutation(200)
    assert retrieval(x[shuffled], ids[shuffled])["mAP"] == pytest.approx(m["mAP"], abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_embeddings_are_at_chance(seed):
    g = np.random.default_rng(seed)
    ids = np.repeat(np.arange(15), 10)
    r = reid(g.normal(size=(150, 64)), ids)
    assert abs(r["AUROC"] - .5) < .05 and r["AUPR"] < .12


def test_perfect_embeddings_score_one():
    ids = np.repeat(np.arange(6), 12)
    x = np.eye(6)[ids] + 1e-3*np.random.default_rng(0).normal(size=(72, 6))
    m, r, f = retrieval(x, ids, videos=ids // 3), reid(x, ids), few_shot(x, ids)
    assert m["mAP"] == m["HR@1"] == m["HR@5"] == m["within_video_mAP"] == 1
    assert r["AUROC"] == r["AUPR"] == 1
    assert [f[k] for k in "1 2 3 5 10".split()] == [1]*5 == [f["fixed"][k] for k in "1 2 3 5 10".split()]


@pytest.mark.parametrize("scale", [1e-3, 1, 1e6])
def test_length_of_the_vectors_does_not_matter(scale):
    x, ids, vid = gallery(3)
    lengths = np.random.default_rng(0).uniform(.5, 2, (len(x), 1))*scale
    a, b = retrieval(x, ids, videos=vid), retrieval(x*lengths, ids, videos=vid)
    assert a == pytest.approx(b, abs=1e-9)


def test_names_may_be_text_or_numbers_and_rows_in_any_order():
    x, ids, vid = gallery(4)
    named = np.array([f"001-00{v}_{i}" for i, v in zip(ids, vid)])
    assert retrieval(x, named, videos=vid.astype(str)) == pytest.approx(retrieval(x, ids, videos=vid), abs=1e-12)
    order = np.random.default_rng(0).permutation(len(x))
    for f in (retrieval, reid): assert f(x[order], ids[order]) == pytest.approx(f(x, ids), abs=1e-12)


@pytest.mark.parametrize("cells", [1, 200, 1000])
def test_blocks_change_nothing(monkeypatch, cells):
    x, ids, vid = gallery(5)
    whole = retrieval(x, ids, videos=vid), reid(x, ids), few_shot(x, ids, draws=4)
    monkeypatch.setattr(metrics, "_cells", cells)
    assert (retrieval(x, ids, videos=vid), reid(x, ids), few_shot(x, ids, draws=4)) == whole


def test_memory_stays_far_below_a_full_matrix():
    import tracemalloc
    n = 6000
    g = np.random.default_rng(0)
    x, ids = g.normal(size=(n, 4)), np.arange(n) % (n // 6)
    tracemalloc.start()
    retrieval(x, ids); reid(x, ids)
    peak = tracemalloc.get_traced_memory()[1]; tracemalloc.stop()
    assert peak < n*n*8*.6


def test_within_video_needs_another_polyp_and_another_tracklet_there():
    x, ids, _ = gallery(6, n=8, polyps=3)
    ids = np.array(["a", "a", "a", "b", "b", "c", "c", "b"])
    vid = np.array(["v", "v", "w", "v", "w", "x", "x", "w"])
    # v holds a a b: its two a count. w holds a b b: its two b count. x holds only c: nothing to confuse it with.
    m = retrieval(x, ids, videos=vid)
    assert m["within_video_queries"] == 4 and m["queries"] == 8


def test_same_polyp_in_two_videos_is_one_polyp():
    x = np.eye(4)[[0, 0, 1, 1]]
    m = retrieval(x, ["a", "a", "b", "b"], videos=["v", "w", "v", "w"])
    assert m["mAP"] == 1 and m["within_video_mAP"] is None


# ---- re-identification

@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("quantised", [False, True])
def test_reid_equals_scikit_learn(seed, quantised):
    x, ids, _ = gallery(seed)
    s = cosine(unit(x), unit(x))
    if quantised: s = np.round(s*4) / 4                      # many ties
    i, j = np.triu_indices(len(ids), 1)
    r = reid(s, ids, precomputed=True)
    assert r["AUROC"] == pytest.approx(roc_auc_score(ids[i] == ids[j], s[i, j]), abs=1e-9)
    assert r["AUPR"] == pytest.approx(average_precision_score(ids[i] == ids[j], s[i, j]), abs=1e-9)
    assert r["pairs"] == len(i)
    if not quantised: assert reid(x, ids) == r


# ---- few-shot

def few_shot_loop(x, ids, ks, draws, seed):
    "One draw, one polyp, one K at a time, with scikit-learn's average precision"
    s = cosine(unit(x), unit(x))
    out = {k: [] for k in ks}
    for name in np.unique(ids):
        own = np.flatnonzero(ids == name)
        if not [k for k in ks if k < len(own)]: continue
        order = np.argsort(rng(seed, "few_shot", str(name)).random((draws, len(own))), axis=1)
        for k in (k for k in ks if k < len(own)):
            aps = []
            for d in order:
                support = own[d[:k]]
                rest = np.setdiff1d(np.arange(len(ids)), support)
                aps.append(average_precision_score(ids[rest] == name, s[support].max(0)[rest]))
            out[k].append(np.mean(aps))
    return out


@pytest.mark.parametrize("seed", range(6))
def test_few_shot_equals_a_loop(seed):
    x, ids, _ = gallery(seed, n=110, polyps=16)
    ks = (1, 2, 3, 5, 10)
    ref, out = few_shot_loop(x, ids, ks, 7, seed), few_shot(x, ids, ks=ks, draws=7, seed=seed)
    sizes = np.bincount(ids)[np.unique(ids)]
    for k in ks:
        assert out["skipped"][str(k)] == (sizes <= k).sum() == len(sizes) - len(ref[k])
        if ref[k]: assert out[str(k)] == pytest.approx(np.mean(ref[k]), abs=1e-6)
        else: assert out[str(k)] is None


def test_few_shot_fixed_set_is_the_same_polyps_in_every_column():
    g = np.random.default_rng(0)
    ids = np.repeat(np.arange(8), [2, 3, 4, 6, 11, 12, 13, 1])
    x = g.normal(size=(len(ids), 5))
    names, ap = few_shot_polyps(x, ids, draws=5)
    f = few_shot(x, ids, draws=5)
    assert f["fixed"]["polyps"] == 3
    for i, k in enumerate("1 2 3 5 10".split()): assert f["fixed"][k] == pytest.approx(ap[4:7, i].mean())
    # without polyps that fill 10, the set is that of the largest K that can be filled, and the columns beyond are empty
    small = few_shot(x[:15], ids[:15], draws=5)
    assert small["fixed"]["polyps"] == 1 and small["fixed"]["10"] is None and small["fixed"]["5"] is not None and small["10"] is None


def test_few_shot_draws_depend_on_seed_and_polyp_only():
    x, ids, _ = gallery(7, n=120, polyps=12)
    assert few_shot(x, ids, draws=5) == few_shot(x, ids, draws=5)
    assert few_shot(x, ids, draws=5) != few_shot(x, ids, draws=5, seed=1)
    far = np.vstack([x, -100*np.ones((3, x.shape[1]))])      # three tracklets of a new polyp at the end of every list
    names, before = few_shot_polyps(x, ids, draws=5)
    _, after = few_shot_polyps(far, np.r_[ids, [99]*3], draws=5)
    _, other = few_shot_polyps(x, ids, draws=5, seed=1)
    move = lambda a: np.nanmax(np.abs(a[:len(names)] - before))
    assert move(after) < .05 < move(other)                   # three distractors move little, other draws move a lot


def test_all_draws_of_one_support_average_to_the_mean_query():
    "With K = 1 and many draws the few-shot score of a polyp tends to the mean AP of its queries"
    x, ids, _ = gallery(8, n=60, polyps=6)
    names, ap = few_shot_polyps(x, ids, ks=(1,), draws=4000)
    per_query, _ = query_results(x, ids)
    for name, a in zip(names, ap[:, 0]): assert a == pytest.approx(per_query[ids == name].mean(), abs=.01)


# ---- faults

@pytest.mark.parametrize("f", [retrieval, reid, few_shot])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_embeddings_are_refused_with_the_row(f, bad):
    x, ids, _ = gallery(0)
    x[17, 2] = bad
    with pytest.raises(InputError, match="row 17"): f(x, ids)
    s = np.zeros((90, 90)); s[3, 4] = bad
    with pytest.raises(InputError, match="NaN or infinite"): f(s, ids, precomputed=True)


@pytest.mark.parametrize("f", [retrieval, reid, few_shot])
def test_input_that_cannot_be_scored(f):
    x, ids, _ = gallery(0)
    with pytest.raises(InputError, match="zero"): f(np.where(np.arange(90)[:, None] == 5, 0, x), ids)
    with pytest.raises(InputError, match="at least two polyps"): f(x, np.zeros(90, int))
    with pytest.raises(InputError, match="two tracklets"): f(x, np.arange(90))
    with pytest.raises(InputError, match=r"\(90,\)"): f(x, ids[:5])
    with pytest.raises(InputError, match=r"\(n, d\)"): f(x[0], ids)
    with pytest.raises(InputError, match=r"\(n, n\)"): f(x, ids, precomputed=True)
    with pytest.raises(InputError, match="at least two polyps"): f(x[:0], ids[:0])


def test_one_list_that_cannot_be_scored():
    with pytest.raises(InputError, match="no item is relevant"): average_precision([0, 0])
    with pytest.raises(InputError, match="finite"): average_precision([1, 0], [np.nan, 1])
    with pytest.raises(InputError, match="shape"): average_precision([1, 0], [1, 2, 3])
    with pytest.raises(InputError, match="one of the two kinds"): pair_areas([1, 1], [0, 1])
    with pytest.raises(InputError, match="finite"): pair_areas([1, 0], [np.inf, 1])
