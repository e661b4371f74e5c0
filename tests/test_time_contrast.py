"""The time-contrastive retriever: labels and loss against brute force, views against geometry, readers, training, faults, frozen encoders."""
import dataclasses
import json
import math
import os
import pickle
import socket
import sys
import types
from pathlib import Path

import nibabel as nib
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from scipy import ndimage

from freerep import core, time_contrast as T
from freerep.core import InputError, load_tensors, read_json, save_tensors, seeded
from freerep.encoder import BACKBONES, SmallNet
from freerep.examples import array_examples, grey_to_rgb, open_examples, open_query, open_volume
from freerep.learner import Callback
from freerep.pretraining import PretrainConfig, load_run, new_encoder
from freerep.sources import open_source
from freerep.time_contrast import *
from helpers import ldpolyp, scene, write_realcolon


def config(**kw): return RetrieverConfig(**(dict(preset="tiny", size=24, frames=6, stride=2, clips=2, out=16, steps=4, workers=0) | kw))


def scan(seed, slices=16, px=24):
    "A ball that grows and wanders from slice to slice, (s, h, w) uint8"
    r = np.random.default_rng(seed)
    (cx, cy), bright = r.uniform(-.3, .3, 2), r.uniform(120, 250)
    y, x = np.mgrid[-1:1:px*1j, -1:1:px*1j]
    return np.stack([np.clip(bright*((x - cx + .6 - 1.2*z)**2 + (y - cy)**2 < (.2 + .5*z)**2) + r.normal(10, 5, x.shape), 0, 255) for z in np.linspace(0, 1, slices)]).astype(np.uint8)


def write_nifti(path, slices, affine=np.diag([-1., -1, 3, 1])):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(np.asarray(slices).transpose(2, 1, 0), affine), path)
    return Path(path)


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scans")
    for i in range(5): write_nifti(folder/f"p{i}.nii.gz", scan(i))
    return folder


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frames")
    for v in range(3):
        (folder/f"v{v}").mkdir()
        for t in range(14): Image.fromarray(scene(3*t, seed=v)).save(folder/f"v{v}"/f"{t}.png")
    return folder


@pytest.fixture(scope="module")
def trained(scans, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")/"r"
    return train_retriever(scans, config(), out=out, device="cpu")


# ---- clips and labels

@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 6), st.integers(0, 10**6))
def test_clips_fit_and_are_evenly_spaced(length, n, stride, seed):
    r = np.random.default_rng(seed)
    if length < n:
        with pytest.raises(InputError, match="does not fit"): clip_positions(length, n, stride, r)
        return
    at = clip_positions(length, n, stride, r)
    assert len(at) == n and at[0] >= 0 and at[-1] < length
    steps = set(np.diff(at).tolist())
    fits = [s for s in range(1, stride + 1) if (n - 1)*s < length]
    assert steps <= {max(fits)}


def test_every_start_that_fits_is_equally_likely():
    r = np.random.default_rng(0)
    starts = np.bincount([clip_positions(20, 4, 3, r)[0] for _ in range(11000)])
    assert len(starts) == 11 and abs(starts - 1000).max() < 150


def by_definition(clips, n, window):
    "Labels of a batch, pair by pair, from (clip, video, view, frame); all near frames positive"
    images = [(c, v, view, f) for c, v in enumerate(clips) for view in (0, 1) for f in range(n)]
    def label(a, b):
        if a == b: return -1
        if a[0] != b[0]: return -1 if a[1] == b[1] else 0
        return 1 if abs(a[3] - b[3]) <= window//2 else 0
    def same(a, b): return a[0] == b[0] and a[2] == b[2] and a[3] == b[3]
    return [[-1 if same(a, b) else label(a, b) for b in images] for a in images]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(2, 7), st.integers(2, 6))
def test_labels_of_a_batch_by_definition(videos, n, window):
    blocks = torch.from_numpy(np.stack([two_view_labels(clip_labels(n, window))]*len(videos)))
    got = batch_labels(blocks, torch.tensor(videos))
    assert got.dtype == torch.int8 and got.tolist() == by_definition(videos, n, window)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("window, m", [(2, 1), (4, 2), (6, 1), (7, 3), (6, 6), (6, 50)])
def test_drawn_positives(seed, window, m):
    n, full = 12, clip_labels(12, window)
    drawn = clip_labels(n, window, m, np.random.default_rng(seed))
    near = full == 1
    assert ((drawn == 1).sum(1) == np.minimum(m, near.sum(1))).all()      # at the ends there are fewer near frames
    assert ((drawn == 1) <= near).all() and ((drawn == 0) == (full == 0)).all()
    assert (drawn.diagonal() == -1).all()
    two = two_view_labels(drawn)
    assert (two[:n, :n] == drawn).all() and (two[n:, n:] == drawn).all() and (two[:n, n:].diagonal() == 1).all() and (two[n:, :n].diagonal() == 1).all()
    off = ~np.eye(n, dtype=bool)
    assert (two[:n, n:][off] == drawn[off]).all() and (two[n:, :n][off] == drawn[off]).all()


def test_labels_that_cannot_be_drawn():
    for kwargs, why in ((dict(window=1), "window=1"), (dict(window=4, positives=0), "positives=0"), (dict(window=6, positives=2), "numpy generator")):
        with pytest.raises(InputError, match=why): clip_labels(8, **kwargs)
    assert (clip_labels(8, 6, 6) == clip_labels(8, 6)).all()              # all near frames: nothing to draw


def test_every_near_frame_is_drawn_equally_often():
    r = np.random.default_rng(0)
    counts = sum((clip_labels(9, 6, 2, r) == 1).astype(int) for _ in range(3000))
    assert abs(counts[4, [1, 2, 3, 5, 6, 7]] - 1000).max() < 120 and abs(counts[0, [1, 2, 3]] - 2000).max() < 120


def test_a_given_label_matrix_is_left_as_it_was():
    labels = clip_labels(5); copy = labels.copy()
    two_view_labels(labels)
    assert (labels == copy).all()


# ---- loss

def slow_loss(z, labels, tau):
    z, total, anchors = z.double()/z.double().norm(dim=1, keepdim=True), 0., 0
    for i in range(len(z)):
        P, N = [j for j in range(len(z)) if labels[i, j] == 1], [k for k in range(len(z)) if labels[i, k] == 0]
        if not P: continue
        anchors += 1
        wrong = torch.logsumexp(torch.stack([z[i] @ z[k]/tau for k in N]), 0)
        total = total - sum((z[i] @ z[j]/tau) - torch.logaddexp(z[i] @ z[j]/tau, wrong) for j in P)/len(P)
    return total/anchors


def random_labels(seed, n=14):
    "Any labels, not symmetric, each anchor with a negative, some without a positive"
    r = np.random.default_rng(seed)
    labels = torch.from_numpy(r.choice([-1, 0, 1], (n, n), p=[.3, .5, .2]).astype(np.int8))
    labels[2] = labels[2].clamp(max=0)
    labels[:, 0][labels[:, 0] == -1] = 0
    labels.fill_diagonal_(-1); labels[0, 1] = 0; labels[1, 2] = 1
    return labels


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("tau", [.02, .1, 1.])
def test_loss_is_the_double_loop(seed, tau):
    labels = random_labels(seed)
    z = torch.randn(14, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)
    fast, slow = time_contrastive_loss(z, labels, tau), slow_loss(z, labels, tau)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(l, z)[0] for l in (fast, slow)), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(time_contrastive_loss(z.detach().float(), labels, tau).double(), slow.detach(), rtol=1e-4, atol=1e-5)


def test_gradcheck_on_a_real_batch():
    blocks = torch.from_numpy(np.stack([two_view_labels(clip_labels(4, 4, 1, np.random.default_rng(i))) for i in range(2)]))
    labels = batch_labels(blocks, torch.tensor([0, 1]))
    z = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: time_contrastive_loss(z, labels, .3), z)


def test_norm_order_and_ignored_images_do_not_matter():
    labels, g = random_labels(1), torch.Generator().manual_seed(0)
    z = torch.randn(14, 6, generator=g, dtype=torch.float64)
    loss = time_contrastive_loss(z, labels)
    torch.testing.assert_close(time_contrastive_loss(z*torch.rand(14, 1, generator=g).double()*9 + 0, labels), loss)
    p = torch.randperm(14, generator=g)
    torch.testing.assert_close(time_contrastive_loss(z[p], labels[p][:, p]), loss)
    labels[5], labels[:, 5] = -1, -1
    a = z.clone().requires_grad_()
    grad, = torch.autograd.grad(time_contrastive_loss(a, labels), a)
    assert grad[5].abs().sum() == 0 and grad[4].abs().sum() > 0 and grad.isfinite().all()


def test_a_cold_loss_neither_overflows_nor_dies():
    "At temperature 0.001 the exponentials would be e^1000"
    blocks = torch.from_numpy(np.stack([two_view_labels(clip_labels(3))]*2))
    labels = batch_labels(blocks, torch.arange(2))
    for z in (torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.ones(12, 4)):
        z.requires_grad_()
        loss = time_contrastive_loss(z, labels, .001)
        torch.testing.assert_close(loss.double(), slow_loss(z.detach(), labels, .001), rtol=1e-3, atol=1e-3)
        assert torch.autograd.grad(loss, z)[0].isfinite().all()


def test_half_precision_inside_autocast_is_computed_in_full():
    labels, z = random_labels(3), torch.randn(14, 8, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16): inside = time_contrastive_loss(z, labels)
    assert torch.equal(inside, time_contrastive_loss(z, labels)) and inside.dtype == torch.float32
    assert time_contrastive_loss(z.bfloat16(), labels).dtype == torch.float32


@pytest.mark.parametrize("z, labels, tau, said", [
    (torch.ones(4, 2, 2), torch.zeros(4, 4), .1, "shape \\(n, d\\)"), (torch.ones(4, 2), torch.zeros(4, 3), .1, "\\(n, n\\)=\\(4, 4\\), got \\(4, 3\\)"),
    (torch.ones(4, 2), torch.ones(4, 4), 0, "tau=0"), (torch.ones(2, 2), torch.tensor([[0, 1], [0, 0]]).sub(torch.eye(2)), .1, "image 0 of the batch has no negative"),
    (torch.ones(4, 2), torch.zeros(4, 4), .1, "not one positive pair")])
def test_wrong_labels_are_named(z, labels, tau, said):
    with pytest.raises(InputError, match=said): time_contrastive_loss(z, labels, tau)


# ---- views

@pytest.mark.parametrize("seed", range(6))
def test_views_by_geometry(seed):
    "Mirror, then turn, then shift: each pixel fetched by the inverse, with scipy"
    r = np.random.default_rng(seed)
    x = ndimage.gaussian_filter(r.random((31, 31)), 2)
    angle, dx, dy, mirror = r.uniform(-.6, .6), r.uniform(-.2, .2), r.uniform(-.2, .2), r.choice([-1, 1])
    got = make_views(torch.from_numpy(x)[None, None], torch.tensor([[angle, dx, dy, mirror, 0]]))[0, 0].numpy()
    v, u = np.mgrid[:31, :31] - 15.
    u, v = u - 31*dx, v - 31*dy
    u, v = np.cos(angle)*u + np.sin(angle)*v, -np.sin(angle)*u + np.cos(angle)*v
    want = ndimage.map_coordinates(x, [v + 15, mirror*u + 15], order=1)
    inside = (abs(u) < 14.5) & (abs(v) < 14.5)
    assert inside.sum() > 400 and np.abs(got - want)[inside].max() < 1e-5
    assert (got[(abs(u) > 17) | (abs(v) > 17)] == 0).all()


def test_blur_is_that_of_scipy_and_each_image_has_its_own():
    x = torch.rand(3, 2, 20, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sigma = [0., .07, .03]
    draws = torch.tensor([[0, 0, 0, 1, s] for s in sigma], dtype=torch.float64)
    got = make_views(x, draws)
    for i, s in enumerate(sigma):
        for c in range(2):
            want = ndimage.gaussian_filter(x[i, c].numpy(), 20*s, mode="mirror", radius=math.ceil(3*20*.07)) if s else x[i, c].numpy()
            np.testing.assert_allclose(got[i, c], want, atol=1e-6)
        torch.testing.assert_close(make_views(x[i:i + 1], draws[i:i + 1]), got[i:i + 1], atol=2e-3, rtol=0)


def test_draws_have_the_ranges_asked_for():
    d = draw_views((2, 3000), np.random.default_rng(0), rotate=10, shift=.2, flip=True, blur=.05)
    assert d.shape == (2, 3000, 5) and d.dtype == np.float32
    assert np.allclose(np.abs(d[..., :3]).max((0, 1)), [math.radians(10), .2, .2], rtol=.01) and abs(d[..., :3].mean((0, 1))).max() < .01
    assert set(np.unique(d[..., 3])) == {-1, 1} and abs(d[..., 3].mean()) < .06
    assert d[..., 4].min() >= 0 and .049 < d[..., 4].max() <= .05
    assert (draw_views((50,), np.random.default_rng(0))[:, 3] == 1).all()       # no mirror unless it is asked for
    still = draw_views((4,), np.random.default_rng(0), rotate=0, shift=0, blur=0)
    assert (still == [0, 0, 0, 1, 0]).all()


# ---- readers

def test_scans_as_films_without_their_labels(scans, tmp_path):
    for name in ("a", "b"):
        write_nifti(tmp_path/"set"/"images"/f"{name}_0000.nii.gz", scan(7))
        (tmp_path/"set"/"labels").mkdir(exist_ok=True); (tmp_path/"set"/"labels"/f"{name}.nii.gz").write_bytes(b"nobody opens this")
    readers = frame_readers(tmp_path/"set")
    assert [r.name for r in readers] == ["a", "b"] and [len(r) for r in readers] == [16, 16]
    images, found = readers[0].read(np.array([15, 0, 3]), 24)
    assert (images == grey_to_rgb(scan(7)[[15, 0, 3]])).all() and found.all()
    assert readers[0].read(np.array([2]), 9)[0].shape == (1, 9, 9, 3)
    assert len(frame_readers([scans, tmp_path/"set"])) == 7
    assert len(frame_readers(scans/"p0.nii.gz")) == 1


def test_a_scan_that_lies_on_its_side_is_read_along_the_body(tmp_path):
    "The slice axis is the body's, however the file stores it"
    stack = scan(3, slices=16, px=24)
    side = nib.Nifti1Image(stack.transpose(2, 1, 0), np.diag([-1., -1, 3, 1])).as_reoriented(nib.orientations.axcodes2ornt("SAL"))
    nib.save(side, tmp_path/"side.nii.gz")
    reader, = frame_readers(tmp_path/"side.nii.gz")
    assert len(reader) == 16 or 16 in nib.load(tmp_path/"side.nii.gz").shape
    direct = open_volume(tmp_path/"side.nii.gz").read()
    assert (reader.read(np.arange(len(reader)), direct.shape[1])[0][..., 0] == direct).all()


def test_everything_that_can_be_given(scans, frames, tmp_path):
    volume = open_volume(scans/"p1.nii.gz")
    labels = np.zeros((16, 24, 24), np.uint8); labels[3:9, 4:8, 4:8] = 2
    write_nifti(tmp_path/"ex"/"images"/"one.nii.gz", scan(1)); write_nifti(tmp_path/"ex"/"labels"/"one.nii.gz", labels)
    examples = open_examples(tmp_path/"ex")
    assert len(examples) == 6 and [len(r) for r in frame_readers(examples)] == [16]      # unlabelled slices teach too
    source = open_source(frames)
    for item, n in ((volume, 1), (open_query(scans/"p1.nii.gz"), 1), (source, 3), (source.videos[0], 1), ([source, volume], 4), (str(scans), 5)): assert len(frame_readers(item)) == n
    assert (frame_readers(source)[1].read(np.array([4]), (96))[0].shape) == (1, 96, 96, 3)
    assert len(frame_readers(open_query(frames/"v0", kind="video"))) == 1


@pytest.mark.parametrize("what, said", [
    (lambda s, f: array_examples([np.zeros((9, 9), np.uint8)], [np.ones((9, 9), np.uint8)]), "without an order of time"),
    (lambda s, f: [s, s/"p2.nii.gz"], "p2.nii.gz is given twice"), (lambda s, f: s/"none", "does not exist"), (lambda s, f: [], "no video and no scan")])
def test_what_cannot_be_trained_on(scans, frames, what, said):
    with pytest.raises(InputError, match=said): frame_readers(what(scans, frames))


def test_what_is_too_short_is_told(scans, tmp_path, capsys):
    core._noted.clear()
    write_nifti(tmp_path/"short.nii.gz", scan(0, slices=5))
    assert len(frame_readers([scans, tmp_path/"short.nii.gz"], least=6)) == 5
    assert "1 of 6 videos are shorter than a clip of 6 frames" in capsys.readouterr().err
    with pytest.raises(InputError, match="has 5 frames, and a clip 6 \\(set frames=5 or less\\)"): frame_readers(tmp_path, least=6)


def test_only_the_training_part_of_an_official_split(tmp_path):
    for name in ("001-001", "001-009"): write_realcolon(tmp_path, name, [scene(t) for t in range(4)])
    assert [r.name for r in frame_readers(tmp_path)] == ["001-001"]


def test_broken_scans(scans, tmp_path, capsys):
    core._noted.clear()
    whole = (scans/"p0.nii.gz").read_bytes()
    (tmp_path/"cut.nii.gz").write_bytes(whole[:len(whole)//2]); (tmp_path/"junk.nii.gz").write_bytes(b"no scan")
    for i in (1, 2): (tmp_path/f"p{i}.nii.gz").write_bytes((scans/f"p{i}.nii.gz").read_bytes())
    batches = ClipBatches(frame_readers(tmp_path, least=6), config(clips=3))
    assert "1 of 4 scans are left out" in capsys.readouterr().err
    frames, draws, blocks, videos = next(iter(batches))
    bad = [r.name for r in batches.readers].index("cut")
    for block, v in zip(blocks, videos.tolist()): assert (block == -1).all() == (v == bad)
    assert "cut.nii.gz cannot be read" in capsys.readouterr().err
    with seeded(0): loss = retriever_loss(config())(FrameEncoder("small", 8), (frames, draws, blocks, videos))
    assert loss.isfinite()
    (tmp_path/"only").mkdir(); (tmp_path/"only"/"cut.nii.gz").write_bytes(whole[:len(whole)//2])
    with pytest.raises(InputError, match="could none of its frames be read"): train_retriever(tmp_path/"only", config(), out=tmp_path/"o", device="cpu")
    (tmp_path/"none").mkdir(); (tmp_path/"none"/"junk.nii.gz").write_bytes(b"no scan")
    with pytest.raises(InputError, match="no scan can be used.*junk"): frame_readers(tmp_path/"none")


def test_unreadable_frames_take_no_part(tmp_path):
    for t in range(12): Image.fromarray(scene(t)).save(tmp_path/f"{t}.png")
    (tmp_path/"5.png").write_bytes(b"broken")
    reader, = frame_readers(tmp_path)
    images, found = reader.read(np.arange(3, 9), 16)
    assert found.tolist() == [True, True, False, True, True, True] and (images[2] == 0).all() and images[1].any()
    batches = ClipBatches([reader], config(frames=12, stride=1, clips=1))
    _, _, labels = batches.clip(0, "x")
    lost = [5, 17]
    assert (labels[lost] == -1).all() and (labels[:, lost] == -1).all()
    rest = np.delete(np.arange(24), lost)
    assert (labels[np.ix_(rest, rest)] == two_view_labels(clip_labels(12))[np.ix_(rest, rest)]).all()


# ---- batches

def test_batches_depend_on_seed_epoch_and_number_alone(scans):
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(a, b))
    a, b = (ClipBatches(frame_readers(scans), config(workers=w)) for w in (0, 2))
    a.set_epoch(3); b.set_epoch(3)
    first, late = list(a), list(b.iter_from(1))
    assert len(first) == len(a) == 2 and len(late) == 1 and same(first[1], late[0])
    a.set_epoch(4); assert not torch.equal(next(iter(a))[0], first[0][0])
    c = ClipBatches(frame_readers(scans), config(seed=1)); c.set_epoch(3); assert not torch.equal(next(iter(c))[0], first[0][0])
    assert not torch.equal(first[0][1][:, 0], first[0][1][:, 1])              # the two views differ


@pytest.mark.parametrize("n, clips, batches", [(5, 2, 2), (6, 2, 3), (5, 5, 1), (2, 4, 1), (1, 3, 1)])
def test_an_epoch_takes_each_video_once_and_few_videos_several_times(scans, n, clips, batches):
    b = ClipBatches(frame_readers(scans)[:1]*n, config(clips=clips))
    assert len(b) == batches
    for e in range(4):
        taken = np.concatenate([b.videos(e, i) for i in range(batches)])
        assert len(taken) == batches*clips
        counts = np.bincount(taken, minlength=n)
        assert counts.max() - counts.min() <= 1 and (n < clips or counts.max() <= 1)


def test_processes_share_a_batch(scans):
    whole, parts = (list(ClipBatches(frame_readers(scans), config(clips=4), rank=r, world=w))[0] for r, w in ((0, 1), (0, 2))), list(ClipBatches(frame_readers(scans), config(clips=4), rank=1, world=2))[0]
    one, first = whole
    for a, b, c in zip(one, first, parts): assert torch.equal(a[[0, 2]], b) and torch.equal(a[[1, 3]], c)
    with pytest.raises(InputError, match="clips=4 cannot be dealt to 3 processes"): ClipBatches([], config(clips=4), world=3)


# ---- settings

def test_presets_and_overrides():
    paper = RetrieverConfig()
    assert (paper.frames, paper.stride, paper.clips, paper.tau, paper.lr, paper.weight_decay, paper.epochs, paper.backbone, paper.window, paper.flip) == (16, 2, 4, .1, 1e-3, 1e-4, 500, "resnet50", 2, False)
    assert core.override(RetrieverConfig("tiny"), ["steps=7", "positives=2", "flip=yes"]) == RetrieverConfig("tiny", steps=7, positives=2, flip=True)
    assert RetrieverConfig(**json.loads(json.dumps(dataclasses.asdict(RetrieverConfig("laptop"))))) == RetrieverConfig("laptop")
    with pytest.raises(dataclasses.FrozenInstanceError): paper.lr = 1


@pytest.mark.parametrize("kw, said", [
    (dict(preset="big"), "the presets are"), (dict(klips=2), "unknown setting 'klips'"), (dict(backbone="vit"), "backbone='vit'"), (dict(schedule="step"), "schedule"),
    (dict(frames=1), "frames=1"), (dict(window=1), "window=1"), (dict(positives=0), "positives=0"), (dict(shift=-.1), "shift=-0.1"), (dict(rotate=float("nan")), "rotate=nan"),
    (dict(lr=0), "lr=0"), (dict(clips=1, frames=3), "would have no negative"), (dict(steps=-1), "steps=-1")])
def test_impossible_settings(kw, said):
    with pytest.raises(InputError, match=said): RetrieverConfig(**kw)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(RetrieverConfig) if isinstance(f.default, (int, float)) and not isinstance(f.default, bool)] + ["steps", "positives"])
def test_numbers_are_finite(field):
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(InputError, match=f"{field}="): RetrieverConfig(**{field: value})


# ---- training

TIMING = ["frames_per_s", "seconds"]

class StopAt(Callback):
    def __init__(self, step): self.at = step
    def after_batch(self):
        if self.learn.step == self.at: self.learn.stop()


def test_a_run_and_what_it_leaves(trained, scans):
    out = trained.path
    assert {p.name for p in out.iterdir()} == {"config.json", "log.csv", "loss.png", "last.safetensors", "state"}
    facts, log = read_json(out/"config.json"), pd.read_csv(out/"log.csv")
    assert facts["kind"] == "retriever" and facts["data"]["videos"] == 5 and facts["data"]["frames"] == 80
    assert set(facts["data"]) == {"videos", "frames", "fingerprint"}
    assert log.step.tolist() == [1, 2, 3, 4] and log.epoch.tolist() == [1, 1, 2, 2] and np.isfinite(log.loss).all()
    again = load_retriever(out)
    assert again.fingerprint == trained.fingerprint
    x = grey_to_rgb(scan(0))
    assert np.array_equal(again.embed(x), trained.embed(x))
    with pytest.raises(InputError, match="exists already"): train_retriever(scans, config(), out=out)


@pytest.mark.parametrize("step", [1, 3])
def test_interrupted_and_resumed_is_the_quiet_run(trained, scans, tmp_path, step):
    with pytest.raises(KeyboardInterrupt): train_retriever(scans, config(), out=tmp_path/"b", cbs=[StopAt(step - 1)] if step > 1 else [Once()], device="cpu")
    train_retriever(scans, config(workers=2, save_minutes=0), out=tmp_path/"b", resume=True, device="cpu")
    a, b = (load_tensors(p/"last.safetensors") for p in (trained.path, tmp_path/"b"))
    for k in a: assert torch.equal(a[k], b[k])
    a, b = (pd.read_csv(p/"log.csv").drop(columns=TIMING) for p in (trained.path, tmp_path/"b"))
    pd.testing.assert_frame_equal(a, b)


class Once(Callback):
    "Stops before anything was saved"
    def before_batch(self): raise KeyboardInterrupt


def test_resume_of_something_else_is_refused(trained, scans, frames, tmp_path):
    for kw, said in ((dict(tau=.2), "begun with tau=0.1, and now tau=0.2"), (dict(frames=5), "begun with frames=6")):
        with pytest.raises(InputError, match=said): train_retriever(scans, config(**kw), out=trained.path, resume=True, device="cpu")
    with pytest.raises(InputError, match="data videos=5, and now data videos=3"): train_retriever(frames, config(), out=trained.path, resume=True, device="cpu")
    for i in range(5): write_nifti(tmp_path/f"p{i}.nii.gz", scan(i + 50))
    with pytest.raises(InputError, match="data fingerprint"): train_retriever(tmp_path, config(), out=trained.path, resume=True, device="cpu")
    assert load_retriever(trained.path).fingerprint == trained.fingerprint


def test_no_step_at_all_gives_the_untrained_network(scans, tmp_path):
    r = train_retriever(scans, config(steps=0), out=tmp_path/"r", device="cpu")
    want = new_frame_encoder(config()).state_dict()
    for k, v in r.model.state_dict().items(): assert torch.equal(v, want[k])


def test_videos_train_too_and_few_of_them(frames, tmp_path):
    r = train_retriever([open_source(frames).videos[0]], config(clips=2, steps=2), out=tmp_path/"r", device="cpu")
    assert np.isfinite(pd.read_csv(r.path/"log.csv").loss).all()


def test_it_learns_the_place_in_an_unseen_body(tmp_path):
    "Held-out patients: the most similar slice of the bank is from nearer the same place than before training"
    for i in range(8): write_nifti(tmp_path/"scans"/f"{i}.nii.gz", scan(i))
    cfg = config(frames=8, clips=4, steps=50, seed=1)
    bank, queries, place = np.concatenate([grey_to_rgb(scan(i)) for i in range(8)]), np.concatenate([grey_to_rgb(scan(i)) for i in range(80, 86)]), np.arange(16)
    def error(r): return np.abs(np.tile(place, 8)[(r.embed(queries) @ r.embed(bank).T).argmax(1)] - np.tile(place, 6)).mean()
    before = error(Retriever("untrained", new_frame_encoder(cfg), size=24, device="cpu"))
    after = error(train_retriever(tmp_path/"scans", cfg, out=tmp_path/"r", device="cpu"))
    log = pd.read_csv(tmp_path/"r"/"log.csv").loss
    assert log.tail(5).mean() < .7*log.head(3).mean()
    assert after < .7*before and after < 2.5                                   # chance: 5.3 slices


GROUP = dict(backbone="group", weights="random", clips=4, steps=3, lr=1e-3)

def train_group(scans, out, **kw):
    "Group normalisation: no statistics of the batch, so that sharing the batch must change nothing"
    BACKBONES["group"] = lambda: (SmallNet(norm="group"), 128)
    return train_retriever(scans, config(**GROUP), out=out, device="cpu", **kw)

def one_of_two(rank, scans, out, port):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train_group(scans, out)

def test_two_processes_train_like_one(scans, tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    torch.multiprocessing.spawn(one_of_two, args=(scans, tmp_path/"two", port), nprocs=2)
    try:
        train_group(scans, tmp_path/"one")
        one, two = (load_tensors(tmp_path/f/"last.safetensors") for f in ("one", "two"))
        for k in one: torch.testing.assert_close(one[k], two[k], rtol=1e-3, atol=2e-5)
        a, b = (pd.read_csv(tmp_path/f/"log.csv") for f in ("one", "two"))
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-4)
    finally: BACKBONES.pop("group", None)


# ---- from pictures to vectors

def test_vectors_do_not_depend_on_company_or_size_of_the_pile(trained):
    x = grey_to_rgb(np.concatenate([scan(i) for i in range(3)]))
    z = trained.embed(x)
    assert z.shape == (48, 16) and z.dtype == np.float32 and np.allclose(np.linalg.norm(z, axis=1), 1, atol=1e-6)
    for batch in (1, 7, 100): np.testing.assert_allclose(trained.embed(x, batch=batch), z, atol=2e-6)
    assert trained.embed(list(x[:2]) + [np.zeros((50, 31, 3), np.uint8)]).shape == (3, 16)
    big = np.stack([np.asarray(Image.fromarray(i).resize((96, 96), Image.Resampling.NEAREST)) for i in x[:4]])
    assert ((trained.embed(big)*z[:4]).sum(1) > .95).all()


def test_memory_of_embedding_is_bounded(trained, monkeypatch):
    seen, plain = [], Retriever._vectors
    monkeypatch.setattr(Retriever, "_vectors", lambda self, p: (seen.append(len(p)), plain(self, p))[1])
    trained.embed(np.zeros((70, 24, 24, 3), np.uint8) + np.arange(70, dtype=np.uint8)[:, None, None, None])
    assert seen == [32, 32, 6]


@pytest.mark.parametrize("images, said", [
    (np.zeros((2, 9, 9), np.uint8), "image 0.*grey_to_rgb"), (np.zeros((2, 9, 9, 3)), "got \\(9, 9, 3\\) float64"), ([np.zeros((9, 9, 3), np.uint8), "a.png"], "image 1.*got str"),
    (np.zeros((0, 9, 9, 3), np.uint8), "no image"), (np.zeros((1, 9, 9, 4), np.uint8), "\\(9, 9, 4\\)")])
def test_what_cannot_be_embedded(trained, images, said):
    with pytest.raises(InputError, match=said): trained.embed(images)


def test_weights_that_are_not_numbers(trained):
    r = load_retriever(trained.path)
    next(r.model.parameters()).fill_(float("nan"))
    with pytest.raises(InputError, match="2 of 2 vectors are not finite"): r.embed(np.zeros((2, 9, 9, 3), np.uint8))


def test_a_fingerprint_changes_with_whatever_changes_the_vectors(trained):
    def make(**kw):
        with seeded(kw.pop("seed", 0)): return Retriever("x", FrameEncoder("small", 8), **(dict(size=24) | kw))
    prints = [make(**kw).fingerprint for kw in (dict(), dict(), dict(seed=1), dict(size=32), dict(mean=.5), dict(std=(.2, .2, .3)))]
    assert prints[0] == prints[1] and len(set(prints)) == 5
    r = make(); next(r.model.head.parameters())[0, 0] += 1e-3
    assert r.fingerprint != prints[0]


def test_a_run_of_flow_1_is_a_retriever(tmp_path):
    cfg = PretrainConfig("tiny", size=32)
    (tmp_path/"run").mkdir()
    core.write_json(dict(kind="pretrain", config=dataclasses.asdict(cfg)), tmp_path/"run"/"config.json")
    save_tensors(new_encoder(cfg).state_dict(), tmp_path/"run"/"last.safetensors")
    r, x = load_retriever(tmp_path/"run"), grey_to_rgb(scan(0, px=32)[:5])
    assert r.name == "tracklet" and r.size == 32 and load_retriever(load_run(tmp_path/"run")).fingerprint == r.fingerprint
    clips = (torch.from_numpy(x).permute(0, 3, 1, 2)[:, None].float()/255 - .45)/.225
    from freerep.encoder import encode
    np.testing.assert_allclose(r.embed(x), encode(load_run(tmp_path/"run").encoder(), clips), atol=1e-5)


def test_random_is_always_the_same_and_a_retriever_is_itself(trained):
    a, b = load_retriever("random"), load_retriever("random")
    assert a.fingerprint == b.fingerprint != trained.fingerprint and a.name == "random"
    assert load_retriever(trained) is trained


def test_what_is_no_retriever(trained, tmp_path):
    for what, said in ((tmp_path/"none", "does not exist: expected a folder.*random, dinov2, clip"), (tmp_path, "holds no run")):
        with pytest.raises(InputError, match=said): load_retriever(what)
    run = tmp_path/"run"; run.mkdir()
    (run/"config.json").write_text((trained.path/"config.json").read_text())
    with pytest.raises(InputError, match="nothing was saved yet"): load_retriever(run)
    save_tensors(FrameEncoder("small", 5).state_dict(), run/"last.safetensors")
    with pytest.raises(InputError, match="do not fit.*wrong shape"): load_retriever(run)
    (run/"last.safetensors").write_bytes(pickle.dumps(print))
    with pytest.raises(InputError, match="last.safetensors was refused"): load_retriever(run)


def test_a_run_of_another_kind_is_named(trained, tmp_path):
    with pytest.raises(InputError, match="holds a run of `freerep retriever`: expected one of `freerep train`"): load_run(trained.path)
    run = tmp_path/"run"; run.mkdir()
    core.write_json({**read_json(trained.path/"config.json"), "kind": "finetune"}, run/"config.json")
    with pytest.raises(InputError, match="holds a run of `freerep finetune`: expected one of `freerep retriever` or `freerep train`"): load_retriever(run)
    core.write_json(dict(examples="e", retriever="random", sam2="nano"), run/"config.json")
    with pytest.raises(InputError, match="does not describe a run"): load_retriever(run)


# ---- frozen encoders

def test_without_timm_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    for name in ("dinov2", "clip"):
        with pytest.raises(InputError, match=r"pip install 'freerep\[foundation\]'"): load_retriever(name)


def stub(create):
    "A timm that knows two functions"
    data = types.SimpleNamespace(resolve_model_data_config=lambda net: dict(input_size=(3, 28, 28), mean=(.5, .4, .3), std=(.2, .25, .3)))
    return types.SimpleNamespace(create_model=create, data=data)


def test_a_frozen_encoder_gets_its_own_size_and_colours(monkeypatch):
    seen = []
    class Net(torch.nn.Module):
        def __init__(self): super().__init__(); self.w = torch.nn.Parameter(torch.ones(1))
        def forward(self, x): seen.append(x); return x.mean((2, 3))*self.w
    asked = []
    monkeypatch.setitem(sys.modules, "timm", stub(lambda name, **kw: (asked.append((name, kw)), Net())[1]))
    r, x = load_retriever("dinov2"), np.full((2, 40, 50, 3), [255, 51, 0], np.uint8)
    z = r.embed(x)
    assert asked == [("vit_small_patch14_dinov2.lvd142m", dict(pretrained=True, img_size=224))] and r.size == 224 and seen[0].shape == (2, 3, 224, 224)      # not the 518 px of its description
    want = (np.array([1, .2, 0]) - [.5, .4, .3])/[.2, .25, .3]
    np.testing.assert_allclose(z[0], want/np.linalg.norm(want), atol=1e-5)
    assert not any(p.requires_grad for p in r.model.parameters())
    assert load_retriever("clip").size == 28 and asked[1][0].startswith("vit_base_patch32_clip") and "img_size" not in asked[1][1]


def test_weights_that_cannot_be_downloaded(monkeypatch):
    def create(name, pretrained, **kw): raise OSError("no\nnetwork")
    monkeypatch.setitem(sys.modules, "timm", stub(create))
    with pytest.raises(InputError, match=r"the weights of vit_small_patch14_dinov2.lvd142m could not be had \(no network\)"): load_retriever("dinov2")


@pytest.mark.parametrize("name, d", [("dinov2", 384), ("clip", 512)])
def test_the_real_architectures_without_weights(name, d):
    pytest.importorskip("timm")
    with seeded(0): r = foundation_retriever(name, pretrained=False)
    z = r.embed(grey_to_rgb(scan(0)[:2]))
    assert r.size == 224 and z.shape == (2, d) and np.allclose(np.linalg.norm(z, axis=1), 1, atol=1e-5)


# ---- real data

def test_real_scans_and_video(shared_data, tmp_path):
    readers = frame_readers([shared_data/"chaos-t2-mr"/f"image_{i}.nii.gz" for i in (1, 2, 3)])
    images, found = readers[0].read(np.arange(len(readers[0])), 48)
    assert found.all() and 40 < np.percentile(images, 99) <= 255
    near, far = (np.abs(images[k:].astype(float) - images[:-k]).mean() for k in (1, 8))
    assert near < .8*far                                                        # time teaches: neighbours are more alike
    frames, boxes = ldpolyp(shared_data)
    write_realcolon(tmp_path/"v", "901-001", {i: frames[i] for i in list(frames)[:20]})
    r = train_retriever([shared_data/"chaos-t2-mr"/"image_1.nii.gz", shared_data/"chaos-t2-mr"/"image_2.nii.gz", tmp_path/"v"], config(steps=2, clips=3), out=tmp_path/"r", device="cpu")
    z = r.embed(images)
    assert np.isfinite(pd.read_csv(r.path/"log.csv").loss).all() and (z[1:]*z[:-1]).sum(1).mean() > (z[8:]*z[:-8]).sum(1).mean()
