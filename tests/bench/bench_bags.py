"""Time and memory of the bags: `python tests/bench/bench_bags.py`

A table like REAL-Colon's (41 videos of uneven length), temperature 12, kappa 4. The dense reference does what a
table of all distances does (distances, sort, Gumbel top-k over the sorted ranks) and runs only at a size where that fits."""
import os, time, tracemalloc
import numpy as np
from freerep.bags import BagSampler, sample_bags

def table(n, videos=41, seed=0):
    "n tracklets (to rounding), 32 frames apart"
    count = np.maximum(2, np.round(np.random.default_rng(seed).dirichlet(np.full(videos, 3.))*n)).astype(int)
    return np.repeat(np.arange(videos), count), np.concatenate([32*np.arange(c) for c in count])

def dense(video, position, kappa=4, temp=12., rng=None):
    "All distances of n x n, sorted"
    n = len(video)
    d = np.abs(position[:, None] - position[None]).astype(np.float32)
    d[video[:, None] != video[None]] = np.inf
    np.fill_diagonal(d, np.inf)
    order = d.argsort(1)
    possible = np.isfinite(np.take_along_axis(d, order, 1))
    key = np.where(possible, -np.arange(1, n + 1)/temp + rng.gumbel(size=(n, n)), -np.inf)
    return np.c_[np.arange(n), np.take_along_axis(order, (-key).argsort(1)[:, :kappa], 1)]

def measure(f, video, position):
    "seconds (best of 3 when short) and MB at the peak"
    seconds = []
    while len(seconds) < 3 and sum(seconds) < 5:
        start = time.perf_counter(); f(video, position, temp=12., rng=np.random.default_rng(0)); seconds.append(time.perf_counter() - start)
    tracemalloc.start(); f(video, position, temp=12., rng=np.random.default_rng(0)); mb = tracemalloc.get_traced_memory()[1]/1e6; tracemalloc.stop()
    return min(seconds), mb

if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, numpy {np.__version__}")
    s, mb = measure(sample_bags, *table(4000)); ds, dmb = measure(dense, *table(4000))
    print(f"    4,000 tracklets: ours {s:6.3f} s {mb:7.1f} MB   dense {ds:6.3f} s {dmb:7.1f} MB   dense/ours {ds/s:.0f} x time, {dmb/mb:.0f} x memory")
    for n in (55_000, 1_000_000):
        s, mb = measure(sample_bags, *table(n))
        print(f"{n:>9,} tracklets: ours {s:6.2f} s {mb:7.1f} MB")
    for distinct in (False, True):
        b = BagSampler(*table(55_000), distinct_videos=distinct)
        start = time.perf_counter(); n = sum(1 for _ in b)
        print(f"   55,000 tracklets: an epoch of {n} batches, distinct_videos={distinct}: {time.perf_counter() - start:.2f} s")
