"""Time of freerep.metrics against torchmetrics (retrieval), scikit-learn (pairs) and a plain loop (few-shot).

python tests/bench/bench_metrics.py [N ...]        prints one line per gallery size; the values must agree
"""
import sys, time

import numpy as np
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torchmetrics.retrieval import RetrievalHitRate, RetrievalMAP

from freerep.core import rng
from freerep.metrics import cosine, few_shot, reid, retrieval, unit


def timed(f):
    start = time.perf_counter()
    return f(), time.perf_counter() - start


def peer_retrieval(x, ids):
    "torchmetrics wants one flat list of (query, score, relevant)"
    s, n = torch.from_numpy(cosine(unit(x), unit(x))), len(ids)
    off, q, y = ~torch.eye(n, dtype=torch.bool), torch.arange(n)[:, None].expand(n, n), torch.from_numpy(ids)
    args = (s[off] + 2, (y[:, None] == y)[off]), dict(indexes=q[off])
    return [m(*args[0], **args[1]).item() for m in (RetrievalMAP(), RetrievalHitRate(top_k=1), RetrievalHitRate(top_k=5))]


def peer_reid(x, ids):
    i, j = np.triu_indices(len(ids), 1)
    s = cosine(unit(x), unit(x))[i, j]
    return roc_auc_score(ids[i] == ids[j], s), average_precision_score(ids[i] == ids[j], s)


def loop_few_shot(x, ids, draws, ks=(1, 2, 3, 5, 10)):
    s, out = cosine(unit(x), unit(x)), {k: [] for k in ks}
    for name in np.unique(ids):
        own = np.flatnonzero(ids == name)
        order = np.argsort(rng(0, "few_shot", str(name)).random((draws, len(own))), axis=1)
        for k in (k for k in ks if k < len(own)):
            rest = [np.setdiff1d(np.arange(len(ids)), own[d[:k]]) for d in order]
            out[k].append(np.mean([average_precision_score(ids[r] == name, s[own[d[:k]]].max(0)[r]) for d, r in zip(order, rest)]))
    return {str(k): float(np.mean(v)) for k, v in out.items()}


def main(sizes, draws=10):
    for n in sizes:
        g = np.random.default_rng(0)
        ids = g.permutation(np.arange(n) % max(n // 40, 2))             # REAL-Colon's test set: some 40 tracklets per polyp
        x = g.normal(size=(ids.max() + 1, 256))[ids] + 2*g.normal(size=(n, 256))
        (m, a), (p, b) = timed(lambda: retrieval(x, ids)), timed(lambda: peer_retrieval(x, ids))
        (r, c), (pr, d) = timed(lambda: reid(x, ids)), timed(lambda: peer_reid(x, ids))
        (f, e), (pf, h) = timed(lambda: few_shot(x, ids, draws=draws)), timed(lambda: loop_few_shot(x, ids, draws))
        np.testing.assert_allclose([m["mAP"], m["HR@1"], m["HR@5"]], p, atol=1e-6)
        np.testing.assert_allclose([r["AUROC"], r["AUPR"]], pr, atol=1e-6)
        np.testing.assert_allclose([f[k] for k in pf], list(pf.values()), atol=1e-6)
        print(f"n={n}: retrieval {a:.3f} s, torchmetrics {b:.2f} s ({b/a:.0f}x) | reid {c:.3f} s, scikit-learn {d:.2f} s ({d/c:.1f}x)"
              f" | few-shot, {draws} draws {e:.2f} s, loop {h:.2f} s ({h/e:.0f}x)", flush=True)


if __name__ == "__main__": main([int(a) for a in sys.argv[1:]] or [500, 1000, 2000])
