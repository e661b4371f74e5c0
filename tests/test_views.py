"Views against torchvision and brute force, clips that depend on nothing but their names, broken frames, and no peeking at annotations"
import pickle
import numpy as np, pandas as pd, pytest, torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from scipy.stats import ks_2samp
from torchvision.transforms import RandomResizedCrop
from freerep.core import InputError
from freerep.sources import Source, Video, box_table, open_source
from freerep.tracklets import annotated_tracklets, boxes_of, make_tracklets, tracklet_frames
from freerep.views import (BoxCrop, ClipDataset, EmptyClip, FullFrame, RandomCrop, SyntheticBox, View, box_statistics, mask_boxes, normalise, pad_clips,
                           read_view, sample_frames, scale_boxes, to_batch)

gen = lambda seed=0: np.random.default_rng(seed)

class Stub(Video):
    "A video made in memory: red is the frame number, green and blue are x and y. Counts what is decoded; some frames are broken"
    def __init__(self, name, n=64, size=(60, 50), bad=(), boxes=()):
        super().__init__(name, name, fps=25, labels=lambda video: (box_table(boxes), []))
        self.frames, self.size, self.bad, self.decoded, self.shrunk = np.arange(n), size, set(bad), [], []
    def _pictures(self, shrink):
        for f in sorted(shrink):
            self.decoded.append(f); self.shrunk.append(shrink[f])
            if f in self.bad: self.broken[f] = "it is broken"
            else:
                y, x = np.mgrid[:self.size[1], :self.size[0]]
                yield f, Image.fromarray(np.stack([np.full_like(x, f), x, y], -1).astype(np.uint8)), self.size, 1

def boxes(n=64, who="p"): return [(f, who, 10 + f/4, 12., 22 + f/4, 20., "stub") for f in range(n)]
def source(*videos, path="stub"): return Source(path, "stub", videos or [Stub("a", boxes=boxes()), Stub("b", n=40)])
def dataset(src, view=RandomCrop(), size=16, **kw): return ClipDataset(src, make_tracklets(src, stride=1), view, size, **kw)


# ---- the random crop
PAPER, OTHER = ((.08, 1.), (3/4, 4/3)), ((.5, .9), (1., 3.))
@pytest.mark.parametrize("size,scale,ratio", [(s, *PAPER) for s in [(160, 128), (1352, 1080), (300, 100), (100, 320), (640, 20), (13, 400), (3, 2)]] + [(s, *OTHER) for s in [(160, 128), (100, 320), (640, 20)]])
def test_crop_statistics_equal_torchvision(size, scale, ratio):
    n, image = 2000, torch.empty(3, size[1], size[0])
    view, g = RandomCrop(scale, ratio), gen(1)
    ours = np.array([view(size, 1, g)[0] for _ in range(n)])
    torch.manual_seed(2)
    theirs = np.array([RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(n)])     # top, left, height, width
    ours = np.c_[ours[:, 1], ours[:, 0], ours[:, 3] - ours[:, 1], ours[:, 2] - ours[:, 0]]
    for a, b in zip(ours.T, theirs.T): assert ks_2samp(a, b, method="asymp").pvalue > 1e-3
    assert ks_2samp(ours[:, 2]*ours[:, 3], theirs[:, 2]*theirs[:, 3], method="asymp").pvalue > 1e-3 and ks_2samp(ours[:, 3]/ours[:, 2], theirs[:, 3]/theirs[:, 2], method="asymp").pvalue > 1e-3
    assert abs(np.corrcoef(ours[:, 0] + .5*ours[:, 2] + gen(3).normal(size=n), ours[:, 1] + .5*ours[:, 3] + gen(4).normal(size=n))[0, 1]) < .1

@settings(max_examples=80, deadline=None)
@given(st.tuples(st.integers(1, 400), st.integers(1, 400)), st.integers(1, 9), st.integers(0, 99))
def test_random_crops_lie_inside_and_stay(size, t, seed):
    c = RandomCrop()(size, t, gen(seed))
    assert c.shape == (t, 4) and c.dtype == np.int64 and (c == c[0]).all()
    assert (c[0, :2] >= 0).all() and (c[0, 2:] <= size).all() and (c[0, 2:] > c[0, :2]).all()

def test_bad_views():
    for kw in (dict(scale=(.5, .1)), dict(scale=(0, 1)), dict(ratio=(2, 1))):
        with pytest.raises(InputError, match="RandomCrop"): RandomCrop(**kw)
    for v in (RandomCrop(), SyntheticBox(dict(mean=[.5, .5, -2, -2], cov=np.eye(4).tolist()))):
        with pytest.raises(InputError, match="generator"): v((60, 50), 8)
    with pytest.raises(InputError, match="needs the boxes"): BoxCrop()((60, 50), 8)
    with pytest.raises(InputError, match=r"\(8, 4\), got \(7, 4\)"): BoxCrop()((60, 50), 8, boxes=np.zeros((7, 4)))


# ---- boxes
coordinate = st.floats(-30, 130, allow_nan=False)
@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(coordinate, coordinate, st.floats(.1, 60), st.floats(.1, 60)), min_size=1, max_size=4), st.sampled_from([1., 1.3, 5.]))
def test_box_crop(rows, factor):
    "five times as wide and high around the same centre, by hand, then clamped; always inside and never empty"
    x, y, w, h = np.array(rows).T
    b = np.stack([x, y, x + w, y + h], 1)
    crops = BoxCrop(factor)((100, 80), len(b), boxes=b)
    for (x0, y0, x1, y1), c in zip(b, crops):
        want = [(x0 + x1)/2 - factor*(x1 - x0)/2, (y0 + y1)/2 - factor*(y1 - y0)/2, (x0 + x1)/2 + factor*(x1 - x0)/2, (y0 + y1)/2 + factor*(y1 - y0)/2]
        clamped = [min(max(v, 0), s) for v, s in zip(want, (100, 80, 100, 80))]
        assert 0 <= c[0] < c[2] <= 100 and 0 <= c[1] < c[3] <= 80 and np.abs(c - clamped).max() <= 1.5     # rounded, and at least a pixel

def test_box_statistics_and_synthetic_boxes():
    g = gen(0)
    wh, centre = np.exp(g.normal([-2.5, -2.2], [.3, .2], (2500, 2))), g.normal([.55, .45], .08, (2500, 2))
    rows = [(f % 64, f"p{f//64}", *(np.r_[c - s/2, c + s/2]*np.tile([1000, 800], 2)), "stub") for f, (c, s) in enumerate(zip(centre, wh))]
    rows = [r for r in rows if r[2] >= 0 and r[3] >= 0 and r[4] <= 1000 and r[5] <= 800]
    src = source(Stub("a", size=(1000, 800), boxes=rows[:1200]), Stub("b", size=(1000, 800), boxes=rows[1200:]))
    stats = box_statistics(src)
    assert stats["n"] == sum(len(v.annotations) for v in src) > 2400
    xy = np.array([r[2:6] for r in rows])/np.tile([1000, 800], 2)
    flat = np.c_[(xy[:, :2] + xy[:, 2:])/2, np.log(xy[:, 2:] - xy[:, :2])]
    assert np.allclose(stats["mean"], flat.mean(0), atol=2e-3) and np.allclose(stats["cov"], np.cov(flat.T), atol=2e-3)
    c = np.array([SyntheticBox(stats, factor=1)((10_000, 8000), 3, g) for _ in range(2500)])
    assert (c == c[:, :1]).all()
    c = c[:, 0]/np.tile([10_000, 8000], 2)
    again = np.c_[(c[:, :2] + c[:, 2:])/2, np.log(c[:, 2:] - c[:, :2])]
    assert np.allclose(again.mean(0), stats["mean"], atol=.02) and np.allclose(np.cov(again.T), stats["cov"], atol=.02)
    big = np.array([SyntheticBox(stats)((10_000, 8000), 1, g)[0] for _ in range(500)])
    assert (big[:, :2] >= 0).all() and (big[:, 2:] <= [10_000, 8000]).all() and .2 < np.mean((big[:, 2] - big[:, 0])/1e4) < .5

def test_box_statistics_need_boxes():
    with pytest.raises(InputError, match="has 0 boxes"): box_statistics(source(Stub("a")))

@pytest.mark.parametrize("factor", [1.3, 5.])
def test_mask_boxes_paints_the_polyp_and_nothing_else(factor):
    "a white polyp on a flat wall disappears; the picture outside the grown box is untouched"
    v, wall = (120, 90), np.array([200, 90, 80])
    b = np.array([[40., 30, 60, 45], [42, 32, 62, 47], [2, 1, 12, 9]])
    frames = np.tile(wall, (3, 90, 120, 1)).astype(np.uint8)
    for f, (x0, y0, x1, y1) in zip(frames, b.astype(int)): f[y0:y1, x0:x1] = 255
    crops = BoxCrop(factor)(v, 3, boxes=b)
    images = np.stack([np.asarray(Image.fromarray(f).resize((64, 64), Image.Resampling.BILINEAR, box=tuple(c))) for f, c in zip(frames, crops)])
    before = images.copy()
    out = mask_boxes(images, b, crops)
    assert (images == before).all()
    for o, i, box, c in zip(out, before, b, crops):
        scale = 64/(c[2:] - c[:2])
        x, y = ((np.arange(64) + .5)[None]/scale[:, None] + c[:2, None])
        mid, half = (box[:2] + box[2:])/2, (box[2:] - box[:2])/2
        ring = np.maximum(np.abs(x - mid[0])[None]/half[0], np.abs(y - mid[1])[:, None]/half[1])      # 1 on the polyp's edge
        pixel = max(1/(scale[0]*half[0]), 1/(scale[1]*half[1]))
        assert (o[ring > 1.3 + pixel] == i[ring > 1.3 + pixel]).all()
        if factor == 5: assert np.abs(o.astype(int) - wall).max() <= 2
        else: assert np.ptp(o[ring < 1.2].reshape(-1, 3), axis=0).max() == 0                          # nothing around it: one colour

def test_scale_boxes_takes_one_box_too():
    assert scale_boxes([10, 10, 20, 20], 3, (100, 100)).tolist() == [[0, 0, 30, 30]]


# ---- annotations
class Sealed(Stub):
    "A video whose annotations must not be opened"
    @property
    def annotations(self): raise AssertionError("a view looked at the annotations")
    has_annotations = property(lambda self: self.annotations)
    def mask(self, frame): raise AssertionError("a view looked at the masks")

STATS = dict(mean=[.5, .5, -2, -2], cov=(.01*np.eye(4)).tolist())
@pytest.mark.parametrize("view", [RandomCrop(), FullFrame(), SyntheticBox(STATS)], ids=str)
def test_views_do_not_touch_annotations(view):
    src = source(Sealed("a"), Sealed("b"))
    data = dataset(src, view)
    data.clip(3); data.batch([[0, 1, 2], [4, 3, 3]])
    read_view(src["a"], data.table.iloc[0], view, 16, gen())
    assert view.annotation_free == (not isinstance(view, SyntheticBox)) and not view.needs_boxes

def test_box_views_do():
    data = dataset(source(Sealed("a"), Sealed("b")), BoxCrop())
    with pytest.raises(AssertionError, match="looked at"): data.clip(0)
    with pytest.raises(AssertionError, match="looked at"): read_view(data.video(0), data.table.iloc[0], FullFrame(), 16, mask_polyp=True)
    assert not BoxCrop.annotation_free and BoxCrop.needs_boxes
    assert [v.annotation_free for v in (View, RandomCrop, FullFrame, BoxCrop, SyntheticBox)] == [True, True, True, False, False]


# ---- rows to clips
def test_sample_frames():
    row = pd.Series(dict(start_frame=100, end_frame=132, stride=4))
    full = tracklet_frames(row)
    assert (sample_frames(row) == full).all() and (sample_frames(row, 8) == full).all() and (sample_frames(row, 99) == full).all()
    assert sample_frames(row, 4).tolist() == full[[1, 3, 5, 7]].tolist() and sample_frames(row, 1).tolist() == [full[4]]
    for n in range(1, 9):
        f = sample_frames(row, n)
        assert len(set(f)) == n and set(f) <= set(full) and np.ptp(np.diff(f)) <= 4 if n > 1 else True
    with pytest.raises(InputError, match="n_frames=0"): sample_frames(row, 0)

def test_read_view_is_the_crop_of_the_frames():
    src = source()
    row = make_tracklets(src, stride=2).iloc[1]
    clip = read_view(src["a"], row, RandomCrop(), 24, gen(5))
    x0, y0, x1, y1 = RandomCrop()(src["a"].size, 8, gen(5))[0]
    assert clip.shape == (8, 24, 24, 3) and (clip[:, 0, 0, 0] == tracklet_frames(row)).all()
    assert np.abs(clip[..., 1].mean((0, 1, 2)) - (x0 + x1 - 1)/2) < 1 and np.abs(clip[..., 2].mean((0, 1, 2)) - (y0 + y1 - 1)/2) < 1
    assert (clip[0, ..., 1:] == clip[7, ..., 1:]).all()                    # the same place in all frames

def test_box_view_follows_the_polyp():
    src = source()
    row = annotated_tracklets(src, stride=4).iloc[0]
    some = sample_frames(row, 5)
    clip = read_view(src["a"], row, BoxCrop(1.), 20, frames=some)
    centre = boxes_of(src["a"], row)[np.isin(tracklet_frames(row), some)]
    assert len(clip) == 5 and np.abs(clip[..., 1].mean((1, 2)) - (centre[:, 0] + centre[:, 2] - 1)/2).max() < 1
    assert read_view(src["a"], row, BoxCrop(), (30, 20), mask_polyp=True).shape == (len(tracklet_frames(row)), 20, 30, 3)

def test_mask_follows_the_frames_that_are_left():
    "with a broken frame in front, every box must still meet its own frame"
    whole, hurt = source(Stub("a", boxes=boxes())), source(Stub("a", boxes=boxes(), bad=[0, 8]))
    row = annotated_tracklets(whole, stride=4).iloc[0]
    a, b = (read_view(s["a"], row, BoxCrop(), 32, mask_polyp=True) for s in (whole, hurt))
    assert len(b) == len(a) - 2 and (a[[1, *range(3, len(a))]] == b).all()

def test_crops_are_known_before_decoding():
    "a large crop at a small size lets the decoder shrink"
    v = Stub("a", size=(160, 128)); src = source(v)
    dataset(src, FullFrame(), 16).clip(0)
    assert set(v.shrunk) == {8}


# ---- tensors
def test_to_batch_against_a_loop():
    g = gen(0)
    clips = [g.integers(0, 256, (t, 6, 5, 3), dtype=np.uint8) for t in (4, 1, 3)]
    x, mask = to_batch(clips)
    assert x.shape == (3, 4, 3, 6, 5) and x.dtype == torch.float32 and mask.dtype == torch.bool and mask.sum(1).tolist() == [4, 1, 3]
    for i, c in enumerate(clips):
        for t in range(4):
            want = (c[min(t, len(c) - 1)].astype(float)/255 - .45)/.225
            assert np.allclose(x[i, t].numpy(), want.transpose(2, 0, 1), atol=1e-5) and bool(mask[i, t]) == (t < len(c))
    assert torch.allclose(to_batch(clips, mean=0, std=1)[0][0, 0, 0, 0, 0], torch.tensor(clips[0][0, 0, 0, 0]/255).float())
    u, _ = pad_clips(clips, 7)
    assert u.dtype == torch.uint8 and u.shape[1] == 7 and torch.equal(normalise(u)[:, :4], x)
    for bad, says in (([], "at least one"), ([clips[0], clips[0][:0]], "expected 1"), ([clips[0], clips[0][:, :2]], "one size")):
        with pytest.raises(InputError, match=says): to_batch(bad)
    with pytest.raises(InputError, match="expected 1 to 3"): pad_clips(clips, 3)

@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_normalise_leaves_its_input(dtype):
    x = torch.full((1, 3, 2, 2), 7, dtype=dtype); normalise(x)
    assert (x == 7).all()


# ---- the data set
def test_a_clip_depends_on_its_names_only():
    a, b = dataset(source(), seed=3), dataset(source(), seed=3)
    order = gen(0).permutation(len(a))
    want = {i: a.clip(i, epoch=2, draw=1) for i in range(len(a))}
    for i in order: b.clip((i + 1) % len(b)); assert (b.clip(i, epoch=2, draw=1) == want[i]).all()
    for other in (a.clip(0, 3, 1), a.clip(0, 2, 2), dataset(source(), seed=4).clip(0, 2, 1)): assert not np.array_equal(other, want[0])
    assert not np.array_equal(want[0][..., 1:], want[1][..., 1:])           # another tracklet, another crop
    np.random.seed(1); torch.manual_seed(1)
    assert (a.clip(0, 2, 1) == want[0]).all()

def test_batches_do_not_depend_on_the_cut():
    data = dataset(source(), n_frames=4)
    bags = np.array([[0, 1, 2], [9, 10, 8], [3, 3, 4], [11, 9, 9]])
    whole, mask = data.batch(bags, epoch=5)
    assert whole.shape == (4, 3, 4, 3, 16, 16) and mask.all() and whole.dtype == torch.uint8
    for at in range(4): assert torch.equal(data.batch(bags[at:at + 1], 5)[0][0], whole[at])
    assert torch.equal(data.batch(bags[::-1], 5)[0], whole.flip(0)) and torch.equal(data[5, bags][0], whole)
    red = whole[:, :, :, 0, 0, 0]
    for r in range(4):
        for c in range(3): assert red[r, c].tolist() == sample_frames(data.table.iloc[bags[r, c]], 4).tolist()
    assert not torch.equal(whole[2, 0], whole[2, 1])                        # one tracklet twice, two crops
    assert not torch.equal(data.batch(bags, 6)[0], whole)
    with pytest.raises(InputError, match=r"\(b, k\), got \(3,\)"): data.batch(bags[0])

def test_all_draws_of_an_epoch_differ():
    "the crops of an epoch in which tracklets appear as anchors and as members, none twice"
    data, seen = dataset(source(Stub("a", n=40, size=(1000, 800)))), set()
    bags = [[i, *[j for j in range(5) if j != i], i] for i in range(5)]
    for bag in bags:
        draws = 1 + bag[0]*6 + np.arange(6)
        seen |= {tuple(data._planned(i, 0, d)[1][0]) for i, d in zip(bag, draws)}
    assert len(seen) == 30

def test_each_frame_is_decoded_once_in_a_batch():
    src = source(); data = dataset(src)
    data.batch([[0, 1, 1], [1, 0, 2], [9, 10, 9]])
    assert src["a"].decoded == list(range(24)) and src["b"].decoded == list(range(8, 24))

def test_loader_workers_give_the_same():
    data = dataset(source(), n_frames=4)
    bags = [(e, np.array([[i, i + 1], [i + 2, i]])) for e in range(2) for i in range(3)]
    assert torch.equal(pickle.loads(pickle.dumps(dataset(open_pickle_safe())))[0, bags[0][1]][0], dataset(open_pickle_safe())[0, bags[0][1]][0])
    loader = torch.utils.data.DataLoader(data, sampler=bags, batch_size=None, num_workers=2, multiprocessing_context="fork")
    for (e, b), (clips, mask) in zip(bags, loader): assert torch.equal(clips, data.batch(b, e)[0]) and mask.all()

class Plain(Stub):
    "without a closure, so that it can be pickled"
    def __init__(self, *a, **kw): super().__init__(*a, **kw); self.labels = None
def open_pickle_safe(): return source(Plain("a"))

def test_several_sources():
    one, two = source(Stub("a"), path="one"), source(Stub("a", size=(90, 70)), path="two")
    table = pd.concat([make_tracklets(s, stride=1) for s in (one, two)])
    data = ClipDataset([one, two], table, FullFrame(), 16)
    assert data.video(0) is one["a"] and data.video(15) is two["a"] and len(data) == 16
    clips, _ = data.batch([[0, 15]])
    assert clips[0, 0, 0, 1].max() <= 60 < clips[0, 1, 0, 1].max()
    with pytest.raises(InputError, match="row 15 of the table belongs to two"): ClipDataset([one, source(path="three")], table, FullFrame(), 16).clip(15)
    assert ClipDataset(source(Stub("a"), path="moved"), make_tracklets(one, stride=1), FullFrame(), 16).clip(0).shape == (8, 16, 16, 3)


# ---- broken frames
def test_broken_frames_make_a_clip_shorter():
    src = source(Stub("a", bad=[1, 6])); data = dataset(src)
    clip = data.clip(0)
    assert clip[:, 0, 0, 0].tolist() == [0, 2, 3, 4, 5, 7]
    assert (clip == dataset(source(Stub("a"))).clip(0)[[0, 2, 3, 4, 5, 7]]).all()        # the crop is that of the whole clip
    clips, mask = data.batch([[0, 1], [2, 0]])
    assert clips.shape[2] == 8 and mask[0, 0].tolist() == [True]*6 + [False]*2 and mask[0, 1].all() and mask[1, 1].sum() == 6
    assert clips[0, 0, :, 0, 0, 0].tolist() == [0, 2, 3, 4, 5, 7, 7, 7]

def test_a_frame_that_was_broken_once_is_not_tried_again():
    v = Stub("a", bad=[1]); data = dataset(source(v))
    a = data.clip(0); v.bad.clear()
    assert (data.clip(0) == a).all() and v.decoded.count(1) == 1

def test_empty_clips(capsys, monkeypatch):
    monkeypatch.setattr("freerep.core._noted", set())
    bad = range(8, 16)
    data = dataset(source(Stub("a", bad=bad)))
    with pytest.raises(EmptyClip, match="a: none of the frames 8 to 15 can be read.*it is broken"): data.clip(1)
    assert issubclass(EmptyClip, InputError)
    clips, mask = data.batch([[0, 1, 2], [1, 1, 3]])
    assert mask.all() and "nothing can be read from frame 8 on" in capsys.readouterr().err
    first = clips[:, :, 0, 0, 0, 0]
    assert first.tolist() == [[0, 0, 16], [24, 24, 24]]
    assert len({c.numpy().tobytes() for c in clips.flatten(0, 1)}) == 6     # each with its own crop
    with pytest.raises(EmptyClip, match="no frame of the bag of frame 8"): data.batch([[0, 2, 3], [1, 1, 1]])


# ---- real data
def test_video_file(shared_data):
    src = open_source(shared_data/"ldpolypvideo"/"video_101.mp4")
    table = make_tracklets(src, stride=None)
    data = ClipDataset(src, table, RandomCrop(), 48, n_frames=4)
    clips, mask = data.batch([[0, 1, 2], [2, 1, 2]])
    assert mask.all() and clips.float().std() > 5
    for c in range(3): assert np.array_equal(clips[0, c].permute(0, 2, 3, 1).numpy(), data.clip(c, draw=1 + c))
    assert torch.equal(pickle.loads(pickle.dumps(data)).batch([[0, 1, 2]])[0][0], clips[0])

def test_odd_images(shared_data):
    "a folder of broken and unusual pictures: what can be read is read, at one size"
    src = open_source(shared_data/"odd-images")
    v = next(iter(src))
    row = pd.Series(dict(start_frame=int(v.frames[0]), end_frame=int(v.frames[-1]) + 1, stride=1, video=v.name))
    clip = read_view(v, row, RandomCrop(), 32, gen(0))
    assert len(clip) == len(v.frames) - len(v.broken) and len(v.broken) >= 2 and clip.shape[1:] == (32, 32, 3)
