"""In-context segmentation of real pictures: CHAOS (3 MR scans, 4 organs) and CVC-ClinicDB (286 views of 13 polyps).

python tests/bench/real_segmentation.py DATA --segmenter RUN --retriever RUN --out JSON     DATA holds chaos-t2-mr/ and cvc-clinicdb/

RUN of --segmenter is a run of `freerep finetune --preset nano` on phantoms (`freerep synth PHANTOMS --volumes 24 --size 64`), or its last.safetensors; RUN of --retriever one of
`freerep retriever` on the same phantoms. Rows: weights that learned nothing, those of RUN, those of RUN after `freerep finetune` on other real pictures, and the mask of the most
similar example copied. Scans: two are the examples, the third is segmented, three times. Polyps: the context of a view is either other views of its sequence, or views of other
sequences; the fine-tuning is done twice, each time for the sequences that it has not seen. About 10 minutes of one core, most of it the five fine-tunings of --steps steps.

With --work FOLDER everything is kept there, and what is there already is not done again; --only chaos or --only cvc does one of the two. Nano weights and some minutes of training
show whether the parts work together on real pictures, not how well organs or polyps can be segmented.
"""
import argparse, contextlib, platform, shutil, sys, tempfile, time
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from freerep.bank import open_bank
from freerep.cli import main as cli
from freerep.core import progress, read_json, versions, write_json
from freerep.examples import open_query, save_mask
from freerep.image_segmentation import segment_image
from freerep.phantom_demo import copied
from helpers_real import CHAOS_ORGANS, chaos_pair, context_among, cvc_pair, cvc_sequences, place

ROWS = dict(untrained="untrained", phantoms="trained on phantoms", finetuned="fine-tuned on real pictures", copied="mask of the most similar example")


class Bench:
    "The settings, and the commands with them; what a folder of `work` holds already is not made again"
    def __init__(self, data, work, segmenter, retriever, *, steps=300, k=10, seed=0):
        self.data, self.work, self.retriever, self.steps, self.k, self.seed, self.seconds = data, work, retriever, steps, k, seed, {}
        self.weights = segmenter/"last.safetensors" if segmenter.is_dir() else segmenter
    def freerep(self, command, *args, out):
        "Run `freerep COMMAND ... --out OUT` unless OUT is there"
        if out.exists() and (command != "finetune" or (out/"last.safetensors").exists()): return out
        start = time.process_time()
        with contextlib.redirect_stdout(sys.stderr): status = cli([command, *map(str, args), "--out", str(out), *(["--resume"] if command == "finetune" else [])])
        if status: sys.exit(f"freerep {command} ended with status {status}")
        self.seconds[out.relative_to(self.work).as_posix()] = round(time.process_time() - start, 1)
        return out
    def bank(self, examples, weights, out): return self.freerep("bank", examples, "--retriever", self.retriever, "--sam2", "nano", *(("--checkpoint", weights) if weights else ()), out=out)
    def finetune(self, examples, out, *settings):
        self.freerep("finetune", examples, "--retriever", self.retriever, "--checkpoint", self.weights, "--preset", "nano", "--set", f"steps={self.steps}", f"seed={self.seed}", *settings, out=out)
        return out/"last.safetensors"


def scores(found):
    "{class: Dice per volume, per slice that shows it in truth or prediction, per slice that shows it in truth; slices} of a result of `freerep segeval`"
    def one(c):
        shown = c["slices"] - c["false_slices"]
        return dict(volume=c["dice_volume"], slice=c["dice_slice"], shown=c["dice_slice"]*c["slices"]/shown if shown else None, slices=c["slices"], false_slices=c["false_slices"], missed_slices=c["missed_slices"])
    return {c["name"]: one(c) for c in found["classes"]}


def copy_scan(bench, bank, scan, out):
    "The labels of the most similar slice, for every slice of a scan"
    bank, query = open_bank(bank), open_query(scan)
    answer = copied(bank)
    with query.writer(out, bank.classes, bank.examples.colours) as writer:
        for i, image in query.items(): writer.write(i, answer(image, bank.select(image, bench.k))[0])
    return out


def chaos_query(bench, q):
    "{row: {organ: scores}} of scan q, from the two others"
    folder = bench.work/f"chaos-{q}"
    examples, query = folder/"examples", folder/"query"
    if not query.exists(): chaos_pair(examples, bench.data, [n for n in (1, 2, 3) if n != q]), chaos_pair(query, bench.data, [q])
    weights = dict(untrained=None, phantoms=bench.weights, finetuned=bench.finetune(examples, folder/"segmenter", f"classes={len(CHAOS_ORGANS)}"))
    scan, truth, found = query/f"images/chaos_{q}.nii.gz", query/f"labels/chaos_{q}.nii.gz", {}
    for row in ROWS:
        masks = folder/f"{row}-masks"
        if row in weights: bench.freerep("segment", bench.bank(examples, weights[row], folder/f"{row}-bank"), scan, "--k", bench.k, out=masks)
        elif not masks.exists(): copy_scan(bench, folder/"phantoms-bank", scan, masks)
        if place(masks/f"chaos_{q}_seg.nii.gz") != place(scan): sys.exit(f"{masks}: the labels do not lie where the scan lies: {place(masks/f'chaos_{q}_seg.nii.gz')}, {place(scan)}")
        found[row] = scores(read_json(bench.freerep("segeval", masks, truth, out=folder/f"{row}.json")))
    return found


def chaos_table(found):
    "Dice in percent: per volume of scan 3 by organ and in the mean, and the means over the three choices of the query"
    def cells(row):
        of = {q: pd.DataFrame(f[row]).T.astype(float) for q, f in found.items()}
        means = pd.DataFrame({q: t[["volume", "slice", "shown"]].mean() for q, t in of.items()})
        first = list(found)[0]
        return {**of[first].volume.add_prefix(f"scan {first}: "), **means[first].add_prefix(f"scan {first}, mean per "), **means.mean(axis=1).add_prefix(f"{len(of)} scans, mean per ")}
    return 100*pd.DataFrame({name: cells(row) for row, name in ROWS.items()})


def answer_views(bench, bank, at, allowed, folders, answers):
    "Segment some views of a bank from others of it: `allowed(i)` says which; `answers(bank)` gives {folder name: answer(image, context)}"
    answers = answers(bank)
    for i in progress(at, len(at), "views"):
        for how, allow in allowed.items():
            context = context_among(bank, i, allow(i), bench.k)
            for row, answer in answers.items():
                save_mask(answer(bank.examples.image(i), context), folders/how/row/f"{bank.examples.names[i]}.png", bank.examples.colours)


def cvc_rows(bench, folder, folds):
    "Write the masks of every row for both kinds of context"
    group, everything = (lambda name: int(name.split("/")[0])), folder/"examples"
    if not everything.exists(): cvc_pair(everything, bench.data, cvc_sequences(bench.data))
    segmenter = lambda row: lambda bank: {row: lambda image, context: segment_image(bank, image, context=context).labels}
    both = lambda bank: {**segmenter("phantoms")(bank), "copied": lambda image, context: copied(bank)(image, context)[0]}
    def run(row, weights, sequences, answers, name):
        if (folder/f"{name}.done").exists(): return
        bank = open_bank(bench.bank(everything, weights, folder/f"{name}-bank"))
        of = np.array([group(n) for n in bank.examples.names])
        allowed = dict(same=lambda i: np.flatnonzero((of == of[i]) & (np.arange(len(of)) != i)), other=lambda i: np.flatnonzero(of != of[i]))
        answer_views(bench, bank, np.flatnonzero(np.isin(of, sequences)).tolist(), allowed, folder, answers)
        (folder/f"{name}.done").touch()
    all_sequences = sum(folds, [])
    run("untrained", None, all_sequences, segmenter("untrained"), "untrained")
    run("phantoms", bench.weights, all_sequences, both, "phantoms")
    for f, tested in enumerate(folds):
        seen = folder/f"fold{f}-examples"
        if not seen.exists(): cvc_pair(seen, bench.data, {s: n for s, n in cvc_sequences(bench.data).items() if s not in tested})
        run("finetuned", bench.finetune(seen, folder/f"fold{f}-segmenter", "own=0.5"), tested, segmenter("finetuned"), f"fold{f}")


def cvc(bench):
    "{kind of context: {row: Dice over views, over sequences, of each sequence}}"
    folder, sequences = bench.work/"cvc", list(cvc_sequences(bench.data))
    folds = [sequences[::2], sequences[1::2]]
    cvc_rows(bench, folder, folds)
    def one(how, row):
        found = read_json(bench.freerep("segeval", folder/how/row, folder/"examples", out=folder/f"{how}-{row}.json"))
        each = pd.Series({e["name"]: e["dice"]["1"] for e in found["each"]}).astype(float).fillna(0)
        per = each.groupby(lambda n: n.split("/")[0]).mean()
        return dict(views=float(each.mean()), median=float(each.median()), sequences=float(per.mean()), missed=found["classes"][0]["missed_slices"], frames=len(each), each=per.to_dict())
    return dict(folds=folds, context={how: {row: one(how, row) for row in ROWS} for how in ("same", "other")})


def cvc_table(found):
    "Dice in percent"
    names = dict(same="other views of the polyp", other="other polyps")
    return pd.DataFrame({ROWS[row]: {f"{names[how]}, {what}": f[row][what]*(1 if what == "missed" else 100) for how, f in found["context"].items() for what in ("views", "median", "sequences", "missed")} for row in ROWS})


def cpu_name():
    "What the processor calls itself"
    info = Path("/proc/cpuinfo")
    return next((l.split(":")[1].strip() for l in info.read_text().splitlines() if l.startswith("model name")), platform.machine()) if info.exists() else platform.processor() or platform.machine()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("data", type=Path)
    p.add_argument("--segmenter", type=Path, required=True, help="a run of `freerep finetune --preset nano`, or its weights")
    p.add_argument("--retriever", type=Path, required=True, help="a run of `freerep retriever`")
    p.add_argument("--out", type=Path, required=True, help="JSON with everything that was computed")
    p.add_argument("--only", choices=("chaos", "cvc"))
    p.add_argument("--steps", type=int, default=300, help="of each fine-tuning")
    p.add_argument("--k", type=int, default=10, help="context images")
    p.add_argument("--seed", type=int, default=0, help="of the fine-tunings")
    p.add_argument("--work", type=Path, help="keep everything here, go on from what is here")
    a = p.parse_args()
    facts = dict(seed=a.seed, steps=a.steps, k=a.k, segmenter=str(a.segmenter), retriever=str(a.retriever), versions=versions(), hardware=cpu_name())
    with contextlib.nullcontext(a.work) if a.work else tempfile.TemporaryDirectory() as work:
        bench = Bench(a.data, Path(work).absolute(), a.segmenter, a.retriever, steps=a.steps, k=a.k, seed=a.seed)
        results = {**facts, "seconds": bench.seconds}
        if a.only != "cvc": results["chaos"] = {str(q): chaos_query(bench, q) for q in (3, 1, 2)}
        if a.only != "chaos": results["cvc"] = cvc(bench)
        write_json(results, a.out)
    print(f"Dice in percent; nano weights and {a.steps} steps of fine-tuning: this tests the plumbing on real pictures, the figures are not those of a method")
    with pd.option_context("display.width", 200):
        for name, table in (("chaos", chaos_table), ("cvc", cvc_table)):
            if name in results: print(f"\n{name}\n{table(results[name]).to_string(float_format='{:.1f}'.format)}")


if __name__ == "__main__": main()
