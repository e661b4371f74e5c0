"""The search: what queries mean, which frames and vectors they become, what is written"""
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from freerep.core import InputError
from freerep.encoder import SMALL, create_encoder, encode
from freerep.index import Index, embed
from freerep.pretraining import PretrainConfig, pretrain
from freerep.search import (ImageQuery, IndexVideos, RowQuery, Searcher, SpanQuery, overlapping, parse_box, parse_query, query_embedding,
                            same_polyp, search_index, span_row)
from freerep.sources import Video, open_source, read_image
from freerep.tracklets import tracklet_frames
from freerep.views import BoxCrop, to_batch
from helpers import scene, write_realcolon, write_video
from test_report import Reader

SETTINGS = PretrainConfig(preset="tiny", size=32, length=4, stride=2)


class Untrained:
    "As much of a run as an index needs; two of them have the same weights"
    path, config = "", SETTINGS
    def encoder(self): return create_encoder(weights="random", seed=3, **SMALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    "A folder of two real video files, and a raw index of them"
    folder = tmp_path_factory.mktemp("search")/"videos"
    folder.mkdir()
    for i, name in enumerate(("one.mp4", "two.mp4")): write_video(folder/name, [scene(3*t, seed=i) for t in range(40)], fps=20)
    index = embed(folder, Untrained())
    return SimpleNamespace(path=folder, index=Index(index.embeddings, index.table), run=Untrained())


def vector(image_list): return encode(Untrained().encoder(), *to_batch([np.stack(image_list)], .45, .225))[0].numpy()


# ---- what is typed

@given(st.one_of(
    st.builds(lambda v, s, d: SpanQuery(v, s, None if d is None else s + d), st.text(min_size=1), st.floats(0, 1e5), st.none() | st.floats(1e-3, 1e5)),
    st.builds(lambda v, s, d: SpanQuery(v, s, None if d is None else s + d, "f"), st.text(min_size=1), st.integers(0, 10**9), st.none() | st.integers(1, 10**6))))
@settings(max_examples=200, deadline=None)
def test_a_query_survives_its_text(query): assert parse_query(str(query)) == query


@pytest.mark.parametrize("text,query", [
    ("0", RowQuery(0)), (7, RowQuery(7)), ("a.mp4@.5", SpanQuery("a.mp4", .5)), ("a.mp4@1.:2", SpanQuery("a.mp4", 1, 2)), ("me@home/a.mp4@f3:f9", SpanQuery("me@home/a.mp4", 3, 9, "f")),
    ("C:\\v\\a.mp4@1:2", SpanQuery("C:\\v\\a.mp4", 1, 2)), ("a@1@2", SpanQuery("a@1", 2))])
def test_forms(text, query): assert parse_query(text) == query


@pytest.mark.parametrize("text,why", [
    ("", "expected a row number"), ("-1", "expected a row number"), ("1.5", "expected a row number"), ("a.mp4", "expected a row number"), ("a.mp4@", "expected a row number"),
    ("@1", "expected a row number"), ("a.mp4@-1", "expected a row number"), ("a.mp4@1:2:3", "ends before|expected|mixes|a.mp4@1"), ("a.mp4@f1.5", "expected a row number"), ("a.mp4@1e3", "expected a row number"),
    ("a.mp4@nan", "expected a row number"), ("a.mp4@2:2", "ends before"), ("a.mp4@f9:f3", "ends before"), ("a.mp4@f1:2", "mixes"), ("a.mp4@1:f2", "mixes")])
def test_what_is_no_query(text, why):
    with pytest.raises(InputError, match=why): parse_query(text)


@pytest.mark.parametrize("box,want", [(None, None), ("1,2,3,4", (1, 2, 3, 4)), (" 1.5, 2,3 ,4", (1.5, 2, 3, 4)), (np.array([1, 2, 3, 4]), (1, 2, 3, 4))])
def test_boxes(box, want): assert parse_box(box) == want


@pytest.mark.parametrize("box", ["", "1,2,3", "1,2,3,4,5", "a,b,c,d", "3,2,1,4", "1,4,3,2", "1,2,1,4", "nan,2,3,4", "1,2,inf,4", 7, (1, 2)])
def test_what_is_no_box(box):
    with pytest.raises(InputError, match="expected"): parse_box(box)


# ---- from time to frames

class Film(Video):
    "Frames at irregular times, some frame numbers missing"
    def __init__(self, seed):
        super().__init__("film", "film", fps=20)
        g = np.random.default_rng(seed)
        self.frames = np.sort(g.choice(100, 60, replace=False))
        self.at = np.r_[0, np.cumsum(g.uniform(.01, .09, 100))]
        self.size = (64, 48)
    def time(self, frame): return self.at[frame] if np.ndim(frame) else float(self.at[frame])


@pytest.mark.parametrize("seed", range(8))
def test_spans_against_a_loop(seed):
    film, g = Film(seed), np.random.default_rng(seed)
    for _ in range(30):
        start, end = np.sort(g.uniform(film.at[film.frames[0]], film.at[film.frames[-1]], 2))
        stride = int(g.integers(1, 4))
        inside = [f for f in film.frames if start <= film.at[f] < end]
        query = SpanQuery("film", start, end)
        want = [f for f in film.frames if inside and inside[0] <= f <= inside[-1] and (f - inside[0]) % stride == 0]
        if not want:
            with pytest.raises(InputError, match="no frame"): span_row(query, film, stride=stride)
            continue
        row = span_row(query, film, stride=stride)
        got = [f for f in tracklet_frames(row) if f in film.frames]
        assert got == want and row.start_s == film.at[got[0]] and row.end_s == film.at[got[-1]] + 1/20


@pytest.mark.parametrize("query", ["film@f20:f31", "film@f20"])
def test_spans_in_frames(query):
    video = Video("film", "film", fps=25)
    video.frames = np.arange(10, 60)
    row = span_row(parse_query(query), video, length=3, stride=5)
    assert tracklet_frames(row).tolist() == [20, 25, 30] and (row.start_s, row.end_s) == (.8, 1.24)


@pytest.mark.parametrize("text,why", [("f9:f20", "frames 10 to 59"), ("f20:f61", "frames 10 to 59"), ("f60", "frames 10 to 59|no frame"), ("f50", "start earlier"), ("2.5", "lasts 2.40"), ("1:9", "lasts 2.40"), ("0:.3", "no frame")])
def test_times_that_the_video_does_not_have(text, why):
    video = Video("film", "film", fps=25)
    video.frames = np.arange(10, 60)
    with pytest.raises(InputError, match=why): span_row(parse_query(f"film@{text}"), video, length=3, stride=5)


def test_the_end_of_the_video_may_be_named():
    video = Video("film", "film", fps=25)
    video.frames = np.arange(50)
    for text in ("1:2", "1:2.0", "f25:f50"): assert span_row(parse_query(f"film@{text}"), video, stride=1).end_frame == 50
    assert span_row(parse_query("film@f46"), video, length=4, stride=1).end_frame == 50


# ---- which video

def test_names_stems_and_paths_find_the_same_video(place, monkeypatch, tmp_path):
    videos = IndexVideos(place.index.table)
    (tmp_path/"link.mp4").symlink_to(place.path/"two.mp4")
    monkeypatch.chdir(place.path.parent)
    for name in ("two.mp4", "two", str(place.path/"two.mp4"), "videos/two.mp4", "./videos/../videos/two.mp4", str(tmp_path/"link.mp4"), "/no/longer/there/two.mp4"):
        key, video = videos.find(name)
        assert key == (str(place.path), "two.mp4") and video.path.resolve() == (place.path/"two.mp4").resolve(), name
    with pytest.raises(InputError, match="there is no video 'three': .*one.mp4, two.mp4"): videos.find("three")
    with pytest.raises(InputError, match="holds 2 videos"): videos.find(str(place.path))


def test_a_name_in_two_sources_needs_a_path(place, tmp_path):
    write_video(tmp_path/"one.mp4", [scene(t) for t in range(9)])
    table = pd.concat([place.index.table, place.index.table.assign(source=str(tmp_path))])
    videos = IndexVideos(table[table.video == "one.mp4"])
    with pytest.raises(InputError, match="give its path"): videos.find("one")
    assert videos.find(str(tmp_path/"one.mp4"))[1].n_frames == 9 and videos.find(str(place.path/"one.mp4"))[1].n_frames == 40


def test_a_video_the_index_has_never_seen_is_a_query_too(place, tmp_path):
    write_video(tmp_path/"new.mp4", [scene(3*t, seed=1) for t in range(40)], fps=20)      # the same pictures as two.mp4
    hits = search_index(place.index, f"{tmp_path/'new.mp4'}@f8:f16", run=place.run, top=99)
    assert len(hits) == len(place.index)                                                  # none of its rows is the query itself
    assert (hits.video[0], hits.start_frame[0]) == ("two.mp4", 8) and hits.score[0] == pytest.approx(1, abs=1e-5)


def test_a_moved_video_is_still_itself(place, tmp_path):
    "The index's own source is gone; the video is given by its path: its rows are not hits"
    table = place.index.table.assign(source="/gone")
    index = Index(place.index.embeddings, table)
    hits = search_index(index, f"{place.path/'two.mp4'}@f0:f8", run=place.run, top=99)
    assert len(hits) == len(index) - 1 and not ((hits.video == "two.mp4") & (hits.start_frame == 0)).any()


# ---- vectors

def test_a_query_of_the_frames_of_a_row_has_its_vector(place):
    searcher = Searcher(place.index, run=place.run)
    for r in place.index.table.itertuples():
        for text in (f"{r.video}@f{r.start_frame}", f"{r.video}@f{r.start_frame}:f{r.end_frame}", f"{r.video}@{r.start_s}", f"{r.video}@{r.start_s}:{r.end_s}"):
            shot, = query_embedding(text, searcher)
            assert tracklet_frames(shot.row).tolist() == tracklet_frames(r).tolist()
            assert shot.vector @ place.index[r.row] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("box", [None, (40, 20, 52, 34)])
def test_images_and_spans_against_the_plain_way(place, tmp_path, box):
    image = scene(5)
    Image.fromarray(image).save(tmp_path/"q.png")
    crop = None if box is None else BoxCrop(5)((96, 64), 1, boxes=[box])[0]
    searcher = Searcher(place.index, run=place.run)
    shot, = query_embedding(str(tmp_path/"q.png"), searcher, box=box)
    np.testing.assert_allclose(shot.vector, vector([read_image(tmp_path/"q.png", box=crop, size=32)]), atol=1e-5)
    assert shot.row is None
    shot, = query_embedding("one@f10:f20", searcher, box=box)
    np.testing.assert_allclose(shot.vector, vector(open_source(place.path)["one.mp4"].read([10, 12, 14, 16, 18], box=crop, size=32)), atol=1e-5)


def test_a_long_span_goes_through_in_pieces(place, tmp_path):
    write_video(tmp_path/"long.mp4", [scene(t) for t in range(150)], fps=20)
    searcher = Searcher(place.index, run=place.run)
    shot, = query_embedding(f"{tmp_path/'long.mp4'}@f0:f150", searcher)
    np.testing.assert_allclose(shot.vector, vector(open_source(tmp_path/"long.mp4").videos[0].read(np.arange(0, 150, 2), size=32)), atol=1e-5)


def test_images_as_a_viewer_shows_them(place, shared_data):
    for path in sorted((shared_data/"odd-images").iterdir()):
        try: good = read_image(path) is not None
        except InputError: good = False
        if good: assert len(search_index(place.index, str(path), run=place.run, top=2)) == 2
        else:
            with pytest.raises(InputError, match=path.name): search_index(place.index, str(path), run=place.run)


# ---- hits

def brute(index, vectors, drop, top):
    scores = (index.embeddings.astype(float) @ np.stack(vectors).astype(float).T).max(1)
    rows = [r for r in np.argsort(-scores, kind="stable") if r not in drop][:top]
    return rows, scores[rows]


def random_index(seed, n=60):
    g = np.random.default_rng(seed)
    start = g.integers(0, 300, n)
    table = pd.DataFrame(dict(row=range(n), source=g.choice(["a", "b"], n), video=g.choice(["v", "w"], n), start_frame=start, end_frame=start + g.integers(1, 60, n), stride=1, fps=25.,
                              start_s=start/25, end_s=start/25 + 1, identity=g.choice(["", "p", "q"], n), x0=np.nan, y0=np.nan, x1=np.nan, y1=np.nan, note="x"))
    return Index(g.normal(size=(n, 8)), table)


@pytest.mark.parametrize("seed", range(10))
def test_hits_against_a_loop(seed):
    index, g = random_index(seed), np.random.default_rng(seed)
    queries = g.choice(60, 1 + seed % 4, replace=False).tolist()
    t = index.table
    drop = {r.row for r in t.itertuples() for q in t.iloc[queries].itertuples()
            if r.source == q.source and r.video == q.video and set(range(r.start_frame, r.end_frame)) & set(range(q.start_frame, q.end_frame))}
    rows, scores = brute(index, index.embeddings[queries], drop, 20)
    hits = search_index(index, queries, top=20)
    assert hits.row.tolist() == rows and set(queries) <= drop
    np.testing.assert_allclose(hits.score, scores, atol=1e-6)
    assert np.flatnonzero(overlapping(t, t.iloc[queries].itertuples())).tolist() == sorted(drop)
    assert hits.columns.tolist() == ["rank", "row", "score", "video", "start_s", "end_s"] + [c for c in t if c not in ("row", "video", "start_s", "end_s")]
    assert hits["rank"].tolist() == list(range(1, len(hits) + 1))


def test_more_hits_than_rows_and_none_at_all():
    index = random_index(0, n=3)
    assert len(search_index(index, 0, top=99)) <= 2
    lonely = Index(index.embeddings[:1], index.table[:1])
    assert len(search_index(lonely, 0)) == 0
    with pytest.raises(InputError, match="at least one"): search_index(index, 0, top=0)


def test_same_polyp_is_known_or_missing():
    assert [x if x is not pd.NA else None for x in same_polyp("p", ["p", "q", ""])] == [True, False, None]
    assert same_polyp("", ["p", ""]).isna().all()


# ---- what is written

def test_folder_of_a_search(place, tmp_path):
    place.index.save(tmp_path/"index")
    hits = search_index(tmp_path/"index", ["two.mp4@0.5:1.0", "one@f8"], run=place.run, top=4, out=tmp_path/"out")
    assert sorted(p.name for p in (tmp_path/"out").iterdir()) == [".freerep", "hits.csv", "report.html"]
    written = pd.read_csv(tmp_path/"out"/"hits.csv", keep_default_na=False)
    assert written.columns[:6].tolist() == ["rank", "row", "score", "video", "start_s", "end_s"] and written.row.tolist() == hits.row.tolist()
    np.testing.assert_allclose(written.start_s, written.start_frame/20, atol=1e-6)
    np.testing.assert_allclose(written.end_s, (written.start_frame + 3*2 + 1)/20, atol=1e-6)     # four frames at stride two, the last one lasts 1/20 s
    page = (tmp_path/"out"/"report.html").read_text()
    reader = Reader(page)
    assert reader.tags.count("img") == 2 + 4 and all(a.startswith("data:image/jpeg") for k, a in reader.attrs if k == "src") and "script" not in reader.tags
    text = "".join(reader.text)
    for h in hits.itertuples(): assert f"{h.rank}. score {h.score:.3f}: {h.video}, 00:{h.start_s:04.1f} to 00:" in text
    assert "two.mp4@0.5:1" in text and "missing" not in text
    with pytest.raises(InputError, match="exists already"): search_index(tmp_path/"index", 0, out=tmp_path/"out")
    search_index(tmp_path/"index", 0, top=1, out=tmp_path/"out", force=True)
    assert len(pd.read_csv(tmp_path/"out"/"hits.csv")) == 1


def test_without_the_videos_the_answer_is_the_same(place, tmp_path):
    gone = Index(place.index.embeddings, place.index.table.assign(source="/unplugged", identity="<b>p</b>"))
    hits = search_index(gone, 3, top=4, out=tmp_path/"out")
    assert hits.row.tolist() == search_index(place.index, 3, top=4).row.tolist() == pd.read_csv(tmp_path/"out"/"hits.csv").row.tolist()
    reader = Reader((tmp_path/"out"/"report.html").read_text())
    text = "".join(reader.text)
    assert "img" not in reader.tags and "b" not in reader.tags and "5 pictures are missing" in text and "/unplugged does not exist" in text and "<b>p</b> (the query's)" in text


def test_broken_frames_cost_a_strip_and_not_the_search(tmp_path):
    write_realcolon(tmp_path/"s", "901-001", [scene(4*t) for t in range(24)])
    index = embed(tmp_path/"s", Untrained())
    for t in range(8): (tmp_path/"s"/"901-001_frames"/f"901-001_{t}.jpg").write_bytes(b"\xff\xd8\xff broken")
    search_index(index, 2, top=2, out=tmp_path/"out")
    reader = Reader((tmp_path/"out"/"report.html").read_text())
    assert reader.tags.count("img") == 2 and "1 pictures are missing" in "".join(reader.text)
    with pytest.raises(InputError, match="none of its frames can be read"): search_index(index, "901-001@f0:f8", run=Untrained(), out=tmp_path/"never")
    np.testing.assert_allclose(query_embedding("901-001@f6:f12", Searcher(index, run=Untrained()))[0].vector,
                               vector(open_source(tmp_path/"s").videos[0].read([8, 10], size=32)), atol=1e-5)     # frame 6 is broken, the others count
    assert not (tmp_path/"never").exists()


FAULTS = [
    (dict(queries=[]), "no query"), (dict(queries="99"), "row 99 does not exist: the index has rows 0 to 9"), (dict(queries="nine"), "expected a row number"),
    (dict(queries="three.mp4@1"), "no video 'three.mp4'"), (dict(queries="one@5"), "lasts 2.00 s"), (dict(queries="one@1.9"), "start earlier"),
    (dict(queries=["0", "one@1.91:1.92"]), "no frame"), (dict(queries="0", box="1,2,3,4"), "embedded already"), (dict(queries="one@0:1", box="90,0,97,10"), "90,0,97,10 does not lie in one.mp4 of 96x64"),
    (dict(queries="one@0:1", box="-1,0,9,10"), "does not lie in"), (dict(queries="one@0:1", box="1,2,3"), "four numbers"), (dict(queries="{path}/one.mp4"), "say when"),
    (dict(queries="{path}/../note.txt"), "note.txt cannot be read"), (dict(queries="one@0:1", run="/nowhere"), "/nowhere.*--run"), (dict(queries="one@0:1", run=None), "--run")]


@pytest.mark.parametrize("given,why", FAULTS)
def test_faults_leave_nothing_behind(place, tmp_path, given, why):
    (place.path.parent/"note.txt").write_text("no picture")
    given = {"run": place.run} | {k: v.format(path=place.path) if k == "queries" and isinstance(v, str) else v for k, v in given.items()}
    queries = given.pop("queries")
    with pytest.raises(InputError, match=why): search_index(place.index, queries, out=tmp_path/"out", **given)
    assert not any(tmp_path.iterdir())


def test_an_encoder_of_another_width_is_named_as_the_reason(place):
    with pytest.raises(InputError, match="made by another encoder"): search_index(Index(place.index.embeddings[:, :16], place.index.table), "one@0:1", run=place.run)


def test_a_run_on_disk_is_found_and_may_move(tmp_path):
    write_realcolon(tmp_path/"s", "901-001", [scene(4*t) for t in range(64)])
    cfg = PretrainConfig(preset="tiny", steps=1, size=32, stride=2, length=4, bags=2, kappa=2, workers=0)
    index = embed(tmp_path/"s", pretrain(open_source(tmp_path/"s"), cfg, out=tmp_path/"run"))
    index.save(tmp_path/"index")
    first = search_index(tmp_path/"index", "901-001@f0:f8", top=3)
    assert first.row.tolist() == search_index(index, 0, top=3).row.tolist()
    (tmp_path/"run").rename(tmp_path/"moved")
    with pytest.raises(InputError, match="--run"): search_index(tmp_path/"index", "901-001@f0:f8", top=3)
    pd.testing.assert_frame_equal(search_index(tmp_path/"index", "901-001@f0:f8", top=3, run=tmp_path/"moved"), first)


# ---- a real video

def test_the_real_clip(shared_data, tmp_path):
    clip = shared_data/"ldpolypvideo"/"video_101.mp4"
    run = Untrained()
    run.config = PretrainConfig(preset="tiny", size=32, stride=4)
    index = embed(clip, run)
    for i, name in enumerate(("video_101.mp4", "video_101", str(clip))):
        search_index(index, f"{name}@1.0:2.0", run=run, top=10, out=tmp_path/str(i))
        written = pd.read_csv(tmp_path/str(i)/"hits.csv")
        np.testing.assert_allclose(written.start_s, written.start_frame/25, atol=1e-6)
        np.testing.assert_allclose(written.end_s, (written.start_frame + 29)/25, atol=1e-6)
        assert set(written.start_frame) == {64, 96, 128}         # 0 to 31 and 32 to 63 share frames with 25 to 49
    assert Reader((tmp_path/"0"/"report.html").read_text()).tags.count("img") == 4
