"""Images and scans segmented through the bank: equal to SAM2's own predictor, counted, in the query's own space."""
import functools
import re
from importlib.util import find_spec

import nibabel as nib
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform
from PIL import Image

from freerep.bank import ExampleBank, make_bank
from freerep.core import InputError
from freerep.examples import ArrayQuery, array_examples, open_examples, open_query, save_mask
from freerep.image_segmentation import Result, confidence_of, label_map, segment_image, segment_query
from freerep.segmenter import Features, Memory, Prediction, load_segmenter, plain_predictor

pytestmark = pytest.mark.skipif(find_spec("sam2") is None, reason="the package sam2 is not installed")


class Mean:
    "A retriever: the mean colour"
    fingerprint, path, name = "mean", None, "random"
    def embed(self, images):
        v = np.stack([np.append(np.asarray(x, np.float32).mean((0, 1)), 50.) for x in images]).astype(np.float32)
        return v/np.linalg.norm(v, axis=1, keepdims=True)


class Bright:
    """A segmenter of a few lines, which needs no weights: a class is what is as bright as the examples show it.

    It stands where another video segmenter may be put, and it knows the right answer."""
    name, image_size, memory_bytes, fingerprint, device = "bright", 64, 1024, "bright-64", torch.device("cpu")
    def __init__(self): self.encodings = 0
    def encode(self, images):
        self.encodings += len(images)
        return Features([torch.tensor(np.asarray(images)[..., 0], dtype=torch.float32)[:, None]], images.shape[1:3])
    def remember(self, features, masks):
        x = features.maps[0][0, 0]
        value = torch.tensor([[float(x[torch.as_tensor(m)].mean()) if m.any() else torch.nan] for m in masks])
        return Memory(torch.zeros(len(masks), 1, 1, 1, dtype=torch.bfloat16), value)
    def segment(self, features, memories, use=None):
        value = torch.stack([m.pointer[:, 0] for m in memories])
        value = torch.where(torch.as_tensor(use), value, torch.nan).nanmedian(0).values
        logits = 5 - (features.maps[0][0] - value[:, None, None]).abs()
        there = ~value.isnan()
        return Prediction(logits.nan_to_num(-1024), there.float(), torch.where(there, 9., -9.), None, None)
    def upsample(self, logits, size): return F.interpolate(logits[None], size=tuple(size), mode="nearest")[0]


def shake(segmenter, seed=1):
    "Random weights hardly answer to the context; these do"
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in segmenter.model.named_parameters():
            if p.ndim < 2: p.add_(torch.randn(p.shape, generator=g)*.05)
            elif name.startswith(("memory_attention", "memory_encoder", "sam_mask_decoder", "obj_ptr_proj")): p.mul_(3.)
        segmenter.model.sam_mask_decoder.pred_obj_score_head.layers[-1].bias.add_(3.)
    return segmenter


@functools.cache
def shaken(name="nano", size=None): return shake(load_segmenter(name, device="cpu", image_size=size))


def smooth(r, h, w): return np.asarray(Image.fromarray(r.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((w, h), Image.Resampling.BICUBIC))


def blobs(r, o, h, w):
    "Labels of o classes, about half of them absent; the first is there"
    y, x = np.mgrid[:h, :w]/max(h, w)
    labels = np.zeros((h, w), np.int32)
    for c in range(o, 0, -1):
        if c > 1 and r.random() < .5: continue
        cy, cx, radius = *r.uniform(.2, .7, 2), r.uniform(.06, .2)
        labels[(x - cx)**2 + (y - cy)**2 < radius**2] = c
    return labels


def jpeg(image, path):
    Image.fromarray(image).save(path, quality=95)
    return np.asarray(Image.open(path).convert("RGB"))


def scene(seed, k, o, tmp_path, h=72, w=96):
    "k examples and a query as they come back from JPEG files"
    r = np.random.default_rng([seed, k, o])
    images = [jpeg(smooth(r, h, w), tmp_path/f"{t}.jpg") for t in range(k + 1)]
    return images, [blobs(r, o, h, w) for _ in range(k)]


def plain(segmenter, folder, order, labels, o):
    "Logits (o, h, w) at the size of the video, by SAM2's own predictor on a video of the context and the query; and the encodings"
    folder.mkdir()
    for t, i in enumerate(order): (folder/f"{t}.jpg").write_bytes((folder.parent/f"{i}.jpg").read_bytes())
    predictor, count = plain_predictor(segmenter), [0]
    inner = predictor.forward_image
    def counted(x): count[0] += len(x); return inner(x)
    predictor.forward_image = counted
    state = predictor.init_state(str(folder))
    for t, i in enumerate(order[:-1]):
        for c in range(o): predictor.add_new_mask(state, t, c, torch.tensor(labels[i] == c + 1))
    for _, _, video in predictor.propagate_in_video(state): pass
    return video[:, 0].numpy(), count[0]


# ---------------------------------------------------------------- equal to the plain way

@pytest.mark.parametrize("o", [1, 3, 10])
@pytest.mark.parametrize("k, seed", [(3, 0), (5, 1)])
def test_equals_the_plain_way_through_the_bank(tmp_path, o, k, seed):
    (images, labels), segmenter = scene(seed, k, o, tmp_path), shaken()
    bank = ExampleBank(array_examples(images[:k], labels, classes={c: str(c) for c in range(1, o + 1)}), retriever=Mean(), segmenter=segmenter, folder=tmp_path/"bank")
    assert o == 1 or not bank.present.all()
    before = segmenter.encodings
    first = segment_image(bank, images[k], k=k, strategy="topk", logits=True)
    assert segmenter.encodings - before == k + 1
    before = segmenter.encodings
    again = segment_image(bank, images[k], k=k, strategy="topk", logits=True)
    assert segmenter.encodings - before == 1 and np.array_equal(first.logits, again.logits)
    other = ExampleBank(bank.examples, retriever=Mean(), segmenter=segmenter, folder=tmp_path/"bank")      # from disk
    assert np.array_equal(segment_image(other, images[k], k=k, strategy="topk", logits=True).logits, first.logits)
    ref, n = plain(segmenter, tmp_path/"plain", [*first.context.tolist(), k], labels, o)
    assert abs(first.logits - ref).max() < 1e-3 and ((first.logits > 0) != (ref > 0)).mean() <= 1e-5
    assert n > k + 1 and ref.std() > .1
    truth = np.where((ref > 0).any(0), ref.argmax(0) + 1, 0)
    assert (first.labels != truth).mean() <= 1e-5 and first.labels.dtype == np.int32


def test_equals_the_plain_way_with_an_official_size(tmp_path):
    "The tiny architecture, which has several proposals a mask"
    (images, labels), segmenter = scene(3, 2, 2, tmp_path, 90, 128), shaken("tiny", 128)
    bank = ExampleBank(array_examples(images[:2], labels, classes={1: "a", 2: "b"}), retriever=Mean(), segmenter=segmenter)
    r = segment_image(bank, images[2], k=2, logits=True)
    ref, _ = plain(segmenter, tmp_path/"plain", [*r.context.tolist(), 2], labels, 2)
    assert abs(r.logits - ref).max() < 1e-3 and ((r.logits > 0) != (ref > 0)).mean() <= 1e-5


@pytest.mark.parametrize("absent", ["empty", "ignore"])
def test_absent_and_unlabelled_classes(tmp_path, absent):
    "Each class gets the context that a bank of the images that count for it would give"
    (images, labels), segmenter = scene(5, 4, 3, tmp_path), shaken()
    known = [{1, 2, 3}, {1, 2}, {1, 3}, {1, 2, 3}]
    names = {1: "a", 2: "b", 3: "c"}
    bank = ExampleBank(array_examples(images[:4], labels, classes=names, known=known), retriever=Mean(), segmenter=segmenter)
    r = segment_image(bank, images[4], k=4, absent=absent, logits=True)
    for o, c in enumerate(names):
        shown = lambda i: (labels[i] == c).any()
        own = [i for i in r.context if shown(i) or absent == "empty" and c in known[i]]
        alone = ExampleBank(array_examples([images[i] for i in own], [(labels[i] == c).astype(int) for i in own], classes={1: "x"}), retriever=Mean(), segmenter=segmenter)
        assert abs(segment_image(alone, images[4], context=range(len(own)), logits=True).logits[0] - r.logits[o]).max() < 1e-3


def test_a_class_that_no_chosen_image_shows():
    r = np.random.default_rng(0)
    bank = ExampleBank(array_examples([smooth(r, 64, 64) for _ in range(2)], [np.full((64, 64), c) for c in (1, 2)]), retriever=Mean(), segmenter=shaken())
    found = segment_image(bank, smooth(r, 64, 64), context=[0], absent="ignore", logits=True)
    assert found.confidence[2] == 0 and not (found.labels == 2).any() and (found.logits[1] < 0).all()


# ---------------------------------------------------------------- label map and confidence

@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 20), st.integers(1, 20))
def test_label_map_is_the_largest_positive_logit(seed, o, h, w):
    g = torch.Generator().manual_seed(seed)
    logits, ids = torch.randn(o, 7, 7, generator=g) - .5, np.random.default_rng(seed).permutation(300)[:o] + 1
    large = F.interpolate(logits[None], size=(h, w), mode="bilinear")[0]
    value, best = large.max(0)
    assert np.array_equal(label_map(shaken(), logits, ids.tolist(), (h, w)), np.where(value > 0, ids[best], 0))


def test_confidence_by_hand():
    p = Prediction(None, torch.tensor([1., .8, .8, .8, 1.2]), torch.tensor([np.log(3.), 0., 50., -50., 50.]), None, None)
    assert np.allclose(confidence_of(p), [.75, .4, .8, 0, 1], atol=1e-6)


def test_gamma_leaves_out_masks_and_keeps_the_numbers(tmp_path):
    images, labels = scene(1, 3, 3, tmp_path)
    bank = ExampleBank(array_examples(images[:3], labels, classes={1: "a", 2: "b", 3: "c"}), retriever=Mean(), segmenter=shaken())
    full = segment_image(bank, images[3], logits=True)
    for gamma in (0, *full.confidence.values(), 1):
        r = segment_image(bank, images[3], gamma=gamma)
        assert r.confidence == full.confidence
        kept = np.where(np.array([full.confidence[c] >= gamma for c in bank.ids])[:, None, None], full.logits, -1)
        assert np.array_equal(r.labels, np.where((kept > 0).any(0), kept.argmax(0) + 1, 0))
    for bad in (-.1, 2): pytest.raises(InputError, segment_image, bank, images[3], gamma=bad)


def test_arguments(tmp_path):
    images, labels = scene(2, 3, 2, tmp_path)
    bank = ExampleBank(array_examples(images[:3], labels), retriever=Mean(), segmenter=shaken())
    masks, confidence = bank.segment(images[3], k=2)
    r = segment_image(bank, images[3], k=2)
    assert np.array_equal(masks, r.labels) and confidence == r.confidence and r.logits is None and len(r.context) == 2
    assert np.array_equal(segment_image(bank, images[3][..., 0]).labels, segment_image(bank, np.repeat(images[3][..., :1], 3, -1)).labels)
    for kwargs, text in ((dict(strategy="x"), "strategy"), (dict(absent="x"), "absent"), (dict(k=0), "k=0")):
        with pytest.raises(InputError, match=text): segment_image(bank, images[3], **kwargs)
    with pytest.raises(InputError, match="image: expected a picture"): segment_image(bank, images[3]/255)


# ---------------------------------------------------------------- folders

GREYS = {1: 200, 2: 120}


def drawn(seed, h=48, w=40):
    "Two rectangles of known brightness on black, and their labels"
    r, labels = np.random.default_rng(seed), np.zeros((h, w), np.int32)
    for c in GREYS: y, x = r.integers(0, h//2), r.integers(0, w//2); labels[y:y + 14, x:x + 10] = c
    return sum((g*(labels == c) for c, g in GREYS.items()), np.zeros((h, w))).astype(np.uint8), labels


def bright_bank(n=3):
    images, labels = zip(*[drawn(i) for i in range(n)])
    return ExampleBank(array_examples(images, labels, classes={1: "white", 2: "grey"}), retriever=Mean(), segmenter=Bright())


def test_folder_of_pictures_of_different_sizes(tmp_path):
    truth, folder, bank = {}, tmp_path/"q", bright_bank()
    folder.mkdir()
    for i, size in enumerate([(48, 40), (60, 33), (31, 90)]):
        image, truth[f"p{i}"] = drawn(10 + i, *size)
        Image.fromarray(image).save(folder/f"p{i}.png")
    table = segment_query(bank, folder, tmp_path/"out", k=2)
    for name, labels in truth.items():
        with Image.open(tmp_path/f"out/{name}.png") as im:
            assert im.mode == "P" and np.array_equal(np.array(im), labels)
            assert tuple(im.getpalette()[3:6]) == tuple(bank.examples.colours[1])
    csv = pd.read_csv(tmp_path/"out/confidence.csv")
    assert list(csv.columns)[:3] == ["frame", "class", "confidence"] and len(csv) == 6 and csv.frame.tolist() == ["p0"]*2 + ["p1"]*2 + ["p2"]*2
    assert csv.confidence.between(0, 1).all() and np.allclose(csv.confidence, table.confidence) and csv.drop(columns='confidence').astype(str).equals(table.drop(columns='confidence').astype(str)) and (csv["class"].tolist(), csv.name.tolist()) == ([1, 2]*3, ["white", "grey"]*3)
    assert {p.name for p in (tmp_path/"out").iterdir()} == {".freerep", "p0.png", "p1.png", "p2.png", "classes.json", "confidence.csv", "report.html"}


def test_report_is_one_file_that_needs_nothing(tmp_path):
    (tmp_path/"q").mkdir()
    for i in range(40): Image.fromarray(drawn(i)[0]).save(tmp_path/f"q/f{i}.png")
    bank = bright_bank()
    segment_query(bank, tmp_path/"q", tmp_path/"out", k=2, gamma=.25, strategy="topk")
    page = (tmp_path/"out/report.html").read_text()
    assert not re.search(r"(src|href)=[\"'](?!data:)", page) and "<script" not in page
    assert page.count("<img") == 2*16 and "f0:" in page and "f39:" in page and "white" in page and "topk" in page and "0.25" in page


def test_broken_frames_are_left_out_and_named(tmp_path, capsys):
    (tmp_path/"q").mkdir()
    for i in range(4): Image.fromarray(drawn(i)[0]).save(tmp_path/f"q/f{i}.png")
    for i in (1, 3): (tmp_path/f"q/f{i}.png").write_bytes(b"\x89PNG\r\n\x1a\n0000")
    table = segment_query(bright_bank(), tmp_path/"q", tmp_path/"out")
    assert table.frame.unique().tolist() == ["f0", "f2"] and not (tmp_path/"out/f1.png").exists()
    assert "f1, f3" in capsys.readouterr().err
    page = (tmp_path/"out/report.html").read_text()
    assert "2 of 4 frames could not be read" in page and "f1 (" in page and "f3 (" in page


def test_nothing_is_left_when_it_fails(tmp_path):
    (tmp_path/"q").mkdir()
    (tmp_path/"q/a.png").write_bytes(b"no picture")
    with pytest.raises(InputError): segment_query(bright_bank(), tmp_path/"q", tmp_path/"out")
    assert {p.name for p in tmp_path.iterdir()} == {"q"}
    with pytest.raises(InputError, match="does not exist"): segment_query(bright_bank(), tmp_path/"nowhere", tmp_path/"out")


def test_one_encoding_per_frame_and_out_is_not_overwritten(tmp_path):
    (tmp_path/"q").mkdir()
    for i in range(7): Image.fromarray(drawn(i + 20)[0]).save(tmp_path/f"q/f{i}.png")
    bank = bright_bank(5)
    segment_query(bank, tmp_path/"q", tmp_path/"out", k=5)
    assert bank.segmenter.encodings == 7 + 5
    with pytest.raises(InputError, match="exists already"): segment_query(bank, tmp_path/"q", tmp_path/"out")
    assert bank.segmenter.encodings == 12
    segment_query(bank, tmp_path/"q", tmp_path/"out", k=5, force=True)
    assert bank.segmenter.encodings == 12 + 7


def test_a_bank_on_disk_and_one_picture(tmp_path):
    for i in range(3):
        image, labels = drawn(i)
        (tmp_path/"e/images").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path/f"e/images/{i}.png")
        save_mask(labels, tmp_path/f"e/masks/{i}.png", {})
    make_bank(tmp_path/"e", tmp_path/"BANK", sam2="nano", retriever="random")
    Image.fromarray(drawn(9)[0]).save(tmp_path/"new.png")
    table = segment_query(tmp_path/"BANK", tmp_path/"new.png", tmp_path/"out")
    assert table.frame.tolist() == ["new"]*2 and (tmp_path/"out/new.png").exists()


def test_a_video_is_somebody_elses(tmp_path):
    (tmp_path/"q").mkdir()
    for i in range(3): Image.fromarray(drawn(i)[0]).save(tmp_path/f"q/{i}.png")
    with pytest.raises(InputError, match="segment_video"): segment_query(bright_bank(), open_query(tmp_path/"q", kind="video"), tmp_path/"out")


def test_pictures_in_memory(tmp_path):
    image, labels = drawn(77)
    segment_query(bright_bank(), ArrayQuery([image], ["mine"]), tmp_path/"out")
    assert np.array_equal(np.array(Image.open(tmp_path/"out/mine.png")), labels)


# ---------------------------------------------------------------- scans

def turned(im, axes): return im.as_reoriented(ornt_transform(io_orientation(im.affine), axcodes2ornt(axes)))


def stack(n=6):
    "A scan (i, j, k) as stored LPS, and its labels"
    images, labels = zip(*[drawn(100 + i) for i in range(n)])
    affine = np.diag([-1.5, -.8, 4., 1.])
    affine[:3, 3] = 30, -20, 7
    return nib.Nifti1Image(np.stack(images).transpose(2, 1, 0), affine), np.stack(labels).transpose(2, 1, 0)


@pytest.mark.parametrize("axes", ["LPS", "RAS", "LAI", "SRA", "AIR", "PSL"])
def test_labels_lie_where_the_scan_lies(tmp_path, axes):
    "Brightness tells the right answer in the scan's own array, whatever its orientation"
    upright, truth = stack()
    scan = turned(upright, axes)
    nib.save(scan, tmp_path/"scan.nii.gz")
    table = segment_query(bright_bank(), tmp_path/"scan.nii.gz", tmp_path/"out")
    found = nib.load(tmp_path/"out/scan_seg.nii.gz")
    assert found.shape == scan.shape and np.allclose(found.affine, scan.affine)
    values = np.asarray(scan.dataobj)
    assert np.array_equal(np.asarray(found.dataobj), sum(c*(values == g) for c, g in GREYS.items()))
    assert np.array_equal(np.asarray(turned(found, "LPS").dataobj), truth) and len(table) == 12


def test_orientation_changes_nothing_for_a_network(tmp_path):
    r = np.random.default_rng(4)
    image = np.stack([smooth(r, 40, 56)[..., 0] for _ in range(3)]).transpose(2, 1, 0)
    upright = nib.Nifti1Image(image, np.diag([-1., -1., 3., 1.]))
    images, labels = scene(8, 3, 2, tmp_path, 40, 56)
    bank, found = ExampleBank(array_examples(images[:3], labels), retriever=Mean(), segmenter=shaken()), {}
    for axes in ("LPS", "RAS", "SRA"):
        nib.save(turned(upright, axes), tmp_path/f"{axes}.nii.gz")
        segment_query(bank, tmp_path/f"{axes}.nii.gz", tmp_path/axes)
        found[axes] = np.asarray(turned(nib.load(tmp_path/axes/f"{axes}_seg.nii.gz"), "LPS").dataobj)
    assert found["LPS"].any() and all(np.array_equal(f, found["LPS"]) for f in found.values())


def test_a_query_is_seen_in_the_window_of_the_examples(tmp_path, monkeypatch):
    "Unless it has one of its own; a picture has none"
    r, seen = np.random.default_rng(0), []
    for kind in ("images", "labels"): (tmp_path/"scans"/kind).mkdir(parents=True)
    labels = np.zeros((24, 20, 4), np.uint8); labels[4:12, 5:15] = 1
    for i in range(2):
        nib.save(nib.Nifti1Image((r.normal(-80, 20, labels.shape) + 200*labels).astype(np.int16), np.eye(4)), tmp_path/f"scans/images/s{i}.nii.gz")
        nib.save(nib.Nifti1Image(labels, np.eye(4)), tmp_path/f"scans/labels/s{i}.nii.gz")
    query = tmp_path/"scans/images/s0.nii.gz"
    keep = lambda bank, image, **kwargs: seen.append(image) or Result(np.zeros(image.shape[:2], np.int32), {1: 0.}, np.arange(2))
    monkeypatch.setattr("freerep.image_segmentation.segment_image", keep)
    for examples, asked, expected in (((100, 60), None, (100, 60)), ((100, 60), (0, 500), (0, 500)), (None, None, None)):
        seen.clear()
        bank = ExampleBank(open_examples(tmp_path/"scans", examples), retriever=Mean(), segmenter=shaken())
        segment_query(bank, query, tmp_path/"out", window=asked, force=True)
        assert np.array_equal(np.stack(seen), np.stack(list(open_query(query, expected).frames)))
    Image.fromarray(seen[0]).save(tmp_path/"slice.png")
    segment_query(ExampleBank(open_examples(tmp_path/"scans", (100, 60)), retriever=Mean(), segmenter=shaken()), tmp_path/"slice.png", tmp_path/"out", force=True)


def test_real_scan_in_its_own_space(shared_data, tmp_path):
    "Examples of two MR scans, query the third: the output overlays it"
    for i in (1, 2):
        for kind in ("image", "label"):
            (tmp_path/f"mr/{kind}s").mkdir(parents=True, exist_ok=True)
            (tmp_path/f"mr/{kind}s/scan{i}.nii.gz").write_bytes((shared_data/f"chaos-t2-mr/{kind}_{i}.nii.gz").read_bytes())
    examples = open_examples(tmp_path/"mr")
    bank = ExampleBank(examples.subset(range(0, len(examples), 12)), retriever=Mean(), segmenter=shaken())
    query = open_query(shared_data/"chaos-t2-mr/image_3.nii.gz")
    table = segment_query(bank, query, tmp_path/"out", k=3)
    scan, found = nib.load(shared_data/"chaos-t2-mr/image_3.nii.gz"), nib.load(next((tmp_path/"out").glob("*_seg.nii.gz")))
    assert found.shape == scan.shape and np.allclose(found.affine, scan.affine) and table.frame.nunique() == len(query)
    assert set(np.unique(np.asarray(found.dataobj))) <= {0, *bank.ids}
