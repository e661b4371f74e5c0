"""Sources: pictures as viewers show them, exact frames of video files, four layouts, and every kind of damage."""
import contextlib
import json
import multiprocessing
import os
import pickle
import shutil
import struct
import sys
import threading
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image, ImageOps

from freerep.core import InputError
from freerep.sources import (ImageVideo, VideoFile, _do_count, _open_picture, _open_readers, _plain_xml, check_source, list_frames, natural_key,
                             open_source, parse_xml, read_image, real_colon_split)
from freerep.tracklets import make_tracklets, tracklet_frames
from helpers import decode_all, ldpolyp, scene, voc, write_realcolon, write_video

few = settings(max_examples=40, deadline=None)
_watched = None
sys.addaudithook(lambda event, args: _watched.append(os.fsdecode(args[0])) if _watched is not None and event in ("open", "os.scandir", "os.listdir") and
                 isinstance(args[0], (str, bytes, os.PathLike)) else None)


@contextlib.contextmanager
def watch(folder):
    "The files and folders below `folder` that are opened inside the block"
    global _watched
    _watched, seen = [], []
    try: yield seen
    finally:
        seen += [p for p in _watched if p.startswith(str(folder))]
        _watched = None


def frame_folder(folder, n=6, pattern="frame_{}.jpg", size=(96, 64)):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n): Image.fromarray(scene(i, size)).save(folder/pattern.format(i), quality=95)
    return folder


def problems(source, **kw): return "\n".join(f"{p['file']}: {p['problem']}" for p in check_source(source, **kw)[1])


# ---- one picture

def test_odd_images_are_read_as_a_viewer_shows_them_or_refused_with_the_reason(shared_data):
    odd = shared_data/"odd-images"
    upright = np.asarray(ImageOps.exif_transpose(Image.open(odd/"hopper_orientation_6.jpg")).convert("RGB"))
    assert (read_image(odd/"hopper_orientation_6.jpg") == upright).all() and not (upright == np.asarray(Image.open(odd/"hopper_orientation_6.jpg"))).all()
    cmyk = read_image(odd/"pil_sample_cmyk.jpg")                      # the word RED in red on black
    assert cmyk.shape == (100, 100, 3) and cmyk[0, 0, 0] > 200 > 60 > cmyk[0, 0, 1] and cmyk[50, 99].max() < 40
    grey = read_image(odd/"hopper_gray.jpg")
    assert grey.shape == (128, 128, 3) and (grey == grey[..., :1]).all() and grey.std() > 30
    deep = np.asarray(Image.open(odd/"16bit.cropped.tif"))
    assert (read_image(odd/"16bit.cropped.tif")[..., 0] == deep//256).all()
    palette = read_image(odd/"mask_palette.png")                      # an indexed mask: colours, not indices
    assert len(np.unique(palette.reshape(-1, 3), axis=0)) == 2 and palette.max() > 100
    assert read_image(odd/"dispose_bgnd.gif").shape == (100, 100, 3)
    assert read_image(odd/"p_16.png").shape == (128, 128, 3) and read_image(odd/"invalid-exif.jpg").shape == (200, 200, 3)
    assert read_image(odd/"mask_254.png").max() == 254
    for name, reason in {"truncated.jpg": "truncated", "truncated_image.png": "truncated", "broken.png": "PNG data that cannot be decoded",
                         "broken_data_stream.png": "broken_data_stream.png", "tiff_named.png": "TIFF data (though named .png)"}.items():
        with pytest.raises(InputError, match=".") as e: read_image(odd/name)
        assert name in str(e.value) and reason in str(e.value)


def test_odd_images_as_frames_are_named_and_left_out(shared_data, tmp_path):
    shutil.copytree(shared_data/"odd-images", tmp_path/"odd")
    source = open_source(tmp_path/"odd")
    video, = source
    text = problems(source)
    for name in ("truncated.jpg", "truncated_image.png", "broken.png", "broken_data_stream.png", "tiff_named.png"): assert name in text
    assert "differ in size" in text and len(video.broken) == 5
    assert video.read(video.frames, size=16).shape == (video.n_frames - 5, 16, 16, 3)
    assert {video.file(f).name for f in video.broken} == {"truncated.jpg", "truncated_image.png", "broken.png", "broken_data_stream.png", "tiff_named.png"}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("shrink", [1, 4])
def test_every_exif_orientation(tmp_path, orientation, shrink):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(scene(size=(320, 200))).save(tmp_path/"a.jpg", exif=exif, quality=95)
    want = ImageOps.exif_transpose(Image.open(tmp_path/"a.jpg"))
    picture, full, s = _open_picture(tmp_path/"a.jpg", shrink)
    assert full == want.size and s == shrink and picture.size == tuple(n//s for n in want.size)
    assert np.abs(np.asarray(picture).astype(int) - np.asarray(want.reduce(s))).mean() < 3


def test_sixteen_bits_transparency_and_floats(tmp_path):
    Image.fromarray((np.arange(96*64).reshape(64, 96)*10).astype(np.uint16)).save(tmp_path/"a.png")
    assert (read_image(tmp_path/"a.png")[..., 1] == np.arange(96*64).reshape(64, 96)*10//256).all()
    rgba = np.dstack([scene(), np.zeros((64, 96), np.uint8)])
    rgba[:, :48, 3] = 255
    Image.fromarray(rgba).save(tmp_path/"b.png")
    assert (read_image(tmp_path/"b.png")[:, :48] == scene()[:, :48]).all() and read_image(tmp_path/"b.png")[:, 48:].max() == 0
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path/"c.tif")
    with pytest.raises(InputError, match="floats"): read_image(tmp_path/"c.tif")


# ---- crop and size

@few
@given(st.integers(0, 2**32), st.sampled_from([(96, 64), (131, 77), (352, 288)]), st.integers(4, 40), st.integers(4, 40))
def test_crop_and_resize_equal_the_full_decode(tmp_path_factory, seed, size, w, h):
    "Draft mode and box of `read` against: decode all, cut out, resize"
    folder, r = tmp_path_factory.mktemp("x"), np.random.default_rng(seed)
    Image.fromarray(scene(seed % 50, size)).save(folder/"0.jpg", quality=95)
    x, y = np.sort(r.uniform(-10, size[0] + 10, 2)), np.sort(r.uniform(-10, size[1] + 10, 2))
    box = np.array([x[0], y[0], x[1], y[1]])
    inside = box[2] > 0 and box[3] > 0 and box[0] < size[0] and box[1] < size[1]
    video = ImageVideo("x", folder)
    if not inside:
        with pytest.raises(InputError, match="does not lie in the picture"): video.read([0], box=box, size=(w, h))
        return
    got = video.read([0], box=box, size=(w, h))[0]
    cut = np.round(box).astype(int)
    lo = np.clip(cut[:2], 0, np.array(size) - 1)
    hi = np.clip(cut[2:], lo + 1, size)
    want = np.asarray(Image.open(folder/"0.jpg").resize((w, h), Image.Resampling.BILINEAR, box=(*lo, *hi)))
    assert got.shape == (h, w, 3) and np.abs(got.astype(int) - want).mean() < 3
    mean = np.asarray(Image.open(folder/"0.jpg").crop((*lo, *hi))).mean((0, 1))
    assert np.abs(got.mean((0, 1)) - mean).max() < 12
    assert video.read([0], box=box)[0].shape == (*(hi - lo)[::-1], 3)


def test_boxes_per_frame_follow_the_frames_that_are_kept(tmp_path):
    folder = frame_folder(tmp_path/"v", 6)
    (folder/"frame_2.jpg").write_bytes(b"")
    video = ImageVideo("v", folder)
    boxes = np.array([[i, i, i + 20, i + 20] for i in range(6)])
    clip = video.read(range(6), box=boxes)
    assert clip.shape == (5, 20, 20, 3) and video.broken == {2: "the file is empty"}
    full = video.read([0, 1, 3, 4, 5])
    for j, i in enumerate([0, 1, 3, 4, 5]): assert (clip[j] == full[j][i:i + 20, i:i + 20]).all()


def test_repeated_and_unsorted_frames(tmp_path, monkeypatch):
    import freerep.sources as module
    video, opened = ImageVideo("v", frame_folder(tmp_path/"v")), []
    real = module._open_picture
    video.size
    monkeypatch.setattr(module, "_open_picture", lambda path, s=1: (opened.append(Path(path).name), real(path, s))[1])
    clip = video.read([4, 1, 4, 4], box=[[0, 0, 10, 10], [0, 0, 10, 10], [5, 5, 15, 15], [0, 0, 10, 10]])
    assert opened == ["frame_1.jpg", "frame_4.jpg"]
    assert (clip[0] == clip[3]).all() and not (clip[0] == clip[2]).all() and not (clip[0] == clip[1]).all()


@pytest.mark.parametrize("box, match", [([0, 0, 10], "shape"), ([[0, 0, 9, 9]]*2, "shape"), ([10, 0, 5, 9], "x0 < x1"), ([0, 0, np.nan, 9], "x0 < x1"), ([200, 0, 300, 9], "does not lie"),
                                        ([[0, 0, 9, 9], [0, 0, 8, 8], [0, 0, 9, 9]], "different size")])
def test_bad_boxes(tmp_path, box, match):
    video = ImageVideo("v", frame_folder(tmp_path/"v"))
    with pytest.raises(InputError, match=match): video.read([0, 1, 2], box=box)


def test_bad_size_and_frames(tmp_path):
    video = ImageVideo("v", frame_folder(tmp_path/"v"))
    with pytest.raises(InputError, match="size"): video.read([0], size=0)
    with pytest.raises(InputError, match="whole numbers, got 1.5"): video.read([0, 1.5])
    with pytest.raises(InputError, match="v has no frame 6: its 6 frames are 0 to 5"): video.read([3, 6])
    assert video.read([]).shape == (0, 64, 96, 3) and video.read(3).shape == (1, 64, 96, 3)


# ---- folders of frames

@few
@given(st.lists(st.integers(0, 300), min_size=1, max_size=30, unique=True), st.sampled_from(["", "f_", "001-001_", "a1b"]), st.booleans())
def test_numbers_in_names(tmp_path_factory, numbers, prefix, padded):
    folder = tmp_path_factory.mktemp("n")
    for n in numbers: (folder/f"{prefix}{n:04d}.jpg" if padded else folder/f"{prefix}{n}.jpg").touch()
    frames, names, found = list_frames(folder, None)
    order = sorted(numbers)
    assert [os.fsdecode(n) for n in names] == [f"{prefix}{n:04d}.jpg" if padded else f"{prefix}{n}.jpg" for n in order] and not found
    assert frames.tolist() == (order if _do_count(np.array(numbers)) else list(range(len(order))))
    assert list_frames(folder, prefix)[0].tolist() == order


def test_names_without_numbers_are_in_natural_order(tmp_path):
    for n in ("b.png", "a10.png", "a9.png", "._a1.png", "notes.txt", "A11.PNG"): (tmp_path/n).touch()
    frames, names, _ = list_frames(tmp_path)
    assert frames.tolist() == [0, 1, 2, 3] and [os.fsdecode(n) for n in names] == ["a9.png", "a10.png", "A11.PNG", "b.png"]


def test_time_stamps_as_names_are_no_frame_numbers(tmp_path):
    for n in (1700000000040, 1700000000081, 1700000000120, 1700000000163): (tmp_path/f"{n}.jpg").touch()
    assert list_frames(tmp_path)[0].tolist() == [0, 1, 2, 3]


def test_doubles_and_strays_are_named(tmp_path):
    for n in ("x_1.jpg", "x_01.jpg", "x_2.jpg", "thumb.jpg"): (tmp_path/n).touch()
    frames, names, found = list_frames(tmp_path, "x_")
    assert frames.tolist() == [1, 2] and {Path(p["file"]).name for p in found} == {"x_1.jpg", "thumb.jpg"}


def test_opening_many_frames_is_quick_and_small(tmp_path):
    "Opening looks at no frame of a folder but the first; the list costs some twenty bytes a frame"
    folder = tmp_path/"001-001_frames"
    folder.mkdir()
    for i in range(3000): (folder/f"001-001_{i}.jpg").touch()
    with watch(tmp_path) as opened:
        source = open_source(tmp_path)
        video = source.videos[0]
        assert "frames" not in vars(video)
        assert video.n_frames == 3000 and video._names.nbytes <= 20*3000
    assert opened and not [p for p in opened if p.endswith(".jpg")]


# ---- video files

@pytest.fixture(scope="module")
def clip_images(): return [scene(i, (96, 64)) for i in range(60)]


CODECS = {"plain.mp4": ("libx264", {"g": 12, "bf": 2}), "open.mp4": ("libx264", {"x264-params": "open-gop=1:keyint=12:bframes=3:b-pyramid=2"}), "refresh.mp4": ("libx264", {"x264-params": "intra-refresh=1:keyint=20:bframes=0"}),
          "a.mkv": ("libx264", {"g": 20, "bf": 3}), "a.ts": ("libx264", {"g": 12, "bf": 2}), "a.avi": ("mpeg4", {"g": 12, "bf": 2}), "a.mpg": ("mpeg2video", {"g": 12, "bf": 2}), "a.webm": ("libvpx-vp9", {"g": 20, "deadline": "realtime"})}


@pytest.mark.parametrize("name", CODECS)
def test_any_frame_alone_equals_sequential_decoding(tmp_path, clip_images, name):
    codec, options = CODECS[name]
    path = write_video(tmp_path/name, clip_images, codec=codec, **options)
    truth, video = decode_all(path), open_source(path).videos[0]
    assert video.n_frames == len(truth) == 60 and video.fps == pytest.approx(25)
    for k in np.random.default_rng(0).permutation(60): assert (video.read([k])[0] == truth[k]).all(), k
    assert (video.read(range(60)) == np.stack(truth)).all() and not video.broken
    assert (video.read([41, 3, 41, 17]) == np.stack([truth[i] for i in (41, 3, 41, 17)])).all()


def test_real_video_is_frame_accurate(shared_data):
    path = shared_data/"ldpolypvideo/video_101.mp4"
    truth, video = decode_all(path), open_source(path).videos[0]
    assert video.n_frames == len(truth) == 181 and video.size == (560, 480) and video.fps == 25
    for k in np.random.default_rng(0).permutation(181)[:30]: assert (video.read([k])[0] == truth[k]).all(), k
    assert np.allclose(video.time(video.frames), np.arange(181)/25)


def count(video, *reads):
    "Frames decoded and seeks made by some reads, from a fresh start"
    reader = _open_readers(video.path, video._packet_table)
    reader._reopen()
    reader.decoded = reader.seeks = 0
    for frames in reads: video.read(frames)
    return reader.decoded, reader.seeks


def test_decoding_starts_at_the_right_keyframe_and_no_frame_is_decoded_twice(tmp_path, clip_images):
    video = open_source(write_video(tmp_path/"a.mp4", clip_images, g=12, keyint_min=12, bf=0, sc_threshold=0)).videos[0]
    assert np.flatnonzero(video._packet_table.key).tolist() == [0, 12, 24, 36, 48]
    assert count(video, range(60)) == (60, 0)
    assert count(video, *[range(i, i + 5) for i in range(0, 60, 5)]) == (60, 0)          # runs one after the other: as one
    assert count(video, range(0, 29, 4), range(32, 60, 4))[0] <= 57
    assert count(video, [41]) == (6, 1)                                                   # keyframe 36 to 41
    assert count(video, [41], [38]) == (6 + 3, 2)
    assert count(video, [5, 5, 5]) == (6, 0)
    assert count(video, [50, 2]) == (3 + 3, 1)                                            # sorted: 2 first, then the jump


def test_variable_frame_rate(tmp_path, clip_images):
    pts = np.cumsum(np.r_[0, np.where(np.arange(59) % 7 < 5, 40, 200)])
    source = open_source(write_video(tmp_path/"vfr.mp4", clip_images, pts=pts, g=12))
    video, = source
    assert np.allclose(video.time(video.frames), pts/1000) and video.time(10) == pytest.approx(pts[10]/1000)
    truth = decode_all(video.path)
    for k in (59, 30, 31, 0): assert (video.read([k])[0] == truth[k]).all()
    assert "frame rate varies: frames last 40 to 200 ms" in problems(source)


@pytest.mark.parametrize("angle, matrix", [(90, (0, 1, -1, 0)), (180, (-1, 0, 0, -1)), (270, (0, -1, 1, 0))])
def test_rotation_metadata(tmp_path, clip_images, angle, matrix):
    "The matrix of the track header says how a player turns the picture clockwise"
    path = write_video(tmp_path/"a.mp4", clip_images[:5])
    data, (a, b, c, d) = bytearray(path.read_bytes()), matrix
    at = data.index(b"tkhd") + 4 + 40                                  # version 0: the matrix is 40 bytes into the box
    assert struct.unpack(">9i", data[at:at + 36]) == (65536, 0, 0, 0, 65536, 0, 0, 0, 2**30)
    data[at:at + 36] = struct.pack(">9i", a*65536, b*65536, 0, c*65536, d*65536, 0, 0, 0, 2**30)
    (tmp_path/"turned.mp4").write_bytes(data)
    plain, turned = open_source(path).videos[0], open_source(tmp_path/"turned.mp4").videos[0]
    assert turned.size == (plain.size if angle == 180 else plain.size[::-1])
    assert (turned.read([3])[0] == np.rot90(plain.read([3])[0], -angle//90)).all()


def test_a_file_that_was_cut(tmp_path, clip_images):
    whole = write_video(tmp_path/"whole.mp4", clip_images, g=12)
    data = whole.read_bytes()
    (tmp_path/"no_index.mp4").write_bytes(data[:len(data)//2])                            # the index stands at the end
    with pytest.raises(InputError, match="no_index.mp4 is not a video that can be read.*cut short or lack its index"): open_source(tmp_path/"no_index.mp4")
    front = write_video(tmp_path/"front.mkv", clip_images, g=12)
    (tmp_path/"half.mkv").write_bytes(front.read_bytes()[:front.stat().st_size//2])
    source = open_source(tmp_path/"half.mkv")
    n = source.videos[0].n_frames
    assert 5 < n < 60
    assert len(source.videos[0].read(range(n))) >= n - 1


def test_index_that_promises_more_than_there_is(tmp_path, clip_images):
    with av.open(str(tmp_path/"a.mp4"), "w", options={"movflags": "faststart"}) as out:
        stream = out.add_stream("libx264", rate=25, options={"g": "12"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for image in clip_images: out.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        out.mux(stream.encode())
    data = (tmp_path/"a.mp4").read_bytes()
    (tmp_path/"cut.mp4").write_bytes(data[:int(len(data)*.7)])
    source = open_source(tmp_path/"cut.mp4")
    text = problems(source)
    assert "its index promises 60 frames" in text or "cannot be read" in text
    whole, got = open_source(tmp_path/"a.mp4").videos[0], source.videos[0]
    clip = got.read(got.frames)
    kept = [f for f in got.frames if f not in got.broken]
    assert 10 < len(kept) < 60 and (clip == whole.read(kept)).all()


def test_damage_inside_a_file_is_left_out_not_smeared(tmp_path, shared_data):
    source = shared_data/"ldpolypvideo/video_101.mp4"
    with av.open(str(source)) as c: packets = [(p.pos, p.size, p.pts) for p in c.demux(video=0) if p.size]
    data, r = bytearray(source.read_bytes()), np.random.default_rng(0)
    pos, size, _ = packets[60]
    for j in r.integers(pos + 40, pos + size, 20): data[j] ^= 0xff
    (tmp_path/"a.mp4").write_bytes(data)
    broken = open_source(tmp_path/"a.mp4")
    whole, video = open_source(source).videos[0], broken.videos[0]
    clip, kept = video.read(range(181)), [f for f in range(181) if f not in video.broken]
    assert 0 < len(video.broken) < 60 and len(clip) == len(kept)
    assert (clip == whole.read(kept)).all()
    assert "cannot be read" in problems(broken) and "a.mp4" in problems(broken)
    alone = open_source(tmp_path/"a.mp4").videos[0]                                        # the verdict does not depend on the order of reading
    assert [k for k in reversed(range(52, 98, 3)) if not len(alone.read([k]))][::-1] == [k for k in range(52, 98, 3) if k in video.broken]


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", bytes(5000)])
def test_files_that_are_no_video(tmp_path, content):
    (tmp_path/"a.mp4").write_bytes(content)
    with pytest.raises(InputError, match="a.mp4"): open_source(tmp_path/"a.mp4")
    with pytest.raises(InputError, match="no video can be read.*a.mp4"): open_source(tmp_path)


def test_zero_frames_and_sound_only(tmp_path):
    with av.open(str(tmp_path/"none.avi"), "w") as out:
        stream = out.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        out.start_encoding()
    with av.open(str(tmp_path/"sound.mp4"), "w") as out:
        stream = out.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    with pytest.raises(InputError, match="none.avi"): open_source(tmp_path/"none.avi")
    with pytest.raises(InputError, match="sound.mp4 holds no video"): open_source(tmp_path/"sound.mp4")


def test_a_folder_of_videos_with_a_bad_one(tmp_path, clip_images):
    for name in ("v10.mp4", "v9.mp4"): write_video(tmp_path/name, clip_images[:10])
    (tmp_path/"v1.mp4").write_bytes(b"broken")
    (tmp_path/"readme.txt").write_text("x")
    source = open_source(tmp_path)
    assert source.kind == "video" and [v.name for v in source] == ["v9.mp4", "v10.mp4"]
    assert [Path(p["file"]).name for p in source.problems] == ["v1.mp4"] and "left out" in source.problems[0]["problem"]


def test_few_readers_stay_open(tmp_path, clip_images):
    paths = [write_video(tmp_path/f"{i}.mp4", clip_images[i:i + 8]) for i in range(7)]
    source = open_source(tmp_path)
    truth = [decode_all(p) for p in paths]
    for _ in range(2):
        for v, frames in zip(source, truth): assert (v.read([2, 5]) == np.stack([frames[2], frames[5]])).all()
        assert len(_open_readers.readers) <= 4


def _read_in_child(args):
    video, frames = args
    return [video.read([f])[0] for f in frames]


def test_readers_are_not_shared_between_processes_or_threads(tmp_path, clip_images):
    path = write_video(tmp_path/"a.mp4", clip_images, g=12)
    truth, video = decode_all(path), open_source(path).videos[0]
    video.read([7])                                                                        # the parent has it open
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for k, got in zip((0, 1), pool.map(_read_in_child, [(video, range(k, 60, 2)) for k in (0, 1)])):
            assert all((a == truth[f]).all() for a, f in zip(got, range(k, 60, 2)))
    bad = []
    def work(seed):
        for k in np.random.default_rng(seed).integers(0, 60, 20):
            if not (video.read([k])[0] == truth[k]).all(): bad.append(k)
    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not bad


def test_everything_can_be_sent_to_a_worker(tmp_path, clip_images):
    write_video(tmp_path/"v"/"a.mp4", clip_images[:10]) if (tmp_path/"v").mkdir() is None else None
    frame_folder(tmp_path/"f"/"one")
    write_realcolon(tmp_path/"r", "901-001", clip_images[:10], [(3, "p", 1, 2, 30, 40)])
    for folder in ("v", "f", "r"):
        source = open_source(tmp_path/folder)
        again = pickle.loads(pickle.dumps(source))
        assert (again.videos[0].read([1, 3]) == source.videos[0].read([1, 3])).all() and len(again.videos[0].annotations) == (folder == "r")


# ---- boxes

WORDS = st.sampled_from(["10", "10.5", "-3", "200", "abc", "", "nan", "1e400", "0", "64"])


@few
@given(st.lists(st.tuples(st.sampled_from(["p1", "p2", "001-001_1"]), WORDS, WORDS, WORDS, WORDS), max_size=4), st.booleans())
def test_the_quick_reader_agrees_with_the_parser(objects, sized):
    text = voc((96, 64) if sized else None, objects).encode()
    assert _plain_xml(text)
    quick, parsed = parse_xml(text), parse_xml(b"<!-- comment -->" + text)
    assert quick == parsed and len(quick[1]) == len(objects)


@few
@given(st.binary(max_size=40) | st.sampled_from([b'<?xml version="1.0" encoding="foo"?><a/>', b'<?xml version="1.0" encoding="big5"?><a/>', b"<annotation></annotation>\0", b"</annotation>"]),
       st.integers(0, 300), st.integers(0, 300))
def test_any_bytes_as_xml_give_boxes_or_a_reason(junk, i, j):
    good = voc((96, 64), [("p", 1, 2, 30, 40)]).encode()
    for data in (junk, good[:i] + junk + good[j:], junk + good):
        try: size, objects = parse_xml(data)
        except ValueError: continue
        assert isinstance(size, dict) and all(isinstance(v, str) for o in objects for v in o.values())


def naive_boxes(rows, size, frames):
    "The rule in words, box by box"
    kept = {}
    for t, who, *corners in rows:
        try: x0, y0, x1, y1 = map(float, corners)
        except ValueError: continue
        if not np.isfinite([x0, y0, x1, y1]).all() or x1 <= x0 or y1 <= y0: continue
        x0, x1, y0, y1 = max(x0, 0), min(x1, size[0]), max(y0, 0), min(y1, size[1])
        if x1 > x0 and y1 > y0 and t in frames: kept.setdefault((t, who), (x0, y0, x1, y1))
    return [(*k, *v) for k, v in sorted(kept.items())]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["p1", "p2"]), WORDS, WORDS, WORDS, WORDS), max_size=25))
def test_boxes_are_clamped_or_left_out_and_counted(tmp_path_factory, rows):
    folder = write_realcolon(tmp_path_factory.mktemp("b"), "901-001", [scene(i) for i in range(5)], rows)
    for t in (5, 6): (folder/f"901-001_annotations/901-001_{t}.xml").write_text(voc((96, 64), [r[1:] for r in rows if r[0] == t]))
    source = open_source(folder)
    video, = source
    got = [tuple(r) for r in video.annotations.itertuples(index=False)]
    assert got == naive_boxes(rows, (96, 64), range(5))
    assert list(video.annotations.columns) == ["frame", "identity", "x0", "y0", "x1", "y1"]
    if len(got) < len(rows): assert any("left out" in p["problem"] for p in source.problems)


def test_bad_xml_is_named_and_never_a_crash(tmp_path):
    folder = write_realcolon(tmp_path, "901-001", [scene(i) for i in range(12)], [(t, "p", 10, 10, 30, 30) for t in range(12)])
    xml = lambda t: folder/f"901-001_annotations/901-001_{t}.xml"
    good = xml(0).read_text()
    bomb = "".join(f'<!ENTITY x{i} "{f"&x{i - 1};"*10 if i else "ha"}">' for i in range(9))
    xml(1).write_text(f"<!DOCTYPE z [{bomb}]>" + good.replace("lesion", "&x8;"))
    xml(2).write_text(good.replace("</annotation>", ""))
    xml(3).write_text(f'<!DOCTYPE z [<!ENTITY x SYSTEM "file:///etc/passwd">]>' + good.replace("lesion", "&x;"))
    xml(4).write_bytes(b"\xff\xfe\x00broken")
    xml(5).write_text(good, encoding="utf-16")                                             # unusual and fine
    xml(6).write_text("")
    xml(7).write_text(good.replace("<xmin>10<", "<xmin>40<"))
    xml(8).write_text(good.replace("<unique_id>p</unique_id>", ""))
    xml(9).write_text(good.replace("<size><width>96</width><height>64</height><depth>3</depth></size>", ""))
    xml(10).write_text(good.replace("<width>96<", "<width>1352<"))
    xml(11).unlink()
    source = open_source(folder)
    assert source.videos[0].annotations.frame.tolist() == [0, 5, 9, 10]
    text = problems(source)
    for t, reason in {1: "refused", 2: "not well-formed", 3: "refused", 4: "not well-formed", 6: "not well-formed", 7: "inverted", 8: "without unique_id", 9: "no size", 10: "says 1352x64"}.items():
        assert any(f"901-001_{t}.xml" in line and reason in line for line in text.splitlines()), (t, text)
    assert "no XML for 1 frame, first 11" in text


def test_both_names_of_the_annotation_folder(tmp_path):
    write_realcolon(tmp_path, "901-001", [scene()], [(0, "p", 1, 2, 30, 40)])
    (tmp_path/"901-001_annotations").rename(tmp_path/"901-001_annotation")
    assert len(open_source(tmp_path)["901-001"].annotations) == 1
    shutil.rmtree(tmp_path/"901-001_annotation")
    video = open_source(tmp_path)["901-001"]
    assert not video.has_annotations and len(video.annotations) == 0 and list(video.annotations.columns) == ["frame", "identity", "x0", "y0", "x1", "y1"]


def test_masks(tmp_path):
    write_realcolon(tmp_path, "901-001", [scene(i) for i in range(3)])
    (tmp_path/"901-001_masks").mkdir()
    mask = np.zeros((64, 96), np.uint8)
    mask[10:20, 30:50] = 2
    Image.fromarray(mask).save(tmp_path/"901-001_masks/901-001_1.png")
    video = open_source(tmp_path)["901-001"]
    assert (video.mask(1) == mask).all() and video.mask(0) is None


# ---- REAL-Colon

def test_the_official_split():
    split = real_colon_split()
    assert {k: len(v) for k, v in split.items()} == dict(train=41, test=19, no_polyp=14)
    assert not set(split["train"]) & set(split["test"]) and set(split["no_polyp"]) < set(split["train"])
    everything = set(split["train"]) | set(split["test"])
    assert everything == {f"{c:03d}-{n:03d}" for c in range(1, 5) for n in range(1, 16)}
    with_polyps = set(split["train"]) - set(split["no_polyp"])
    assert len(with_polyps) == 27 and all(int(n[-3:]) <= 8 for n in with_polyps) and all(int(n[-3:]) >= 9 for n in split["test"])
    assert [sum(n.startswith(f"00{c}") for n in split["train"]) for c in (1, 2, 3, 4)] == [12, 11, 9, 9]


def test_splits_only_for_official_names(tmp_path):
    for n in ("001-001", "001-009", "004-010"): write_realcolon(tmp_path/"a", n, [scene()])
    assert open_source(tmp_path/"a").splits == dict(train=["001-001", "004-010"], test=["001-009"])
    assert [v.name for v in open_source(tmp_path/"a", split="test")] == ["001-009"]
    write_realcolon(tmp_path/"a", "901-001", [scene()])
    assert open_source(tmp_path/"a").splits == {}
    with pytest.raises(InputError, match="has no split 'test': it has none"): open_source(tmp_path/"a", split="test")


def test_real_colon_frames_are_sorted_by_integer_and_the_table_is_believed_where_it_can_be(tmp_path):
    write_realcolon(tmp_path, "901-002", {t: scene(t) for t in (0, 2, 10, 9, 100)}, fps="29.97")
    write_realcolon(tmp_path, "901-001", [scene()], fps="unknown")
    source = open_source(tmp_path)
    assert source["901-002"].frames.tolist() == [0, 2, 9, 10, 100] and source["901-002"].fps == 29.97 and source["901-001"].fps == 25
    assert any("no frame rate for 1 video, first 901-001: 25" in p["problem"] for p in source.problems)
    assert np.allclose(source["901-002"].time([0, 100]), [0, 100/29.97])


def test_every_problem_is_named(tmp_path):
    write_realcolon(tmp_path, "901-001", {t: scene(t) for t in [*range(10), *range(15, 30)]}, [(t, "901-001_1", 5, 5, 40, 40) for t in range(5)])
    write_realcolon(tmp_path, "901-002", [scene(t) for t in range(5)])
    (tmp_path/"901-003_frames").mkdir()
    (tmp_path/"901-004_frames.tar.gz").write_bytes(b"x")
    Image.fromarray(scene(0, (48, 32))).save(tmp_path/"901-001_frames/901-001_20.jpg")
    (tmp_path/"901-001_frames/901-001_21.jpg").write_bytes(b"\xff\xd8\xff")
    (tmp_path/"901-001_annotations/901-001_77.xml").write_text(voc((96, 64)))
    info = (tmp_path/"video_info.csv").read_text().replace("25,25,1,8", "25,24,2,8") + "901-009,60,f,Olympus,25,1,0,8\n"
    (tmp_path/"video_info.csv").write_text(info)
    text = problems(open_source(tmp_path))
    for part in ("1 gap in the frame numbers (5 frames missing), the first between 9 and 15", "frames differ in size: 96x64 (first at frame 0), 48x32 (first at frame 20)",
                 "901-001_21.jpg: cannot be read", "no image for 1 XML file, first 901-001_77.xml", "says num_frames=24 for 901-001, found 25", "says num_lesions=2 for 901-001, found 1",
                 "901-003_frames: holds no image", "901-004_frames.tar.gz: is packed, left out: unpack it (tar xzf 901-004_frames.tar.gz)", "lists 1 video without frames here, first 901-009"):
        assert part in text, (part, text)


def test_a_clean_source_has_no_problem(tmp_path):
    for n in ("901-001", "901-002"): write_realcolon(tmp_path, n, [scene(t) for t in range(12)], [(t, f"{n}_1", 5, 5, 40, 40) for t in range(3, 9)])
    assert check_source(open_source(tmp_path)) == (24, [])


def test_a_check_of_a_large_source_samples_and_says_so(tmp_path):
    write_realcolon(tmp_path, "901-001", [scene(t) for t in range(40)])
    decoded, found = check_source(open_source(tmp_path), limit=10)
    assert decoded == 10 and "only 10 of 40 frames were decoded" in found[-1]["problem"]
    assert check_source(open_source(tmp_path), limit=None) == (40, [])


def test_dirty_tables(tmp_path):
    write_realcolon(tmp_path, "901-001", [scene()])
    for content in (b"", b"\xff\xfe\x00", b"a,b\n1,2\n", b"unique_video_name\n901-001\n", b"unique_video_name,fps\n901-001\n"):
        (tmp_path/"video_info.csv").write_bytes(content)
        source = open_source(tmp_path)
        assert source["901-001"].fps == 25 and check_source(source)


# ---- COCO

def coco(folder, splits, names=None, size=(96, 64)):
    "splits: {name: {sequence: n frames}}; the first half of each has a box"
    (folder/"images").mkdir(parents=True)
    (folder/"annotations").mkdir()
    for split, sequences in splits.items():
        images, annotations = [], []
        for s, n in sequences.items():
            for t in range(n):
                i = len(images)
                name = f"{s}_{t}.jpg"
                Image.fromarray(scene(t, size)).save(folder/"images"/name)
                images.append(dict(id=i, file_name=name, width=size[0], height=size[1], frame_id=t, sequence_id=s))
                if t < n//2: annotations.append(dict(id=i, image_id=i, bbox=[5 + t, 6, 20, 30], identity_id=f"{s}_1", category_id=1))
        (folder/f"annotations/instances_{split}.json").write_text(json.dumps(dict(images=images, annotations=annotations, categories=[])))
    return folder


def test_coco_layout(tmp_path):
    source = open_source(coco(tmp_path/"c", dict(train={"001-001": 12, "001-003": 4}, test={"001-009": 6})))
    assert source.kind == "coco" and source.splits == dict(train=["001-001", "001-003"], test=["001-009"]) and len(source) == 3
    video = source["001-001"]
    assert video.frames.tolist() == list(range(12)) and video.size == (96, 64)
    assert [tuple(r) for r in video.annotations.itertuples(index=False)] == [(t, "001-001_1", 5 + t, 6, 25 + t, 36) for t in range(6)]
    assert (video.read([3])[0] == read_image(tmp_path/"c/images/001-001_3.jpg")).all()
    assert check_source(source)[1] == [p for p in source.problems if "frame rate" in p["problem"]]


def test_coco_without_the_extra_fields(tmp_path):
    path = coco(tmp_path/"c", dict(val={"001-001": 6}))/"annotations/instances_val.json"
    data = json.loads(path.read_text())
    for im in data["images"]: del im["frame_id"], im["sequence_id"]
    del data["annotations"][0]["identity_id"]
    path.write_text(json.dumps(data))
    source = open_source(tmp_path/"c")
    assert source["001-001"].frames.tolist() == list(range(6)) and source["001-001"].annotations.frame.tolist() == [1, 2]
    assert "an identity_id, left out" in problems(source)
    data["annotations"] += [3, dict(image_id=0), dict(image_id="?", bbox=[1, 2, 3, 4], identity_id="x"), dict(image_id=1, bbox=[1, 2, 3], identity_id="x")]
    path.write_text(json.dumps(data))
    assert sum(p["problem"].count("left out") for p in check_source(open_source(tmp_path/"c"))[1]) == 1       # five of a kind: one line with the count


def test_coco_does_not_read_outside_its_folder(tmp_path):
    "`..`, absolute names and links in file_name lead nowhere"
    secret = tmp_path/"secret.jpg"
    Image.fromarray(scene()).save(secret)
    path = coco(tmp_path/"c", dict(train={"001-001": 8}))/"annotations/instances_train.json"
    data = json.loads(path.read_text())
    data["images"][1]["file_name"] = "../../secret.jpg"
    data["images"][2]["file_name"] = str(secret)
    data["images"][3]["file_name"] = "x/../../../secret.jpg"
    link, way = tmp_path/"c/images/001-001_4.jpg", tmp_path/"c/images/way"
    link.unlink()
    link.symlink_to(secret)
    way.symlink_to(tmp_path)
    data["images"][5]["file_name"] = "way/secret.jpg"
    data["images"][6]["file_name"] = "gone_6.jpg"
    path.write_text(json.dumps(data))
    source = open_source(tmp_path/"c")
    video = source["001-001"]
    assert video.frames.tolist() == [0, 4, 5, 7]
    assert len(video.read(video.frames)) == 2 and set(video.broken) == {4, 5} and all("outside" in why for why in video.broken.values())
    assert sum("leads out of images/" in p["problem"] for p in source.problems) == 3 and any("no such image" in p["problem"] for p in source.problems)


@pytest.mark.parametrize("content, match", [("{", "not valid JSON"), ("[]", "no COCO file"), ('{"images": 3, "annotations": []}', "no COCO file"), ('{"images": [], "annotations": []}', "lists no image"),
                                            ("["*100_000, "not valid JSON")])
def test_coco_files_that_are_none(tmp_path, content, match):
    coco(tmp_path/"c", dict(train={"001-001": 1}))
    (tmp_path/"c/annotations/instances_train.json").write_text(content)
    with pytest.raises(InputError, match=match): open_source(tmp_path/"c")


@few
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(
    ["file_name", "frame_id", "sequence_id", "id", "image_id", "bbox", "identity_id"]), x, max_size=7), max_leaves=12), st.sampled_from(["images", "annotations"]))
def test_any_entry_in_a_coco_file_is_survived(tmp_path_factory, entry, where):
    folder = coco(tmp_path_factory.mktemp("c")/"c", dict(train={"001-001": 4}))
    path = folder/"annotations/instances_train.json"
    data = json.loads(path.read_text())
    data[where].append(entry)
    path.write_text(json.dumps(data))
    source = open_source(folder)
    assert source["001-001"].frames.tolist()[:4] == [0, 1, 2, 3] and len(source["001-001"].annotations) >= 2
    check_source(source)


def test_coco_without_images(tmp_path):
    coco(tmp_path/"c", dict(train={"001-001": 1}))
    shutil.rmtree(tmp_path/"c/images")
    with pytest.raises(InputError, match="no folder images/"): open_source(tmp_path/"c")


# ---- what lies there?

def test_nothing_and_mixtures(tmp_path, clip_images):
    for name in ("empty", "text", "packed"): (tmp_path/name).mkdir()
    (tmp_path/"text/a.txt").write_text("x")
    (tmp_path/"packed/001-001_frames.tar.gz").write_bytes(b"x")
    with pytest.raises(InputError, match="missing does not exist"): open_source(tmp_path/"missing")
    with pytest.raises(InputError, match="empty holds no video: expected"): open_source(tmp_path/"empty")
    with pytest.raises(InputError, match="text holds no video: expected"): open_source(tmp_path/"text")
    with pytest.raises(InputError, match="unpack it first"): open_source(tmp_path/"packed")
    with pytest.raises(InputError, match="is packed: unpack it"): open_source(tmp_path/"packed/001-001_frames.tar.gz")
    parts = {"video": lambda p: write_video(p/"a.mp4", clip_images[:3]), "loose": lambda p: Image.fromarray(scene()).save(p/"1.png"), "frames": lambda p: frame_folder(p/"clip"),
             "realcolon": lambda p: write_realcolon(p, "901-001", [scene()]), "coco": lambda p: coco(p, dict(train={"001-001": 2}))}
    for i, a in enumerate(parts):
        for b in list(parts)[i + 1:]:
            if "coco" in (a, b): folder = tmp_path/f"{a}_{b}"; parts["coco"](folder); parts[a](folder)
            else: folder = tmp_path/f"{a}_{b}"; folder.mkdir(); parts[a](folder); parts[b](folder)
            with pytest.raises(InputError, match="mixes layouts.*folder of its own"): open_source(folder)
    with pytest.raises(InputError, match="is one image"): open_source(tmp_path/"video_loose/1.png")


def test_folders_of_frames(tmp_path):
    frame_folder(tmp_path/"many/b10", 3), frame_folder(tmp_path/"many/b9", 4), (tmp_path/"many/notes").mkdir(), (tmp_path/"many/.cache").mkdir()
    source = open_source(tmp_path/"many")
    assert source.kind == "frames" and [(v.name, v.n_frames) for v in source] == [("b9", 4), ("b10", 3)] and source.splits == {}
    one = open_source(tmp_path/"many/b9")
    assert [v.name for v in one] == ["b9"] and one["b9"].fps == 25 and any("25 frames a second are assumed" in p["problem"] for p in one.problems)
    with pytest.raises(InputError, match="has no video 'x': it has b9, b10"): source["x"]
    assert [v.name for v in source.subset(["b10"])] == ["b10"] and "b9" in source and len(list(source)) == len(source) == 2


def test_a_folder_without_any_readable_frame(tmp_path):
    (tmp_path/"v").mkdir()
    for i in range(3): (tmp_path/f"v/{i}.jpg").write_bytes(b"x")
    source = open_source(tmp_path/"v")
    with pytest.raises(InputError, match="none of its frames can be read"): source.videos[0].size
    assert "0.jpg: cannot be read: it is no picture" in problems(source)


def test_boxes_of_a_video_that_cannot_be_read(tmp_path):
    write_realcolon(tmp_path, "901-001", [scene()]*3, [(0, "p", 5, 5, 40, 40)])
    for t in range(3): (tmp_path/f"901-001_frames/901-001_{t}.jpg").write_bytes(b"")
    source = open_source(tmp_path)
    assert len(source["901-001"].annotations) == 0 and "its boxes are left out, since none of its frames can be read" in problems(source)


def test_training_never_touches_annotations(tmp_path):
    "Opening, listing and reading open no annotation file, no mask and no frame that was not asked for"
    write_realcolon(tmp_path, "901-001", [scene(t) for t in range(40)], [(t, "p", 5, 5, 40, 40) for t in range(40)])
    with watch(tmp_path) as opened:
        source = open_source(tmp_path)
        table = make_tracklets(source)
        clip = source["901-001"].read(tracklet_frames(table.iloc[0]), box=[0, 0, 50, 50], size=16)
    assert clip.shape == (8, 16, 16, 3)
    assert {int(p.split("_")[-1][:-4]) for p in opened if p.endswith(".jpg")} == set(range(0, 32, 4))
    assert not [p for p in opened if any(word in p for word in ("annotation", "mask", "lesion"))]
    with watch(tmp_path) as opened: assert len(source["901-001"].annotations) == 40
    assert [p for p in opened if "annotation" in p]


def test_real_boxes_in_the_real_colon_layout(shared_data, tmp_path):
    images, boxes = ldpolyp(shared_data)
    images = {t: im[::4, ::4] for t, im in images.items()}
    source = open_source(write_realcolon(tmp_path, "101-001", images, [(t, "101-001_1", *(x/4 for x in b)) for t, _, *b in boxes]))
    table = source["101-001"].annotations
    assert len(table) == len(boxes) == 161 and source["101-001"].n_frames == 181 and source["101-001"].size == (140, 120)
    assert np.allclose(table[["x0", "y0", "x1", "y1"]], np.array([b[2:] for b in boxes])/4)
    assert check_source(source) == (181, [])


@pytest.mark.parametrize("names, order", [(["a10", "a9", "a1"], ["a1", "a9", "a10"]), (["B2", "a1", "b1"], ["a1", "b1", "B2"]), (["1", "01x", "a"], ["1", "01x", "a"]), (["²", "x"], ["x", "²"])])
def test_natural_order(names, order): assert sorted(names, key=natural_key) == order
