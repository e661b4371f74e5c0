"Bags: the distribution against enumeration and against a dense reference, the deal, the order, the errors"
import itertools, tracemalloc
import numpy as np, pandas as pd, pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare, kstest
from freerep.core import InputError
from freerep.bags import BagSampler, sample_bags, sample_ranks, temperature


def exact(m, kappa, temp):
    "probability of every ordered tuple of ranks, by enumeration"
    w, out = np.exp(-np.arange(m)/temp), {}
    for t in itertools.permutations(range(1, m), kappa):
        p, left = 1., w[1:].sum()
        for r in t: p, left = p*w[r]/left, left - w[r]
        out[t] = p
    return out

def dense_bags(position, kappa, temp, gen):
    "one video: all distances, random order among ties, Gumbel top-k"
    n = len(position)
    d = np.abs(position[:, None] - position[None]).astype(float)
    np.fill_diagonal(d, np.inf)
    order = np.stack([np.lexsort((gen.random(n), row)) for row in d])[:, :n - 1]
    key = -np.arange(1, n)/temp + gen.gumbel(size=(n, n - 1))
    return np.take_along_axis(order, np.argsort(-key, 1)[:, :kappa], 1)


# ---- the distribution of the ranks
@pytest.mark.parametrize("m,kappa,temp", [(6, 3, .3), (6, 3, 1.), (7, 4, 4.8), (8, 3, 12.), (5, 4, 2.), (2, 1, .3), (30, 1, 12.), (30, 2, 3.), (6, 3, 1e6)])
def test_ranks_follow_the_formula(m, kappa, temp):
    "chi-square against every ordered tuple, over 30 seeds: p-values that look uniform"
    p, n = exact(m, kappa, temp), 4000
    index = {t: i for i, t in enumerate(p)}
    want = np.array(list(p.values()))*n
    rare = want < 5
    pvalues, total = [], np.zeros(len(want))
    for seed in range(30):
        r = sample_ranks(np.full(n, m), kappa, temp=temp, rng=np.random.default_rng(seed))
        got = np.bincount([index[t] for t in map(tuple, r.tolist())], minlength=len(want)).astype(float)
        total += got
        f, e = (np.r_[x[~rare], x[rare].sum()] for x in (got, want))
        f, e = f[e > 0], e[e > 0]
        if len(f) > 1: pvalues.append(chisquare(f, e*f.sum()/e.sum()).pvalue)
    assert .5*np.abs(total/total.sum() - want/want.sum()).sum() < .03
    if pvalues: assert min(pvalues) > 1e-4 and kstest(pvalues, "uniform").pvalue > 1e-3

def test_video_sizes_mix_in_one_call():
    "each anchor has its own m; the others in the call do not disturb it"
    m = np.tile([3, 6, 40], 20_000)
    r = sample_ranks(m, 2, temp=2., rng=np.random.default_rng(0))
    for k in (3, 6, 40):
        w = np.exp(-np.arange(1, k)/2.)
        assert chisquare(np.bincount(r[m == k, 0], minlength=k)[1:6], 20_000*(w/w.sum())[:5]*1.0, sum_check=False).pvalue > 1e-3 if k > 6 else \
            chisquare(np.bincount(r[m == k, 0], minlength=k)[1:], 20_000*w/w.sum()).pvalue > 1e-3

@pytest.mark.parametrize("temp", [1e-6, .01, .3, 12., 1e4, 1e12])
@pytest.mark.parametrize("m", [5, 6, 1000, 100_000, 10**9])
def test_no_temperature_or_size_breaks_it(m, temp):
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        r = sample_ranks(np.full(500, m), 4, temp=temp, rng=np.random.default_rng(0))
    assert r.min() >= 1 and r.max() < m and all(len(set(x)) == 4 for x in r.tolist())
    if temp < .02: assert (r == [1, 2, 3, 4]).all()
    if m > 1000 and temp == 12.: assert 10 < r.mean() < 30
    if temp > 1e10 and m > 6: assert abs(r.mean()/m - .5) < .05

def test_far_tail_is_reached():
    "no window: at T=12 ranks beyond 100 come as often as the formula says"
    r = sample_ranks(np.full(400_000, 10_000), 1, temp=12., rng=np.random.default_rng(0))[:, 0]
    want = 400_000*np.exp(-100/12)
    assert abs((r > 100).sum() - want) < 5*np.sqrt(want) and r.max() > 130

def test_more_draws_than_ranks_repeat_in_order():
    r = sample_ranks([2, 3, 4, 9], 7, temp=1., rng=np.random.default_rng(0))
    assert (r[0] == 1).all()
    for row, m in zip(r, (2, 3, 4)): assert (row == row[np.arange(7) % (m - 1)]).all() and set(row) == set(range(1, m))
    assert len(set(r[3])) == 7


# ---- from ranks to tracklets
POSITIONS = {"even": np.arange(7)*32, "uneven": np.array([0, 3, 4, 9, 11, 30, 31]), "shared": np.array([0, 1, 1, 2, 3, 3, 4]), "all equal": np.zeros(6), "pair": np.array([5., 5.5])}

@pytest.mark.parametrize("name", POSITIONS)
def test_bags_match_the_dense_reference(name):
    "ordered bags of every anchor, ties and shared positions included, against sorting all distances"
    pos, temp, n = POSITIONS[name], 2., 4000
    kappa, size = min(2, len(pos) - 1), len(pos)
    code = lambda b: (b*size**np.arange(kappa)).sum(-1)
    fast = sample_bags(np.repeat(np.arange(n), size), np.tile(pos, n), kappa=kappa, temp=temp, rng=np.random.default_rng(1))
    assert (fast[:, 0] == np.arange(n*size)).all()
    fast = code(fast[:, 1:] % size).reshape(n, size)
    gen = np.random.default_rng(2)
    slow = np.stack([code(dense_bags(pos, kappa, temp, gen)) for _ in range(n)])
    for i in range(size):
        a, b = (np.bincount(x[:, i], minlength=size**kappa) for x in (fast, slow))
        use = a + b > 10
        stat, dof = ((a - b)[use]**2/(a + b)[use]).sum(), use.sum()
        assert stat < dof + 5*np.sqrt(2*dof), (name, i, stat, dof)
        assert not a[b == 0].sum() > .01*n

def test_ties_are_fair_and_independent():
    "T so small that the bag is ranks 1 to 4: two tied pairs. Each side leads as often, whatever the other pair does"
    n, pos = 20_000, np.arange(5)
    b = sample_bags(np.repeat(np.arange(n), 5), np.tile(pos, n), kappa=3, temp=.02, rng=np.random.default_rng(0))
    b = b[2::5, 1:] % 5
    assert (np.sort(b[:, :2], 1) == [1, 3]).all() and set(b[:, 2]) == {0, 4}
    table = np.array([[((b[:, 0] == x) & (b[:, 2] == y)).mean() for y in (0, 4)] for x in (1, 3)])
    assert np.abs(table - .25).max() < .015

tables = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=2, max_size=40)

@settings(max_examples=150, deadline=None)
@given(tables, st.integers(1, 6), st.sampled_from([.05, .3, 2., 12., 1e5]), st.integers(0, 9))
def test_any_table_gives_proper_bags(table, kappa, temp, seed):
    video, pos = map(np.array, zip(*table))
    size = np.bincount(video)[video]
    b = sample_bags(video, pos, kappa=kappa, temp=temp, rng=np.random.default_rng(seed))
    assert b.dtype == np.int64 and b.shape == ((size > 1).sum(), 1 + kappa)
    assert (b[:, 0] == np.flatnonzero(size > 1)).all()
    assert (video[b] == video[b[:, :1]]).all() and (b[:, 1:] != b[:, :1]).all()
    for i, *bag in b.tolist(): assert len(set(bag)) == min(kappa, size[i] - 1)
    if temp == .05:  # the bag is the nearest, up to ties
        for i, *bag in b.tolist():
            others = np.sort(np.abs(pos - pos[i])[(video == video[i]) & (np.arange(len(pos)) != i)])
            k = min(kappa, size[i] - 1)
            assert (np.abs(pos[bag[:k]] - pos[i]) == others[:k]).all()

def test_names_and_order_of_rows_do_not_matter():
    "the same tracklets under names and in another order have the same distribution"
    n, gen = 4000, np.random.default_rng(0)
    video, pos = np.repeat(np.arange(2*n), np.tile([5, 4], n)), np.tile(np.r_[0:5, 0:4], n)
    perm = gen.permutation(9*n)
    named = pd.Series(video[perm]).map("video {}".format)
    a = sample_bags(video, pos, kappa=2, temp=1.5, rng=gen)
    b = perm[sample_bags(named, list(pos[perm]), kappa=2, temp=1.5, rng=gen)]
    count = np.zeros((2, 9, 9))
    for c, x in zip(count, (a, b)): np.add.at(c, (x[:, :1] % 9, x[:, 1:] % 9), 1)
    assert np.abs(count[0] - count[1]).max()/n < .06 and count[0].sum() == count[1].sum() == 18*n

def test_memory_grows_with_n_only():
    peaks = []
    for n in (20_000, 80_000):
        video = np.repeat(np.arange(4), n//4); pos = np.tile(np.arange(n//4), 4)
        tracemalloc.start(); sample_bags(video, pos, temp=12., rng=np.random.default_rng(0)); peaks.append(tracemalloc.get_traced_memory()[1]); tracemalloc.stop()
    assert peaks[1] < 4.2*peaks[0] and peaks[1] < 300*80_000, peaks

@pytest.mark.parametrize("video,pos,kw,says", [
    (["a", "a"], [0], {}, "one length"), ([["a"]], [[0]], {}, "one length"), (["a", "a"], [0, np.inf], {}, "inf of tracklet 1"),
    (["a", "a"], [0, 1], dict(temp=0), "temp=0"), (["a", "a"], [0, 1], dict(temp=float("nan")), "temp=nan"), (["a", "a"], [0, 1], dict(kappa=0), "kappa=0"),
    (["a", None], [0, 1], {}, "tracklet 1 has no video"), (["a", "a"], ["0", "x"], {}, "position")])
def test_bad_tables(video, pos, kw, says):
    with pytest.raises(InputError, match=says): sample_bags(np.array(video, dtype=object), pos, **kw, rng=np.random.default_rng(0))


# ---- curriculum and sampler
def test_temperature():
    assert np.allclose([temperature(c) for c in (0, 1/3, .5, 1)], [.3, .3 + .25*11.7, 6.15, 12])
    assert temperature(.5, 1, 1) == 1
    s = BagSampler([0]*9, range(9), bags=2, epochs=25)
    seen = []
    for e in range(25): s.set_epoch(e); seen.append(s.temp)
    assert np.allclose(seen, .3 + (1 - np.cos(np.pi*np.arange(25)/25))/2*11.7)

def table(n_videos=9, seed=0, low=3, high=60):
    gen = np.random.default_rng(seed)
    count = gen.integers(low, high, n_videos)
    return np.repeat(np.arange(n_videos), count), np.concatenate([32*np.arange(c) for c in count])

def epoch(e=0, **kw):
    s = BagSampler(*table(), **{"bags": 6, **kw}); s.set_epoch(e)
    out = list(s)
    assert len(out) == len(s)
    return np.stack(out)

@pytest.mark.parametrize("distinct", [False, True])
def test_every_tracklet_is_an_anchor_once(distinct):
    b = epoch(distinct_videos=distinct)
    video, _ = table()
    assert b.shape == (len(video)//6, 6, 5)
    assert len(np.unique(b[:, :, 0])) == len(video)//6*6

@pytest.mark.parametrize("distinct", [False, True])
def test_one_seed_one_order(distinct):
    kw = dict(distinct_videos=distinct)
    assert (epoch(3, **kw) == epoch(3, **kw)).all()
    assert not (epoch(3, **kw) == epoch(4, **kw)).all() and not (epoch(3, **kw) == epoch(3, seed=1, **kw)).all()
    s = BagSampler(*table(), bags=6, **kw)
    for e in range(4): s.set_epoch(e); last = list(s)       # having run before changes nothing
    assert (np.stack(last) == epoch(3, **kw)).all()
    np.random.seed(0); a = epoch(1, **kw); np.random.seed(5)
    assert (a == epoch(1, **kw)).all()                       # global state takes no part

@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("world", [2, 3, 6])
def test_processes_share_the_batch_of_one(world, distinct):
    whole = epoch(2, distinct_videos=distinct)
    parts = [epoch(2, distinct_videos=distinct, rank=r, world=world) for r in range(world)]
    assert (np.concatenate(parts, axis=1) == whole).all()

@pytest.mark.parametrize("seed", range(6))
def test_distinct_videos_is_the_best_deal(seed):
    "repeats equal the number that no deal can avoid, by counting"
    gen = np.random.default_rng(seed)
    video, pos = table(int(gen.integers(3, 30)), seed, 2, int(gen.integers(5, 90)))
    bags = int(gen.integers(2, 9))
    if len(video) < bags: return
    batches = [b[:, 0] for b in BagSampler(video, pos, bags=bags, distinct_videos=True)]
    B, count = len(batches), np.bincount(video)
    for _ in range(len(video) % bags): count[count.argmax()] -= 1
    assert sum(bags - len(set(video[b])) for b in batches) == np.maximum(0, count - B).sum()
    for v, c in enumerate(count):                            # a large video is spread evenly
        per = np.array([(video[b] == v).sum() for b in batches])
        if c > B: assert per.min() >= c//B - 1 and per.max() <= -(-c//B) + 1

def test_distinct_videos_is_fair():
    "over many seeds an anchor is equally likely in any batch, and any two videos meet"
    video, pos = np.repeat(np.arange(6), [4, 4, 8, 8, 6, 6]), np.concatenate([np.arange(c) for c in (4, 4, 8, 8, 6, 6)])
    seen, meet = np.zeros((12, 36)), np.zeros((6, 6))
    for seed in range(600):
        for t, b in enumerate(BagSampler(video, pos, bags=3, seed=seed, distinct_videos=True)):
            seen[t, b[:, 0]] += 1
            v = video[b[:, 0]]; meet[v[:, None], v[None]] += 1
    assert np.abs(seen/600 - 1/12).max() < .05
    assert (meet > 0).all() and meet.diagonal().sum() == 600*36

def test_small_data_train_with_what_there_is(capsys, monkeypatch):
    monkeypatch.setattr("freerep.core._noted", set())
    s = BagSampler(["a"]*3 + ["b"], [0, 1, 2, 0], bags=12)
    b, = list(s)
    assert len(s) == 1 and b.shape == (3, 5) and sorted(b[:, 0]) == [0, 1, 2]
    err = capsys.readouterr().err
    assert "3 bags" in err and "alone in a video" in err
    b, = list(BagSampler(["a"]*5, range(5), bags=12, distinct_videos=True))
    assert sorted(b[:, 0]) == list(range(5))
    parts = [list(BagSampler(["a"]*5, range(5), bags=12, rank=r, world=2)) for r in (0, 1)]
    assert [len(p) for p in parts] == [1, 1] and len({*parts[0][0][:, 0], *parts[1][0][:, 0]}) == 4

@pytest.mark.parametrize("video,kw,says", [
    ([], {}, "0 of 0"), (["a"], {}, "0 of 1"), (["a", "b"], {}, "0 of 2"), (["a"]*4, dict(bags=1), "bags=1"), (["a"]*4, dict(kappa=0), "kappa=0"),
    (["a"]*4, dict(world=5), "multiple of 5"), (["a"]*4, dict(rank=2, world=2), "rank=2"), (["a"]*4, dict(epochs=0), "epochs=0"),
    (["a"]*4, dict(tmin=0), "tmin=0"), (["a"]*2, dict(world=4), "at least 4")])
def test_what_cannot_work_says_so(video, kw, says):
    with pytest.raises(InputError, match=says): BagSampler(video, np.arange(len(video)), **kw)
