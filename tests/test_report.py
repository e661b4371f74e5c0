"""The report: strips, tags that escape what they hold, pages that need nothing from outside"""
import base64, io, re
from html.parser import HTMLParser
from pathlib import Path
import matplotlib, numpy as np, pandas as pd, pytest
from hypothesis import given, settings, strategies as st
from PIL import Image
from freerep.core import InputError
from freerep.report import (data_uri, draw_boxes, html_block, html_note, html_page, html_picture, html_section, html_table,
                            jpeg, read_strip, strip, time_stamp, write_page)
from fastcore.xml import to_xml

matplotlib.use("Agg")

class Reader(HTMLParser):
    "Text, tags and addresses of a page, as a browser would see them"
    def __init__(self, page):
        super().__init__()
        self.tags, self.attrs, self.text = [], [], []
        self.feed(page)
        self.close()
    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attrs += attrs
    def handle_data(self, data): self.text.append(data)

def decode(uri):
    kind, data = re.fullmatch(r"data:image/(\w+);base64,(.+)", uri).groups()
    return kind, Image.open(io.BytesIO(base64.b64decode(data)))

class Film:
    "A film whose frame f is grey level f; some frames are broken"
    has_annotations = False
    def __init__(self, size=(64, 48), bad=(), n=200):
        self.frames, self.size, self.bad, self.path, self.broken, self.asked = np.arange(n), size, set(bad), "film.mp4", {}, []
    def read(self, frames, size=None):
        self.asked.append((list(map(int, frames)), size))
        self.broken.update({int(f): "broken" for f in frames if f in self.bad})
        good = [f for f in frames if f not in self.bad]
        return np.stack([np.full((size[1], size[0], 3), f, np.uint8) for f in good]) if good else np.zeros((0, size[1], size[0], 3), np.uint8)

def row_of(start, end, stride=1, **kw): return pd.Series(dict(start_frame=start, end_frame=end, stride=stride, identity="") | kw)

@pytest.mark.parametrize("t,h,w,height,gap", [(1, 10, 20, 10, 2), (3, 48, 64, 96, 2), (5, 100, 30, 25, 0), (2, 7, 300, 40, 5)])
def test_strip_geometry(t, h, w, height, gap):
    images = np.full((t, h, w, 3), 100, np.uint8)
    s = np.asarray(strip(images, height, gap=gap))
    width = max(1, round(w*height/h))
    assert s.shape == (height, t*width + (t - 1)*gap, 3)
    for i in range(t): assert (s[:, i*(width + gap):i*(width + gap) + width] == 100).all()
    assert (s == 255).all(-1).sum() == height*gap*(t - 1)

def test_strip_takes_frames_of_different_sizes():
    assert strip([np.zeros((10, 10, 3), np.uint8), np.zeros((20, 10, 3), np.uint8)], 20, gap=0).size == (30, 20)

@pytest.mark.parametrize("bad", [np.zeros((2, 4, 4), np.uint8), np.zeros((2, 4, 4, 3), np.float32), np.zeros((2, 4, 4, 4), np.uint8),
                                 np.zeros((0, 4, 4, 3), np.uint8), np.zeros((1, 0, 4, 3), np.uint8)])
def test_strip_refuses_what_is_no_frames(bad):
    with pytest.raises(InputError): strip(bad)

def test_read_strip_reads_small_and_spread():
    film = Film((64, 48))
    s = read_strip(film, row_of(10, 110, 10), n=4, height=24)
    assert film.asked == [([20, 40, 70, 90], (32, 24))]
    assert s.size == (4*32 + 3*2, 24) and [np.asarray(s)[12, 16 + 34*i, 0] for i in range(4)] == [20, 40, 70, 90]

@pytest.mark.parametrize("n", [1, 2, 5, 50])
def test_read_strip_of_short_tracklets_shows_every_frame_once(n):
    film = Film()
    read_strip(film, row_of(0, 3), n=n)
    frames = film.asked[0][0]
    assert len(frames) == min(n, 3) == len(set(frames))

def test_boxes_follow_the_frames_that_are_left():
    film = Film((64, 48), bad=[1])
    film.has_annotations, film.name = True, "film"
    film.annotations = pd.DataFrame(dict(frame=[0, 1, 2], identity="p", x0=[0., 8, 16], y0=0., x1=[8., 16, 24], y1=8.))
    s = np.asarray(read_strip(film, row_of(0, 3, identity="p"), height=48))
    assert s.shape == (48, 2*64 + 2, 3)
    assert tuple(s[0, 0]) == (255, 224, 64) and tuple(s[0, 66 + 16]) == (255, 224, 64)   # frame 2 keeps its own box
    assert tuple(s[0, 66 + 8]) != (255, 224, 64)

def test_box_of_a_query_is_drawn_on_every_frame_at_the_scale_of_the_strip():
    s = np.asarray(read_strip(Film((64, 48)), row_of(0, 2), height=24, box=(8, 8, 40, 40)))
    yellow = (s == (255, 224, 64)).all(-1)
    for x in (0, 34): assert yellow[4, x + 4:x + 20].all() and yellow[19, x + 4:x + 20].all() and not yellow[:, x + 21:x + 30].any()

def test_a_polyp_that_the_annotations_do_not_know_costs_the_box_and_not_the_picture():
    film = Film()
    film.has_annotations, film.name, film.annotations = True, "film", pd.DataFrame(dict(frame=[0], identity="q", x0=0., y0=0., x1=9., y1=9.))
    assert np.array_equal(read_strip(film, row_of(0, 3, identity="p")), read_strip(film, row_of(0, 3)))

def test_frames_that_do_not_exist_are_not_asked_for():
    film = Film(n=5)
    read_strip(film, row_of(3, 9))
    assert film.asked[0][0] == [3, 4]
    with pytest.raises(InputError, match="no frame from 7 to 8"): read_strip(film, row_of(7, 9))

def test_all_frames_broken_is_an_error_that_names_the_file():
    with pytest.raises(InputError, match="film.mp4"): read_strip(Film(bad=range(9)), row_of(0, 8))

@given(st.lists(st.floats(-1e4, 1e4) | st.just(float("nan")), min_size=4, max_size=4))
@settings(max_examples=100, deadline=None)
def test_boxes_anywhere_never_fail_and_never_touch_the_input(box):
    images = np.full((1, 12, 16, 3), 7, np.uint8)
    out = draw_boxes(images, np.array([box]))
    assert out.shape == images.shape and (images == 7).all()
    assert (out == 7).all() == (not np.isfinite(box).all())

@given(st.floats(0, 1e6))
@settings(max_examples=200, deadline=None)
def test_time_stamp_is_the_nearest_tenth(t):
    stamp = time_stamp(t)
    minutes, seconds = re.fullmatch(r"(\d\d+):([0-5]\d\.\d)", stamp).groups()
    assert abs(int(minutes)*60 + float(seconds) - t) <= .05 + 1e-9*t

@given(st.text(min_size=1) | st.text("<>&\"'/ =;ax\udc80\x00\n", min_size=1, max_size=30))
@settings(max_examples=80, deadline=None)
def test_no_string_becomes_markup(s):
    "Titles, captions, cells, labels, notes: the page has the tags that it has with harmless strings"
    def page(s):
        df = pd.DataFrame({s: [s, 1.]}, index=[s, "b"])
        return html_page(s, [s, html_note(s), html_section(s, html_table(df, s), html_picture(np.zeros((2, 2, 3), np.uint8), s, alt=s))], footer=s)
    reader = Reader(page(s))
    assert reader.tags == Reader(page("x")).tags
    assert all(a.startswith("data:") for k, a in reader.attrs if k in ("src", "href"))
    page(s).encode()                                                   # can be written
    visible = s.encode("utf-8", "replace").decode()
    if visible.strip() and not re.search(r"[\x00\r]", visible): assert visible in "".join(reader.text)

def test_objects_that_only_look_harmless_are_escaped():
    "Paths and other objects are turned into strings before they are escaped"
    class Evil:
        def __html__(self): return "<script>1</script>"
        def __str__(self): return "<i>"
    out = to_xml(html_table(pd.DataFrame({"a": [Path("<b>"), Evil(), b"<u>"]}, index=pd.Index([Path("<s>"), Evil(), 0])))) + to_xml(html_block(Evil()))
    assert Reader(out).tags == ["div", "table", "thead", "tr", "td", "th"] + ["tbody"] + ["tr", "th", "td"]*3 + ["p"]

def test_page_needs_nothing_from_outside(tmp_path):
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(); ax.plot([1, 2]); plt.close(fig)
    frames = np.random.default_rng(0).integers(0, 255, (4, 48, 64, 3), dtype=np.uint8)
    page = html_page("T", ["words", frames, frames[0], Image.new("CMYK", (9, 9)), fig, pd.DataFrame({"a": [1]}), ["x", "y"]])
    reader = Reader(page)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(reader.tags)
    assert reader.tags.count("img") == 4 and "default-src 'none'" in page and "width=device-width" in page and "color-scheme: light dark" in page
    assert [decode(a)[0] for k, a in reader.attrs if k == "src"] == ["jpeg", "jpeg", "jpeg", "png"]
    write_page(page, tmp_path/"deep"/"report.html")
    assert (tmp_path/"deep"/"report.html").read_text(encoding="utf-8") == page and len(list((tmp_path/"deep").iterdir())) == 1

def test_pictures_survive_as_they_are():
    image = np.zeros((20, 30, 3), np.uint8); image[:, 15:] = 200, 30, 90
    kind, back = decode(data_uri(jpeg(image, quality=95)))
    assert kind == "jpeg" and back.size == (30, 20)
    assert np.abs(np.asarray(back)[:, [5, 25]].astype(int) - image[:, [5, 25]]).max() < 12

def test_table_values():
    df = pd.DataFrame({"x": [1.23456, np.nan], "n": pd.array([3, None], dtype="Int64"), "s": ["a", None], "b": [True, False]})
    cells = [t for t in Reader(to_xml(html_table(df, digits=2))).text if t.strip()]
    assert cells == ["x", "n", "s", "b", "1.23", "3", "a", "True", "–", "–", "–", "False"]
    both = pd.DataFrame([[1, 2]], index=["only"], columns=pd.MultiIndex.from_tuples([("a", "b"), ("a", "c")]))
    assert [t for t in Reader(to_xml(html_table(both))).text if t.strip()] == ["a b", "a c", "only", "1", "2"]
