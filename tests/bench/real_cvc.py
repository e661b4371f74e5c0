"""Evaluation on CVC-ClinicDB (13 sequences of real polyps, 55 tracklets of 5 frames), at several crops.

python tests/bench/real_cvc.py DATA [--run RUN ...]     DATA holds cvc-clinicdb/; a run may be one of `freerep train`, with any backbone
"""
import argparse, sys, tempfile
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from freerep.core import InputError, write_json
from freerep.encoder import create_encoder
from freerep.evaluation import evaluate, metrics_table
from freerep.index import embed, embed_pixels
from freerep.pretraining import PretrainConfig, load_run, pretrain
from freerep.sources import open_source
from helpers_cvc import cvc_procedures, cvc_tracklets

VIEWS = {"5x": dict(boxes=True), "5x, masked": dict(boxes=True, mask_polyp=True), "1.3x": dict(boxes=True, crop_scale=1.3), "full frame": dict()}


class Frozen(torch.nn.Module):
    "A backbone alone: its features of the frames, averaged over the tracklet, in the place of the transformer's output"
    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.cls_token = backbone, torch.nn.Parameter(torch.zeros(1, 1, 1280))
    def frames(self, clips): return self.backbone(clips.flatten(0, 1)).unflatten(0, clips.shape[:2])
    def aggregate(self, tokens, mask=None): return tokens.mean(1)


def encoders(source, runs, folder):
    "name -> something that `embed` takes"
    untrained = lambda preset: pretrain(source, PretrainConfig(preset, epochs=0, length=4, stride=1), out=folder/f"untrained-{preset}")
    yield "untrained small", untrained("tiny")
    for path in runs: yield str(path), load_run(path)
    try: laptop = untrained("laptop")
    except InputError as e: return print(e, file=sys.stderr)
    frozen = Frozen(create_encoder("lite0", weights="imagenet").backbone)
    yield "frozen lite0, frames averaged", SimpleNamespace(path=None, config=laptop.config, encoder=lambda: frozen)
    yield "lite0 under an untrained transformer", laptop


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("data", type=Path)
    p.add_argument("--run", nargs="*", default=[], type=Path, action="extend")
    p.add_argument("--out", type=Path, help="JSON with everything that was computed")
    a, results = p.parse_args(), {}
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(cvc_procedures(Path(folder)/"procedures", a.data))
        table = cvc_tracklets(source)
        for name, run in encoders(source, a.run, Path(folder)):
            for view, how in VIEWS.items():
                print(f"{name} | {view}", file=sys.stderr, flush=True)
                results[f"{name} | {view}"] = evaluate(embed(source, run, table=table, **how))
        for kind in ("mean_colour", "thumbnail"): results[f"{kind} | 5x"] = evaluate(embed_pixels(source, kind, table=table))
    with pd.option_context("display.width", 200): print(metrics_table(results).dropna(axis=1, how="all").to_string())
    if a.out: write_json(results, a.out)


if __name__ == "__main__": main()
