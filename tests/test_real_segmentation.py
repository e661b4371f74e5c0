"""Real scans and real polyps through in-context segmentation. A segmenter that has learnt nothing: this tests the plumbing, not the method."""
import importlib.util, json
from pathlib import Path

import nibabel as nib
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from freerep.bank import ExampleBank, open_bank
from freerep.cli import main
from freerep.examples import open_examples, open_query
from freerep.image_segmentation import segment_image
from freerep.phantom_demo import copied
from freerep.segmenter import load_segmenter
from helpers_real import CHAOS_ORGANS, chaos_pair, context_among, cvc_pair, cvc_sequences, place

voxels = lambda path: np.asanyarray(nib.load(path).dataobj)


def freerep(*args): assert main([str(a) for a in args]) == 0


def dice(a, b): return 2*(a & b).sum()/(a.sum() + b.sum())


def few_slices(folder, keep):
    "Keep these slices of the scans of a pair, as files of their own"
    for link in sorted(Path(folder).glob("*/*.nii.gz")):
        im = nib.load(link).slicer[:, :, keep]
        im = nib.Nifti1Image(np.asanyarray(im.dataobj), im.affine, im.header)
        link.unlink()
        nib.save(im, link)
    return folder


def turned(path, out, how):
    "The same scan, its axes stored in another order or direction; `how` such as 'RAS'"
    im = nib.load(path)
    move = nib.orientations.ornt_transform(nib.io_orientation(im.affine), nib.orientations.axcodes2ornt(how))
    nib.save(im.as_reoriented(move), out)
    return move


@pytest.fixture(scope="module")
def chaos(tmp_path_factory, shared_data):
    "Scans 1 and 2 as a bank, and the middle of scan 3 segmented"
    folder = tmp_path_factory.mktemp("chaos")
    chaos_pair(folder/"examples", shared_data, (1, 2)), few_slices(chaos_pair(folder/"query", shared_data, (3,)), slice(14, 24))
    freerep("bank", folder/"examples", "--sam2", "nano", "--out", folder/"bank")
    freerep("segment", folder/"bank", folder/"query/images/chaos_3.nii.gz", "--k", 4, "--out", folder/"masks")
    return folder


def test_a_real_scan_end_to_end(chaos):
    scan, masks, truth = (chaos/p for p in ("query/images/chaos_3.nii.gz", "masks/chaos_3_seg.nii.gz", "query/labels/chaos_3.nii.gz"))
    assert place(masks) == place(scan) and place(masks)["orientation"] == "LAS" and place(masks)["shape"] == [256, 256, 10]
    for code in ("qform_code", "sform_code"): assert nib.load(masks).header[code] == nib.load(scan).header[code]
    assert np.allclose(nib.load(masks).get_qform(), nib.load(scan).get_qform()) and nib.load(masks).header.get_zooms() == nib.load(scan).header.get_zooms()
    found, real = voxels(masks), voxels(truth)
    assert found.dtype == np.uint8 and set(np.unique(found)) <= {0, 1, 2, 3, 4} and (found > 0).any()
    table = pd.read_csv(chaos/"masks/confidence.csv")
    assert len(table) == 10*4 and set(table.name) == set(CHAOS_ORGANS.values()) and table.confidence.between(0, 1).all()
    assert {(f, c): p for f, c, p in zip(table.frame, table["class"], table.pixels)} == {(f, c): int((found[:, :, k] == c).sum()) for k, f in enumerate(table.frame.unique()) for c in (1, 2, 3, 4)}
    freerep("segeval", chaos/"masks", truth, "--out", chaos/"scores.json")
    scores = json.loads((chaos/"scores.json").read_text())
    assert [s["name"] for s in scores["classes"]] == list(CHAOS_ORGANS.values())
    for s in scores["classes"]:
        per_slice = [dice(found[:, :, k] == s["class"], real[:, :, k] == s["class"]) for k in range(10) if (found[:, :, k] == s["class"]).any() or (real[:, :, k] == s["class"]).any()]
        assert s["dice_volume"] == pytest.approx(dice(found == s["class"], real == s["class"])) and s["dice_slice"] == pytest.approx(np.mean(per_slice)) and s["slices"] == len(per_slice)


@pytest.mark.parametrize("how", ["RAS", "LPS", "LAI", "SRP"])
def test_a_scan_stored_in_another_direction_gives_the_same_labels_there(chaos, tmp_path, how):
    scan = tmp_path/"chaos_3.nii.gz"
    move = turned(chaos/"query/images/chaos_3.nii.gz", scan, how)
    assert place(scan)["orientation"] == how and not np.array_equal(voxels(scan), voxels(chaos/"query/images/chaos_3.nii.gz"))
    freerep("segment", chaos/"bank", scan, "--k", 4, "--out", tmp_path/"masks")
    found, before = voxels(tmp_path/"masks/chaos_3_seg.nii.gz"), voxels(chaos/"masks/chaos_3_seg.nii.gz")
    assert place(tmp_path/"masks/chaos_3_seg.nii.gz") == place(scan)
    assert np.array_equal(found, nib.orientations.apply_orientation(before, move)) and not np.array_equal(found, before)


@pytest.mark.parametrize("how", ["LAS", "RPI"])
def test_labels_of_a_scan_overlay_the_scan(chaos, shared_data, tmp_path, how):
    "The scan itself is among the examples, and the labels of the most similar slice are copied: they must be the true ones, in whatever way the scan is stored"
    chaos_pair(tmp_path/"examples", shared_data, (1, 3))
    bank = ExampleBank(tmp_path/"examples", retriever="random", segmenter=load_segmenter("nano"))
    for kind in ("images", "labels"): move = turned(chaos/f"query/{kind}/chaos_3.nii.gz", tmp_path/f"{kind}.nii.gz", how)
    query = open_query(tmp_path/"images.nii.gz", bank.examples.items[-1].volume.window)      # ten slices would choose another window
    with query.writer(tmp_path/"masks") as writer:
        for i, image in query.items(): writer.write(i, copied(bank)(image, bank.select(image, 4))[0])
    truth = voxels(tmp_path/"labels.nii.gz")
    assert np.array_equal(voxels(writer.paths[0]), truth) and all((truth == c).any() for c in (1, 2, 3, 4))
    freerep("segeval", writer.paths[0], chaos/"query/labels/chaos_3.nii.gz", "--out", tmp_path/"scores.json")
    assert json.loads((tmp_path/"scores.json").read_text())["mean"]["dice_volume"] == 1       # against the truth as it was stored first


def test_a_view_from_the_other_views_of_its_polyp(shared_data, tmp_path):
    "A bank without the view, and the bench's way to leave it out of the context, give one answer; masks with grey edges are read at 127"
    frames = cvc_sequences(shared_data)
    assert sum(map(len, frames.values())) == 286 and len(frames) == 13
    s, numbers = 10, frames[10]
    view, rest = numbers[2], [n for n in numbers if n != numbers[2]]
    for name, some in (("all", numbers), ("rest", rest), ("one", [view])): cvc_pair(tmp_path/name, shared_data, {s: some})
    for name in ("all", "rest"): freerep("bank", tmp_path/name, "--sam2", "nano", "--out", tmp_path/f"{name}-bank")
    freerep("segment", tmp_path/"rest-bank", tmp_path/f"one/images/{s}/{view}.png", "--k", 3, "--out", tmp_path/"masks")
    found = np.asarray(Image.open(tmp_path/f"masks/{view}.png"))
    real = np.asarray(Image.open(shared_data/f"cvc-clinicdb/masks/{view}.png").convert("L")) > 127
    bank = open_bank(tmp_path/"all-bank")
    i = bank.examples.names.index(f"{s}/{view}")
    context = context_among(bank, i, np.flatnonzero(np.arange(len(bank)) != i), 3)
    answer = segment_image(bank, bank.examples.image(i), context=context)
    assert found.shape == real.shape == (288, 384) and np.array_equal(found, answer.labels) and i not in context and 0 < (found > 0).mean() < 1
    assert np.array_equal(bank.examples.labels(i) > 0, real)
    freerep("segeval", tmp_path/"masks", tmp_path/"one", "--out", tmp_path/"scores.json")
    scores = json.loads((tmp_path/"scores.json").read_text())
    assert [c["name"] for c in scores["classes"]] == ["polyp"] and scores["mean"]["dice_slice"] == pytest.approx(dice(found > 0, real))


@pytest.mark.parametrize("sequence", [1, 6, 11])
def test_masks_of_real_polyps_are_drawings(shared_data, tmp_path, sequence):
    "Those with the most dark grey in them"
    examples = open_examples(cvc_pair(tmp_path, shared_data, {sequence: cvc_sequences(shared_data)[sequence]}))
    assert examples.classes == {1: "polyp"} and "below 128 counts as background" in examples.problems[0]["problem"]
    for e in examples: assert np.array_equal(e.labels > 0, np.asarray(Image.open(shared_data/f"cvc-clinicdb/masks/{e.name.split('/')[1]}.png").convert("L")) > 127)


def test_the_tables_of_the_bench():
    "From made-up results: what is a mean over what"
    spec = importlib.util.spec_from_file_location("real_segmentation", Path(__file__).parent/"bench/real_segmentation.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    one = bench.scores(dict(classes=[dict(name="liver", dice_volume=.5, dice_slice=.4, slices=10, false_slices=2, missed_slices=1)]))
    assert one["liver"]["shown"] == pytest.approx(.5) and one["liver"]["volume"] == .5                # ten slices, two of which the truth leaves empty
    organs = lambda *d: {o: dict(volume=x, slice=x/2, shown=x, slices=4, false_slices=0, missed_slices=0) for o, x in zip("ab", d)}
    table = bench.chaos_table({q: {row: organs(x, y) for row in bench.ROWS} for q, x, y in (("3", .1, .3), ("1", .5, .7))})["untrained"]
    assert table["scan 3: a"] == pytest.approx(10) and table["scan 3, mean per volume"] == pytest.approx(20) and table["2 scans, mean per volume"] == pytest.approx(40) and table["2 scans, mean per slice"] == pytest.approx(20)
    row = dict(views=.5, median=.4, sequences=.3, missed=2)
    assert bench.cvc_table(dict(context=dict(same={r: row for r in bench.ROWS}, other={r: row for r in bench.ROWS})))[bench.ROWS["copied"]].tolist() == [50, 40, 30, 2]*2
