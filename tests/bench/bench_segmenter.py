"""A bank on disk against SAM2's own video predictor, in one run on the same weights: CPU time, equality, versions.

    python tests/bench/bench_segmenter.py [--quick] [--sizes 256 512] [--classes 1 3 10] [--context 10] [--out FILE]

Two plain ways are timed. "predictor" is SAM2's predictor as it comes, masks added frame by frame; it keeps the features of one
frame only, so that every context image is encoded once and then once more per class. "predictor_once" is the same with the
features of all frames kept: every image encoded exactly once. The ratios of the targets are to the second, harder one.

"cached" is `segment_image` with a bank that has met its examples: the query is encoded, the memories are read from disk, and all
classes are segmented, brought to the size of the query and made into labels.
"""
import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
import warnings
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from freerep.bank import ExampleBank
from freerep.core import versions
from freerep.examples import array_examples
from freerep.image_segmentation import segment_image
from freerep.segmenter import Memory, load_segmenter, plain_predictor

TARGETS = {256: {1: 8., 3: 6., 10: 4.5}, 512: {1: 5.5, 3: 4., 10: 2.5}}


def shake(segmenter):
    "Make the random weights answer to their context, so that equality says something"
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in segmenter.model.named_parameters():
            if p.ndim < 2: p.add_(torch.randn(p.shape, generator=g)*.05)
            elif name.startswith(("memory_attention", "memory_encoder", "sam_mask_decoder", "obj_ptr_proj")): p.mul_(2)
        segmenter.model.sam_mask_decoder.pred_obj_score_head.layers[-1].bias.add_(3)


def scene(k, o, side, seed=0):
    "k + 1 images and masks (k, o, side, side), about a quarter of them empty"
    r = np.random.default_rng(seed)
    small = r.integers(0, 256, (k + 1, 9, 9, 3), dtype=np.uint8)
    images = np.stack([np.asarray(Image.fromarray(i).resize((side, side))) for i in small])
    y, x = np.mgrid[:side, :side]/side
    cx, cy, radius = (r.uniform(a, b, (k, o, 1, 1)) for a, b in ((.2, .8), (.2, .8), (.05, .25)))
    there = (r.random((k, o, 1, 1)) > .25) | (np.arange(k) == 0)[:, None, None, None]
    labels = np.zeros((k, side, side), int)
    for c in range(o): labels[((x - cx[:, c])**2 + (y - cy[:, c])**2 < radius[:, c]**2) & there[:, c]] = c + 1
    return images, labels[:, None] == np.arange(1, o + 1)[:, None, None]


def keep_features(predictor):
    "Let a predictor keep the features of every frame"
    kept = {}
    inner = predictor.forward_image
    def forward_image(x):
        key = x.sum().item()
        if key not in kept: kept[key] = inner(x)
        return {k: list(v) if isinstance(v, list) else v for k, v in kept[key].items()}
    predictor.forward_image = forward_image


def run_plain(segmenter, folder, masks, once):
    "CPU seconds, image encodings and the query's low-resolution logits of the plain way"
    predictor, count = plain_predictor(segmenter), [0]
    inner = predictor.forward_image
    def counted(x): count[0] += len(x); return inner(x)
    predictor.forward_image = counted
    if once: keep_features(predictor)
    start = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = predictor.init_state(str(folder))
        for t in range(len(masks)):
            for o, m in enumerate(masks[t]): predictor.add_new_mask(state, t, o, torch.tensor(m))
        for _ in predictor.propagate_in_video(state): pass
    seconds = time.process_time() - start
    outputs = state["output_dict_per_obj"]
    return seconds, count[0], torch.cat([outputs[o]["non_cond_frame_outputs"][len(masks)]["pred_masks"][0] for o in range(masks.shape[1])])


def run_cached(segmenter, images, masks, folder, repeats):
    "Seconds to fill the bank, median CPU seconds of one query, image encodings of it, logits at the size of the query and at the mask decoder's"
    labels = (masks*np.arange(1, masks.shape[1] + 1)[:, None, None]).sum(1)
    examples = array_examples(list(images[:-1]), list(labels), classes={c + 1: f"class {c + 1}" for c in range(masks.shape[1])})
    bank = ExampleBank(examples, retriever="random", segmenter=segmenter, folder=folder)
    start, context, times = time.process_time(), np.arange(len(masks)), []
    memories = bank.memories(context)
    remember = time.process_time() - start
    for _ in range(repeats):
        before, start = segmenter.encodings, time.process_time()
        segment_image(bank, images[-1], context=context)
        times.append(time.process_time() - start)
    count = segmenter.encodings - before
    return remember, float(np.median(times)), count, torch.tensor(segment_image(bank, images[-1], context=context, logits=True).logits), segmenter.segment(segmenter.encode(images[-1:]), memories).logits


def compare(segmenter, k, o, repeats):
    side = segmenter.image_size
    images, masks = scene(k, o, side)
    with tempfile.TemporaryDirectory() as folder:
        for t, im in enumerate(images): Image.fromarray(im).save(f"{folder}/{t}.jpg", quality=95)
        seen = [np.asarray(Image.open(f"{folder}/{t}.jpg").convert("RGB"))[None] for t in range(k + 1)]
        once, n_once, ref = run_plain(segmenter, folder, masks, True)
        plain, n_plain, _ = run_plain(segmenter, folder, masks, False)
        remember, cached, n, large, logits = run_cached(segmenter, np.concatenate(seen), masks, f"{folder}/bank", repeats)
    empty = [Memory.cat([segmenter.empty_memory(segmenter.encode(x))]*o) for x in seen[:-1]]
    without = segmenter.segment(segmenter.encode(seen[-1]), empty).logits
    big = [large > 0, F.interpolate(ref[None], size=(side, side), mode="bilinear")[0] > 0]
    target = TARGETS.get(side, {}).get(o)
    row = dict(size=side, classes=o, context=k, absent=int((~masks.any((2, 3))).sum()), seconds_predictor=plain, seconds_predictor_once=once,
               seconds_cached=cached, seconds_to_remember=remember, ratio=once/cached, ratio_predictor_as_it_comes=plain/cached, target=target,
               encodings=dict(predictor=n_plain, predictor_once=n_once, cached=n), largest_difference=(logits - ref).abs().max().item(),
               different_pixels=(big[0] != big[1]).float().mean().item(), difference_without_masks=(logits - without).abs().max().item(),
               foreground=big[1].float().mean().item())
    row["ok"] = row["largest_difference"] < 1e-3 and row["different_pixels"] <= 1e-5 and (target is None or row["ratio"] >= target)
    return {key: round(v, 8) if isinstance(v, float) else v for key, v in row.items()}


def main(argv=None):
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", default="tiny")
    a.add_argument("--sizes", type=int, nargs="+", default=[256, 512])
    a.add_argument("--classes", type=int, nargs="+", default=[1, 3, 10])
    a.add_argument("--context", type=int, default=10)
    a.add_argument("--repeats", type=int, default=5)
    a.add_argument("--quick", action="store_true", help="256 px, 1 and 3 classes, once each")
    a.add_argument("--out", type=Path)
    a = a.parse_args(argv)
    if a.quick: a.sizes, a.classes, a.repeats = [256], [1, 3], 2
    torch.set_num_threads(1)
    rows = []
    for side in a.sizes:
        with load_segmenter(a.model, device="cpu", image_size=side) as segmenter:
            shake(segmenter)
            for o in a.classes:
                rows.append(compare(segmenter, a.context, o, a.repeats))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = dict(model=a.model, rows=rows, ok=all(r["ok"] for r in rows), versions=dict(versions(), sam2=metadata.version("sam2")))
    print(json.dumps(result, indent=2))
    if a.out: a.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__": sys.exit(main())
