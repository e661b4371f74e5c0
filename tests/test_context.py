"""Context selection against brute force: every choice, every exchange, ties, and wrong input."""
import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from freerep import core
from freerep.context import STRATEGIES, cover_classes, diverse_context, random_context, select_context, similarity, top_context
from freerep.core import InputError


def vectors(seed, n=30, d=6, dtype=np.float64): return np.random.default_rng(seed).normal(size=(n, d)).astype(dtype)


def cosine(a, b): return float(np.dot(a, b)/np.sqrt(np.dot(a, a)*np.dot(b, b)))


def slow_diverse(query, bank, k, lam, pool):
    "The formula of the paper with nothing remembered between rounds"
    order = sorted(range(len(bank)), key=lambda i: (-cosine(bank[i], query), i))[:pool]
    picked = []
    while len(picked) < min(k, len(order)):
        best = None
        for j in order:
            if j in picked: continue
            score = cosine(bank[j], query) - lam*(max(cosine(bank[j], bank[i]) for i in picked) if picked else 0)
            if best is None or score > best[0] + 1e-12: best = score, j
        picked.append(best[1])
    return picked


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("lam", [0., .7, 2.])
def test_diverse_is_the_formula(seed, lam):
    bank, query = vectors(seed), vectors(seed + 100, 1)[0]
    for k, pool in ((1, 1), (4, 9), (7, 30), (40, 200)):
        assert diverse_context(query, bank, k, lam=lam, pool=pool).tolist() == slow_diverse(query, bank, k, lam, pool)


def test_diverse_where_all_similarities_are_negative():
    "An image that opposes the earlier picks is rewarded, and no maximum is floored at 0"
    bank = -np.abs(vectors(0, 20)); query = np.abs(vectors(1, 1)[0])
    bank[3] = [1, -9, 1, -9, 1, -9]
    assert (similarity(query, bank) < 0).all()
    assert diverse_context(query, bank, 6, pool=20).tolist() == slow_diverse(query, bank, 6, .7, 20)
    two = np.array([[1., 0], [-1., 0], [0., -1]])       # from the query (1, -.1): .995, -.995, .0995
    assert diverse_context(np.array([1., -.1]), two, 2, lam=2., pool=3).tolist() == [0, 1]   # .0995 - 0 < -.995 + 2


def test_similarity_by_hand_and_for_all_scales():
    assert np.allclose(similarity([1, 0], [[2, 0], [0, 5], [-3, 0], [1, 1]]), [1, 0, -1, .5**.5])
    bank, q = vectors(3), vectors(4, 5)
    assert np.allclose(similarity(q*1e6, bank*1e-6), similarity(q, bank))
    assert np.allclose(similarity(q, bank), [[cosine(a, b) for b in bank] for a in q])
    assert similarity(q.astype(np.float32), bank.astype(np.float32)).dtype == np.float32
    assert similarity(q.astype(np.float16), bank.astype(np.float16)).dtype == np.float32


def test_a_duplicate_in_the_bank_is_not_taken_twice_when_something_else_is_there():
    query = np.array([1., 0, 0])
    bank = np.array([[1, .1, 0], [1, .1, 0], [1, -.1, .3], [.9, .1, .5]])
    assert top_context(similarity(query, bank), 2).tolist() == [0, 1]
    assert sorted(diverse_context(query, bank, 2)) != [0, 1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("k", [1, 5, 12, 400])
def test_order_number_and_no_repetition(strategy, k):
    bank, query = vectors(7, 12), vectors(8, 1)[0]
    picked = select_context(query, bank, k, strategy=strategy)
    assert len(picked) == len(set(picked.tolist())) == min(k, 12) and picked.dtype.kind == "i"
    assert (np.diff(similarity(query, bank)[picked]) >= 0).all()


def test_equal_similarities_are_in_a_fixed_order():
    bank = np.ones((6, 3))
    assert top_context(np.ones(6), 3).tolist() == [0, 1, 2]
    for strategy in ("topk", "diverse"): assert select_context(np.ones(3), bank, 3, strategy=strategy).tolist() == [2, 1, 0]


def test_random_is_seeded_fair_and_independent_of_global_state():
    draws = [random_context(8, 3, seed=s) for s in range(2000)]
    assert all(len(set(d.tolist())) == 3 for d in draws)
    counts = np.bincount(np.concatenate(draws), minlength=8)
    assert abs(counts - 750).max() < 100
    np.random.seed(1); a = random_context(50, 10, 5); np.random.seed(2); b = random_context(50, 10, 5)
    assert a.tolist() == b.tolist() != random_context(50, 10, 6).tolist()


def test_random_ignores_the_vectors_but_orders_by_them():
    query, bank = vectors(0, 1)[0], vectors(1)
    picked = select_context(query, bank, 6, strategy="random", seed=3)
    assert set(picked.tolist()) == set(random_context(30, 6, 3).tolist())


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 5), st.floats(.05, .9))
def test_coverage_by_trying_every_context(seed, n, o, density):
    r = np.random.default_rng(seed)
    present, bank, query = r.random((n, o)) < density, r.normal(size=(n, 4)), r.normal(size=4)
    k = int(r.integers(1, n + 1))
    plain = select_context(query, bank, k, strategy="topk")
    got = select_context(query, bank, k, strategy="topk", present=present)
    shown = lambda p: int(present[list(p)].any(0).sum())
    assert len(set(got.tolist())) == k and shown(got) >= shown(plain)
    most = max(shown(c) for c in itertools.combinations(range(n), k))
    if k > o: assert shown(got) == most == int(present.any(0).sum())
    # the best match stays, and no single exchange of another can show more
    assert got[-1] == plain[-1] and got[-1] == similarity(query, bank).argmax()
    assert all(shown(set(got.tolist()) - {a} | {b}) <= shown(got) for a in got.tolist()[:-1] for b in range(n))
    # what already shows everything is left alone
    if shown(plain) == int(present.any(0).sum()): assert got.tolist() == plain.tolist()


def test_coverage_exchanges_the_least_similar_and_lets_in_the_most_similar():
    sim = np.array([.9, .8, .7, .2, .3, .1])
    present = np.array([[1, 0], [1, 0], [1, 0], [0, 1], [0, 1], [0, 1]], bool)
    assert sorted(cover_classes([0, 1, 2], present, sim)) == [0, 1, 4]
    present[2] = [0, 0]; present[1] = [0, 1]                       # already shown: nothing happens
    assert cover_classes([0, 1, 2], present, sim).tolist() == [0, 1, 2]


def test_one_image_with_two_missing_classes_beats_two_images():
    sim = np.array([.9, .8, .7, .5, .4, .1])
    present = np.array([[1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]], bool)
    assert sorted(cover_classes([0, 1, 2], present, sim)) == [0, 1, 5]


def test_too_few_places_are_told(capsys):
    core._noted.clear()
    present = np.eye(4, dtype=bool)
    assert len(select_context(vectors(0, 1)[0], vectors(1, 4), 2, present=present)) == 2
    assert "2 context images cannot show all 4 classes" in capsys.readouterr().err


def test_a_class_that_no_image_shows_is_not_waited_for(capsys):
    core._noted.clear()
    present = np.zeros((30, 3), bool); present[20, 1] = True
    assert 20 in select_context(vectors(0, 1)[0], vectors(1), 2, present=present)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("change, said", [
    (dict(k=0), "k=0: expected a whole number"), (dict(k=2.5), "k=2.5"), (dict(strategy="Diverse"), "the strategies are diverse, topk, random"),
    (dict(lam=-1), "lam=-1"), (dict(lam=float("nan")), "lam=nan"), (dict(pool=2), "pool=2: expected at least k=3"),
    (dict(present=np.zeros((30, 2))), "present must be bool of shape (n, o)=(30, classes), got float64 of (30, 2)"),
    (dict(present=np.zeros((29, 2), bool)), "got bool of (29, 2)"), (dict(query=np.zeros(6)), "query: vector 0 is zero"),
    (dict(query=np.ones(5)), "same retriever"), (dict(query=np.ones((2, 6))), "query must have shape (d,), got (2, 6)"),
    (dict(bank=np.ones(6)), "expected query (..., d) and bank (n, d)"), (dict(bank=np.full((30, 6), np.nan)), "bank: vector 0 is zero or not finite"),
    (dict(bank=np.array([["a"]*6]*30)), "must be numbers"), (dict(seed=-1, strategy="random"), "seed -1")])
def test_wrong_input_is_named(change, said):
    args = dict(query=vectors(0, 1)[0], bank=vectors(1), k=3) | change
    with pytest.raises(InputError) as e: select_context(args.pop("query"), args.pop("bank"), args.pop("k"), **args)
    assert said in str(e.value)


def test_the_inputs_are_left_as_they_were():
    query, bank, present = vectors(0, 1)[0], vectors(1), np.random.default_rng(0).random((30, 4)) < .1
    copies = query.copy(), bank.copy(), present.copy()
    select_context(query, bank, 5, present=present)
    for a, b in zip(copies, (query, bank, present)): assert (a == b).all()
