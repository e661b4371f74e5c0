"""The explorer without a browser: what is asked, what is shown, what a click changes"""
import io

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from freerep.core import InputError
from freerep.explore import ExplorerState, RetrievalExplorer, Strips, blank_strip, explorer_figure, row_label
from freerep.index import Index
from freerep.search import overlapping
from helpers import scene, write_realcolon
from test_report import Reader


def table(source, videos=("901-001", "901-002"), each=6, polyps=("p", "q", "")):
    "Tracklets of four frames one after the other in each video"
    start = np.tile(4*np.arange(each), len(videos))
    n = len(start)
    return pd.DataFrame(dict(row=range(n), source=str(source), video=np.repeat(videos, each), start_frame=start, end_frame=start + 4, stride=1, fps=25., start_s=start/25, end_s=(start + 4)/25,
                             identity=[polyps[i % len(polyps)] for i in range(n)], x0=np.nan, y0=np.nan, x1=np.nan, y1=np.nan))


def random_index(seed, source="/nowhere", n=12): return Index(np.random.default_rng(seed).normal(size=(n, 8)), table(source).iloc[:n])


@pytest.fixture(scope="module")
def procedures(tmp_path_factory):
    "Two videos in which every tracklet of four frames has a grey of its own: 10 times its row"
    folder = tmp_path_factory.mktemp("explore")
    for v, name in enumerate(("901-001", "901-002")):
        write_realcolon(folder, name, [np.full((48, 64, 3), 10*(6*v + t//4), np.uint8) for t in range(24)])
    return folder


def grey(data): return float(np.median(np.asarray(Image.open(io.BytesIO(data)))))
def shown(explorer): return [h.row for h in explorer.hits if h.layout.display != "none"]


# ---- the state

@pytest.mark.parametrize("seed", range(8))
def test_hits_against_a_loop(seed):
    index, g = random_index(seed), np.random.default_rng(seed)
    state = ExplorerState(index, k=5)
    state.ask(int(g.integers(12)))
    for r in g.integers(0, 12, seed % 4): state.add(int(r))
    if seed % 2: state.only("901-002")
    t, shots = index.table, list(dict.fromkeys(state.shots))
    assert state.shots == shots and state.query == shots[0]
    score = {r: max(float(index[r] @ index[s]) for s in shots) for r in range(12) if r not in shots and (t.video[r] == "901-002" or not seed % 2)}
    hits = state.hits()
    assert hits.row.tolist() == sorted(score, key=lambda r: -score[r])[:5]
    np.testing.assert_allclose(hits.score, [score[r] for r in hits.row], atol=1e-6)
    asked = t.identity[state.query]
    for h in hits.itertuples(): assert (h.same is pd.NA) if not asked or not h.identity else h.same == (h.identity == asked)


def test_rows_that_share_frames_with_the_query_or_the_support_are_no_hits():
    t = table("/nowhere").assign(end_frame=lambda d: d.start_frame + 6)       # each reaches into the next
    state = ExplorerState(Index(np.random.default_rng(0).normal(size=(12, 8)), t), k=12)
    state.ask(2); state.add(8)
    assert sorted(set(range(12)) - set(state.hits().row)) == [1, 2, 3, 7, 8, 9]
    assert np.flatnonzero(overlapping(t, t.iloc[[2, 8]].itertuples())).tolist() == [1, 2, 3, 7, 8, 9]


def test_support_is_a_set_and_the_query_is_never_in_it_twice():
    state = ExplorerState(random_index(0))
    for r in (3, 3, 0, 5): state.add(r)
    assert state.shots == [0, 3, 5]
    state.ask(5)
    assert state.shots == [5, 3]
    state.ask(1)
    assert state.shots == [1, 3, 5]            # row 5 was chosen by the user and still supports
    state.clear()
    assert state.shots == [1]


@pytest.mark.parametrize("bad", [-1, 12, 10**9])
def test_rows_that_do_not_exist(bad):
    state = ExplorerState(random_index(0))
    for act in (state.ask, state.add):
        with pytest.raises(InputError, match="rows 0 to 11"): act(bad)
    assert state.shots == [0]


def test_unknown_video_and_empty_index():
    with pytest.raises(InputError, match="no video 'x': it has 901-001, 901-002"): ExplorerState(random_index(0)).only("x")
    with pytest.raises(InputError, match="no tracklets"): ExplorerState(Index(np.zeros((0, 4)), table("/nowhere").iloc[:0]))


def test_the_only_tracklet_of_a_video_has_no_hits_in_it():
    state = ExplorerState(random_index(0, n=7))
    state.ask(6)
    state.only("901-002")
    assert len(state.hits()) == 0 and "same" in state.hits()


# ---- strips

def test_strips_are_read_once_and_bounded(procedures, monkeypatch):
    index = random_index(0, procedures)
    strips = Strips(index, limit=3)
    for row in (4, 7, 4, 11): assert abs(grey(strips[row]) - 10*row) <= 1
    video, reads = strips.videos[0], []
    monkeypatch.setattr(type(video), "read", lambda self, *a, **k: reads.append(self.name) or pytest.fail("read again"))
    assert abs(grey(strips[np.int64(7)]) - 70) <= 1 and strips.read.cache_info().currsize == 3 and not reads


def test_missing_videos_give_a_picture_that_says_so_and_come_back(procedures, tmp_path):
    index = random_index(0, tmp_path/"disk")
    strips = Strips(index)
    assert strips[3] == Strips(index)[5] and abs(grey(strips[3]) - 120) <= 2
    (tmp_path/"disk").symlink_to(procedures)
    assert abs(grey(strips[3]) - 30) <= 1                                     # the failure was not remembered
    assert abs(grey(Strips(index, source=procedures)[9]) - 90) <= 1


def test_a_blank_strip_holds_long_and_odd_texts():
    for text in ("", "x"*2000, "zażółć \u2603 \udc80", "a\nb"): assert blank_strip(text).size == (480, 72)


def test_labels_are_escaped_and_say_what_is_known():
    rows = random_index(0).table.assign(video="<script>v</script>", identity="a&b").head(1)
    row = next(rows.itertuples())
    label = Reader(row_label(row, "query"))
    assert label.tags == ["div"] and "".join(label.text).strip() == "query \u00b7 00:00.0 to 00:00.2 \u00b7 <script>v</script> \u00b7 polyp a&b"
    for same, text in ((True, "same polyp"), (False, "another polyp"), (pd.NA, "polyp a&b")):
        hit = next(rows.assign(rank=2, score=-.25, same=pd.array([same], dtype="boolean")).itertuples())
        assert "".join(Reader(row_label(hit)).text).strip() == f"2. -0.250 \u00b7 00:00.0 to 00:00.2 \u00b7 <script>v</script> \u00b7 {text}"


# ---- the widget: its buttons and sliders are clicked from Python

def agrees(explorer):
    "Does everything on the screen show the state?"
    state, rows = explorer.state, explorer.state.hits().row.tolist()
    assert shown(explorer) == rows
    for view, row in zip(explorer.hits, rows): assert abs(grey(view.picture.value) - 10*row) <= 1
    assert abs(grey(explorer.picture.value) - 10*state.query) <= 1
    assert explorer.video.value == state.index.table.video[state.query] and state.rows_of(explorer.video.value)[explorer.position.value] == state.query
    assert [round(grey(c.children[0].value)/10) for c in explorer.support.children] == state.shots[1:]
    assert explorer.filter.value == (state.video or "") and explorer.clear.disabled == (not state.support)


def test_clicks(procedures):
    explorer = RetrievalExplorer(random_index(1, procedures), k=4)
    agrees(explorer)
    best = explorer.hits[0].row
    explorer.hits[0].ask.click()
    assert explorer.state.query == best
    agrees(explorer)
    third = explorer.hits[2].row
    explorer.hits[2].add.click()
    assert explorer.state.shots == [best, third] and third not in shown(explorer)
    agrees(explorer)
    explorer.filter.value = "901-002"
    agrees(explorer)
    explorer.video.value = next(v for v in explorer.state.videos if v != explorer.video.value)
    agrees(explorer)
    explorer.position.value = 3
    assert explorer.state.query == explorer.state.rows_of(explorer.video.value)[3]
    agrees(explorer)
    explorer.clear.click()
    explorer.filter.value = ""
    assert explorer.state.shots == [explorer.state.query]
    agrees(explorer)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_clicks(procedures, seed):
    g, explorer = np.random.default_rng(seed), RetrievalExplorer(random_index(seed, procedures), k=3)
    for _ in range(10):
        visible = [h for h in explorer.hits if h.layout.display != "none"]
        act = g.choice(["ask", "add", "clear", "video", "position", "filter"])
        if act in ("ask", "add") and visible: getattr(visible[g.integers(len(visible))], act).click()
        elif act == "clear": explorer.clear.click()
        elif act == "video": explorer.video.value = str(g.choice(explorer.state.videos))
        elif act == "position": explorer.position.value = int(g.integers(explorer.position.max + 1))
        elif act == "filter": explorer.filter.value = ["", *explorer.state.videos][g.integers(3)]
        agrees(explorer)


def test_videos_of_different_length_keep_the_slider_in_range(procedures):
    explorer = RetrievalExplorer(random_index(0, procedures, n=8), k=3)
    explorer.position.value = 5
    explorer.video.value = "901-002"                                   # has two tracklets only
    assert (explorer.position.value, explorer.position.max, explorer.state.query) == (0, 1, 6)
    explorer.ask(7)
    agrees(explorer)
    explorer.ask(4)
    agrees(explorer)


def test_fewer_hits_than_places(procedures):
    explorer = RetrievalExplorer(random_index(0, procedures, n=3), k=8)
    assert len(shown(explorer)) == 2
    agrees(explorer)


# ---- the picture for a stored page

def test_figure(procedures):
    index = random_index(1, procedures)
    fig = explorer_figure(index, 2, support=[5], video="901-002", k=3)
    state = ExplorerState(index, k=3)
    state.ask(2); state.add(5); state.only("901-002")
    titles = [ax.get_title(loc="left") for ax in fig.axes]
    assert len(titles) == 5 and titles[0].startswith("query: 00:00.3") and titles[1].startswith("support: 00:00.8")
    for title, h in zip(titles[2:], state.hits().itertuples()): assert title.startswith(f"{h.rank}. {h.score:.3f}: 00:{h.start_s:04.1f}")
    assert [round(float(np.median(np.asarray(ax.images[0].get_array())))/10) for ax in fig.axes] == [2, 5, *state.hits().row]
    with pytest.raises(InputError, match="row 12"): explorer_figure(index, 12)
