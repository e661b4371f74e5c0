"""Tracklets: brute-force references, properties, real boxes, faults."""
import json
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from freerep.core import InputError
from freerep.sources import Source, Video, box_table, open_source
from freerep.tracklets import COLUMNS, annotated_tracklets, box_iou, boxes_of, frame_runs, info, info_text, make_tracklets, tracklet_frames
from helpers import ldpolyp, scene, write_realcolon

few = settings(max_examples=80, deadline=None)


class Toy(Video):
    "Frame numbers and boxes without pixels"
    def __init__(self, name, frames, boxes=None, fps=25., size=(160, 128)):
        super().__init__(name, name, fps=fps, labels=None if boxes is None else lambda v: (box_table([(*b, "toy") for b in boxes]), []))
        self.frames, self.size = np.array(sorted(frames), np.int64), size
    def _pictures(self, shrink): raise AssertionError("no pixel is needed to make a table")


def toy(*videos): return Source("toy", "toy", list(videos))


# ---- training tracklets

def brute_raw(frames, length, stride):
    "Take the frames one after the other; a tracklet is complete when it has `length` samples, and starts anew behind a gap"
    starts, have, t = [], set(frames), min(frames)
    while t <= max(frames):
        if t not in have: t += 1; continue
        wanted = [t + i*stride for i in range(length)]
        hole = next((f for f in range(t, wanted[-1] + 1) if f not in have), None)
        if hole is None:
            starts.append(t)
            hole = next((f for f in range(wanted[-1] + 1, t + length*stride) if f not in have), None)
        t = t + length*stride if hole is None else hole + 1
    return starts


@few
@given(st.sets(st.integers(0, 120), min_size=2), st.integers(1, 6), st.integers(1, 6))
def test_raw_tracklets_equal_brute_force(frames, length, stride):
    frames = {*frames, 200, 201}                            # two neighbours: the step between frames is 1
    want = brute_raw(frames, length, stride)
    if not want:
        with pytest.raises(InputError, match="no video gives a tracklet"): make_tracklets(toy(Toy("a", frames)), length, stride)
        return
    table = make_tracklets(toy(Toy("a", frames)), length, stride)
    assert table.start_frame.tolist() == want


def test_a_tracklet_after_a_hole_starts_on_the_first_frame_behind_it():
    table = make_tracklets(toy(Toy("a", [*range(40), *range(45, 80)])))
    assert table.start_frame.tolist() == [0, 45] and table.end_frame.tolist() == [32, 77]


@few
@given(st.lists(st.sets(st.integers(0, 300), min_size=1), min_size=1, max_size=4), st.integers(1, 8), st.integers(1, 5), st.sampled_from([5., 25., 29.97, 60.]))
def test_raw_tracklets_exist_do_not_overlap_and_stay_in_their_video(sets, length, stride, fps):
    source = toy(*[Toy(f"v{i}", s | {1000, 1001, 1002}, fps=fps) for i, s in enumerate(sets)])
    try: table = make_tracklets(source, length, stride)
    except InputError: return
    assert list(table.columns) == COLUMNS and table.row.tolist() == list(range(len(table)))
    used = Counter()
    for row in table.itertuples():
        frames = tracklet_frames(row)
        assert len(frames) == length and row.end_frame == row.start_frame + length*stride
        assert set(range(frames[0], frames[-1] + 1)) <= set(source[row.video].frames.tolist())        # no gap inside
        used.update((row.video, f) for f in range(frames[0], frames[-1] + 1))
        assert row.start_s == pytest.approx(frames[0]/fps) and row.end_s == pytest.approx((frames[-1] + 1)/fps)
    assert not used or max(used.values()) == 1
    assert (table.identity == "").all() and table[["x0", "y0", "x1", "y1"]].isna().all(axis=None) and (table.source == "toy").all() and (table.fps == fps).all()


def test_counts_by_hand():
    for n, want in ((28, 0), (29, 1), (60, 1), (61, 2), (93, 3)):           # 29 frames hold 8 samples at stride 4
        source = toy(Toy("a", range(n)), Toy("b", range(29)))
        assert (make_tracklets(source).video == "a").sum() == want


def test_every_kth_frame_on_disk():
    "Frames 0, 4, 8, ... with stride 4 are what the paper samples from all frames"
    thin, full = make_tracklets(toy(Toy("a", range(0, 1000, 4)))), make_tracklets(toy(Toy("a", range(1000))))
    pd.testing.assert_frame_equal(thin, full.iloc[:len(thin)])
    assert make_tracklets(toy(Toy("a", range(0, 1000, 3)))).stride.unique().tolist() == [3]
    gap = [f for f in range(0, 400, 4) if f != 100]
    assert [t for t in make_tracklets(toy(Toy("a", gap))).start_frame if t > 72][0] == 104


@pytest.mark.parametrize("fps, stride", [(25, 4), (29.97, 4), (30, 4), (60, 9), (6.25, 1), (1, 1), (50, 7)])
def test_stride_from_the_frame_rate(fps, stride):
    assert make_tracklets(toy(Toy("a", range(200), fps=fps)), stride=None).stride.unique().tolist() == [stride]


def test_short_videos_are_named(capsys):
    table = make_tracklets(toy(Toy("long", range(64)), Toy("too-short-17", range(28)), Toy("empty", [])))
    assert table.video.unique().tolist() == ["long"]
    assert "too-short-17, empty" in capsys.readouterr().err
    with pytest.raises(InputError, match="no video gives a tracklet.*shorter than one tracklet of 8 frames at stride 4"): make_tracklets(toy(Toy("s", range(28))))


@pytest.mark.parametrize("kw", [dict(length=0), dict(length=2.5), dict(stride=0), dict(stride=1.5), dict(stride=-4)])
def test_bad_arguments(kw):
    with pytest.raises(InputError, match=f"{next(iter(kw))}="): make_tracklets(toy(Toy("a", range(100))), **kw)


def test_a_whole_data_set_is_a_table_of_few_megabytes():
    sizes = np.random.default_rng(0).multinomial(1_770_282, np.ones(41)/41)
    table = make_tracklets(toy(*[Toy(f"v{i}", range(n)) for i, n in enumerate(sizes)]))
    assert len(table) == sum((n - 1)//4//8 + ((n - 1)//4 % 8 == 7) for n in sizes) and 55_000 < len(table) < 56_000
    assert table.memory_usage(deep=True).sum() < 30e6


def test_runs():
    first, last = frame_runs(Toy("a", [0, 1, 2, 5, 6, 9]))
    assert first.tolist() == [0, 5, 9] and last.tolist() == [2, 6, 9]
    assert [len(x) for x in frame_runs(Toy("a", []))] == [0, 0]


# ---- annotated tracklets

def brute_annotated(video, stride, min_frames, iou, gap):
    "The rule in words: walk through the boxes of each polyp"
    have, out = set(video.frames.tolist()), []
    table = video.annotations
    for who in sorted(set(table.identity)):
        rows = sorted(tuple(r) for r in table[table.identity == who][["frame", "x0", "y0", "x1", "y1"]].itertuples(index=False))
        chain = []
        for row in rows:
            if chain:
                t, a = chain[-1][0], chain[-1][1:]
                w, h = min(a[2], row[3]) - max(a[0], row[1]), min(a[3], row[4]) - max(a[1], row[2])
                inter = max(w, 0)*max(h, 0)
                overlap = inter/((a[2] - a[0])*(a[3] - a[1]) + (row[3] - row[1])*(row[4] - row[2]) - inter)
                if row[0] - t > gap or overlap < iou or any(f not in have for f in range(t, row[0])):
                    out.append((who, chain))
                    chain = []
            chain.append(row)
        out.append((who, chain))
    return sorted((c[0][0], who, c[-1][0] + 1) for who, c in out if c and len(c) >= min_frames)


CHAIN = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["p1", "p2"]), st.integers(0, 100), st.integers(0, 60)), min_size=1, max_size=80)


@few
@given(CHAIN, st.sets(st.integers(0, 60), max_size=4), st.integers(1, 4), st.sampled_from([.1, .5, 0.]), st.integers(1, 3), st.integers(1, 4))
def test_annotated_tracklets_equal_brute_force(boxes, missing, min_frames, iou, gap, stride):
    rows = [(t, who, x, y, x + 40, y + 40) for t, who, x, y in boxes]
    video = Toy("a", (set(range(62)) | {100, 101}) - missing, rows)
    want = brute_annotated(video, stride, min_frames, iou, gap)
    if not want:
        with pytest.raises(InputError, match="no polyp is boxed"): annotated_tracklets(toy(video), stride, min_frames, iou, gap)
        return
    table = annotated_tracklets(toy(video), stride, min_frames, iou, gap)
    assert [(r.start_frame, r.identity, r.end_frame) for r in table.itertuples()] == want
    assert list(table.columns) == COLUMNS and table.row.tolist() == list(range(len(table)))
    for row in table.itertuples():
        frames, box = tracklet_frames(row), boxes_of(video, row)
        assert box.shape == (len(frames), 4) and set(frames.tolist()) <= set(video.frames.tolist())
        assert (box[(len(frames) - 1)//2] == [row.x0, row.y0, row.x1, row.y1]).all()
        given_boxes = {r.frame: [r.x0, r.y0, r.x1, r.y1] for r in video.annotations.itertuples() if r.identity == row.identity}
        for f, b in zip(frames.tolist(), box):
            if f in given_boxes: assert b.tolist() == given_boxes[f]
            else: assert (np.diff([min(given_boxes[g] for g in given_boxes), b.tolist()], axis=0) >= 0).all() or b.min() >= 0


def test_between_two_boxes_it_moves_evenly():
    boxes = [(t, "p", 10 + 2*t, 10, 50 + 2*t, 50) for t in range(40) if t not in (8, 20, 21)]
    video = Toy("a", range(40), boxes)
    assert len(annotated_tracklets(toy(video), min_frames=1)) == 3
    row = annotated_tracklets(toy(video), gap=3).iloc[0]
    assert np.allclose(boxes_of(video, row)[:, 0], 10 + 2*tracklet_frames(row))
    with pytest.raises(InputError, match="has no box of ''"): boxes_of(video, make_tracklets(toy(video)).iloc[0])


def test_defaults_are_those_of_the_paper():
    "At least 30 consecutive frames, stride 4, the whole of it one row"
    boxes = lambda first, n: [(t, "p", 10, 10, 50, 50) for t in range(first, first + n)]
    video = Toy("a", range(300), boxes(0, 29) + boxes(50, 30) + boxes(100, 31) + boxes(150, 120))
    table = annotated_tracklets(toy(video))
    assert table[["start_frame", "end_frame"]].values.tolist() == [[50, 80], [100, 131], [150, 270]]
    assert [len(tracklet_frames(r)) for r in table.itertuples()] == [8, 8, 30] and (table.stride == 4).all()
    assert table.end_s.tolist() == pytest.approx([80/25, 131/25, 270/25])
    slow = Toy("a", range(300), boxes(0, 7) + boxes(50, 8), fps=6.25)
    assert annotated_tracklets(toy(slow), stride=None)[["start_frame", "end_frame", "stride"]].values.tolist() == [[50, 58, 1]]


def test_thinned_videos_give_the_same_tracklets():
    boxes = [(t, "p", 10 + t, 10, 50 + t, 50) for t in range(20, 101)]
    full = annotated_tracklets(toy(Toy("a", range(120), boxes)))
    thin = annotated_tracklets(toy(Toy("a", range(0, 120, 4), [b for b in boxes if b[0] % 4 == 0])))
    assert (tracklet_frames(full.iloc[0]) == tracklet_frames(thin.iloc[0])).all()


def test_two_polyps_at_once_and_never_across_videos():
    boxes = [(t, who, x, 10, x + 40, 50) for t in range(40) for who, x in (("p1", 10), ("p2", 90))]
    table = annotated_tracklets(toy(Toy("a", range(40), boxes), Toy("b", range(40), boxes), Toy("c", range(40), [])))
    assert table[["video", "identity"]].values.tolist() == [["a", "p1"], ["a", "p2"], ["b", "p1"], ["b", "p2"]]


def test_sources_without_boxes():
    with pytest.raises(InputError, match="has no boxes"): annotated_tracklets(toy(Toy("a", range(40))))
    with pytest.raises(InputError, match="no polyp is boxed in 30 consecutive frames"): annotated_tracklets(toy(Toy("a", range(40), [])))


@few
@given(st.lists(st.tuples(*[st.integers(0, 20)]*8), min_size=1, max_size=20))
def test_iou_against_counting_pixels(pairs):
    for x in pairs:
        a, b = [(min(p[0], p[2]), min(p[1], p[3]), max(p[0], p[2]) + 1, max(p[1], p[3]) + 1) for p in (x[:4], x[4:])]
        canvas = np.zeros((2, 22, 22), bool)
        for c, (x0, y0, x1, y1) in zip(canvas, (a, b)): c[y0:y1, x0:x1] = True
        assert box_iou(np.array([a], float), np.array([b], float))[0] == pytest.approx((canvas[0] & canvas[1]).sum()/(canvas[0] | canvas[1]).sum())


# ---- real data, and the description of a source

def test_the_real_clip_gives_three_tracklets_of_one_polyp(shared_data, tmp_path):
    images, boxes = ldpolyp(shared_data)
    small = {t: im[::4, ::4] for t, im in images.items()}
    source = open_source(write_realcolon(tmp_path, "101-001", small, [(t, "101-001_1", *(x/4 for x in b)) for t, _, *b in boxes]))
    runs = annotated_tracklets(source, min_frames=8, iou=0)
    assert annotated_tracklets(source, min_frames=1)[["start_frame", "end_frame"]].values.tolist() == [[2, 14], [25, 43], [43, 49], [52, 177]]   # one jump of the box
    assert runs[["start_frame", "end_frame"]].values.tolist() == [[2, 14], [25, 49], [52, 177]] and set(runs.identity) == {"101-001_1"}
    paper = annotated_tracklets(source)
    assert paper[["start_frame", "end_frame"]].values.tolist() == [[52, 177]] and len(tracklet_frames(paper.iloc[0])) == 32
    assert make_tracklets(source).start_frame.tolist() == [0, 32, 64, 96, 128]
    facts = info(source)
    assert (facts["n_frames"], facts["n_boxes"], facts["n_polyps"], facts["n_tracklets"], facts["n_polyp_tracklets"], facts["problems"]) == (181, 161, 1, 5, 1, [])


def test_the_real_file_itself(shared_data):
    source = open_source(shared_data/"ldpolypvideo/video_101.mp4")
    table = make_tracklets(source)
    assert table.start_frame.tolist() == [0, 32, 64, 96, 128] and np.allclose(table.start_s, table.start_frame/25) and np.allclose(table.end_s, (table.start_frame + 29)/25)
    assert table.video.unique().tolist() == ["video_101.mp4"]


def test_info_is_json_and_text(tmp_path):
    write_realcolon(tmp_path, "901-001", [scene(t) for t in range(70)], [(t, "901-001_1", 5, 5, 40, 40) for t in range(40)])
    write_realcolon(tmp_path, "901-002", [scene(t) for t in range(10)])
    (tmp_path/"901-002_frames/901-002_3.jpg").write_bytes(b"")
    facts = info(open_source(tmp_path))
    again = json.loads(json.dumps(facts, allow_nan=False))
    assert again == facts and facts["kind"] == "realcolon"
    assert (facts["n_videos"], facts["n_frames"], facts["n_tracklets"], facts["n_polyp_tracklets"], facts["frames_decoded"]) == (2, 80, 2, 1, 80)
    text = info_text(facts)
    for part in ("REAL-Colon", "2 videos, 80 frames", "901-001: 70 frames (0 to 69), 96x64, 25 frames/s", "1 problem found", "901-002_3.jpg: cannot be read: the file is empty"): assert part in text


def test_info_of_a_video_that_cannot_be_read_at_all(tmp_path):
    (tmp_path/"bad").mkdir()
    for i in range(3): (tmp_path/f"bad/{i}.jpg").write_bytes(b"x")
    facts = info(open_source(tmp_path))
    assert facts["n_frames"] == 0 and any("cannot be read" in p["problem"] for p in facts["problems"]) and info_text(facts)
