"""freerep.index: what fits together and what does not, search against loops and FAISS, streaming against one clip at a time."""
import json, subprocess, sys
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

import freerep.index as index_module
from freerep.core import InputError
from freerep.encoder import SMALL, create_encoder, encode
from freerep.index import PIXELS, Index, embed, embed_pixels
from freerep.sources import Source, Video, box_table
from freerep.tracklets import COLUMNS, annotated_tracklets, make_tracklets, tracklet_frames
from freerep.views import BoxCrop, FullFrame, read_view, to_batch


def table(n, video="v", identity=""):
    start = 32*np.arange(n)
    return pd.DataFrame(dict(row=np.arange(n), source="here", video=video, start_frame=start, end_frame=start + 32, stride=4, fps=25., start_s=start/25,
                             end_s=(start + 29)/25, identity=identity, x0=np.nan, y0=np.nan, x1=np.nan, y1=np.nan))


def vectors(n, d=16, seed=0):
    x = np.random.default_rng(seed).normal(size=(n, d))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


# ---- the store

def test_an_index_survives_the_disk_bit_by_bit(tmp_path):
    t = table(6).assign(identity=["007", "NA", "", "nan", "None", 'a "b", c\nd'], start_s=np.random.default_rng(0).random(6), x0=[.1, np.nan, 1/3, 1e-17, 1e300, -0.], note=list("abcdef"))
    index = Index(vectors(6), t, {"run": "r", "n": 3})
    index.save(tmp_path/"i")
    again = Index.load(tmp_path/"i")
    assert again.embeddings.dtype == np.float32 and np.array_equal(again.embeddings, index.embeddings)
    pd.testing.assert_frame_equal(again.table, index.table, check_exact=True)
    assert again.meta == {"run": "r", "n": 3}
    assert sorted(p.name for p in (tmp_path/"i").iterdir()) == [".freerep", "embeddings.npy", "meta.json", "tracklets.csv"]
    assert list(pd.read_csv(tmp_path/"i"/"tracklets.csv").columns) == COLUMNS + ["note"]
    with pytest.raises(InputError, match="exists already"): index.save(tmp_path/"i")
    Index(vectors(2), table(2)).save(tmp_path/"i", force=True)
    assert len(Index.load(tmp_path/"i")) == 2


@pytest.mark.parametrize("meta", [None, "", "{}"])
def test_two_files_from_elsewhere_are_enough(tmp_path, meta):
    np.save(tmp_path/"embeddings.npy", 3*vectors(5).astype(np.float64))
    table(5)[COLUMNS[::-1]].to_csv(tmp_path/"tracklets.csv", index=False)
    if meta is not None: (tmp_path/"meta.json").write_text(meta)
    index = Index.load(tmp_path)
    np.testing.assert_allclose(index.embeddings, vectors(5), atol=1e-6)
    assert index.meta == {} and list(index.table.columns) == COLUMNS


def test_vectors_are_brought_to_length_one_with_a_note(capsys):
    Index(vectors(4), table(4), where="quiet")
    assert capsys.readouterr().err == ""
    x = Index(vectors(4)*np.arange(1, 5)[:, None], table(4), where="loud").embeddings
    assert "loud" in capsys.readouterr().err
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, atol=1e-6)


def spoil(folder, name):
    np.save(folder/"embeddings.npy", vectors(5))
    t = table(5)
    if name == "rows": np.save(folder/"embeddings.npy", vectors(4))
    if name == "nan": np.save(folder/"embeddings.npy", np.where(np.arange(5)[:, None] == 2, np.nan, vectors(5)))
    if name == "zero": np.save(folder/"embeddings.npy", np.where(np.arange(5)[:, None] == 2, 0, vectors(5)))
    if name == "vector": np.save(folder/"embeddings.npy", vectors(5)[0])
    if name == "text": np.save(folder/"embeddings.npy", np.array([["a"]]*5))
    if name == "code": np.save(folder/"embeddings.npy", np.array([{}]*5, dtype=object), allow_pickle=True)
    if name == "cut": (folder/"embeddings.npy").write_bytes((folder/"embeddings.npy").read_bytes()[:150])
    if name == "junk": (folder/"embeddings.npy").write_bytes(b"hello")
    if name == "empty": (folder/"embeddings.npy").write_bytes(b"")
    if name == "several":
        np.savez(folder/"x.npz", a=vectors(5)); (folder/"x.npz").rename(folder/"embeddings.npy")
    if name == "no vectors": (folder/"embeddings.npy").unlink()
    if name == "column": t = t.drop(columns=["end_s", "x1"])
    if name == "number": t["start_frame"] = ["0", "1", "two", "3", "4"]
    if name == "whole": t["stride"] = [4, 4, 4.5, 4, 4]
    if name == "hole": t["end_frame"] = [32, 64, np.nan, 128, 160]
    if name == "order": t["row"] = [0, 2, 1, 3, 4]
    t.to_csv(folder/"tracklets.csv", index=False)
    if name == "no table": (folder/"tracklets.csv").unlink()
    if name == "blank table": (folder/"tracklets.csv").write_text("")
    if name == "binary table": (folder/"tracklets.csv").write_bytes(b"\xff\xfe\x00\x01"*50)
    if name == "meta": (folder/"meta.json").write_text("{")


@pytest.mark.parametrize("name, word", [("rows", "4 embeddings but 5 rows"), ("nan", "row 2"), ("zero", "row 2"), ("vector", r"\(n, d\)"), ("text", "numbers"),
    ("code", "refused"), ("cut", "refused"), ("junk", "refused"), ("empty", "refused"), ("several", "npz"), ("no vectors", "embeddings.npy does not exist"),
    ("column", "no column end_s, x1"), ("number", "start_frame must hold numbers.*two"), ("whole", "stride must hold whole numbers, but holds 4.5"),
    ("hole", "end_frame must hold whole"), ("order", "line 1 says 2"), ("no table", "tracklets.csv does not exist"), ("blank table", "tracklets.csv"),
    ("binary table", "tracklets.csv"), ("meta", "meta.json is not valid JSON")])
def test_broken_indexes_are_refused_by_name(tmp_path, name, word):
    spoil(tmp_path, name)
    with pytest.raises(InputError, match=word) as e: Index.load(tmp_path)
    assert str(tmp_path) in str(e.value)


def test_what_is_no_folder():
    with pytest.raises(InputError, match="not a folder"): Index.load("nowhere")


def test_saving_is_all_or_nothing(tmp_path, monkeypatch):
    def full(*a, **k): raise OSError(28, "No space left on device")
    monkeypatch.setattr(index_module, "write_csv", full)
    with pytest.raises(OSError): Index(vectors(3), table(3)).save(tmp_path/"i")
    assert list(tmp_path.iterdir()) == []


# ---- search

def search_loop(x, q, k, drop):
    "Scores in double precision, one by one; equal scores by row"
    x, q = x.astype(np.float64), np.atleast_2d(q).astype(np.float64)
    x, q = x/np.linalg.norm(x, axis=1, keepdims=True), q/np.linalg.norm(q, axis=1, keepdims=True)
    scores = {i: round(max(float(s @ x[i]) for s in q), 12) for i in range(len(x)) if i not in drop}
    rows = sorted(scores, key=lambda i: (-scores[i], i))[:k]
    return rows, [scores[i] for i in rows]


@pytest.mark.parametrize("backend", ["exact", "faiss"])
@pytest.mark.parametrize("seed", range(8))
def test_search_equals_a_loop(monkeypatch, backend, seed):
    monkeypatch.setattr(index_module, "_block", 500)         # many blocks
    g = np.random.default_rng(seed)
    index = Index(vectors(200, seed=seed), table(200))
    for s in (None, 1, 4):
        q = g.normal(size=16 if s is None else (s, 16))*g.uniform(.1, 10)
        drop = set(g.choice(200, g.integers(0, 150), replace=False).tolist())
        hits = index.search(q, 12, exclude=sorted(drop), backend=backend)
        rows, scores = search_loop(index.embeddings, q, 12, drop)
        assert hits.row.tolist() == rows and hits["rank"].tolist() == list(range(1, 13))
        np.testing.assert_allclose(hits.score, scores, atol=1e-6)
        pd.testing.assert_frame_equal(hits[COLUMNS].drop(columns="row"), index.table.iloc[rows].reset_index(drop=True).drop(columns="row"))


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_faiss_gives_the_same_answers_with_many_ties(n, k, s, seed):
    "Embeddings with few different values: ties within and beyond the first k"
    g = np.random.default_rng(seed)
    x = g.integers(-1, 2, (n, 3)); x[(x == 0).all(1)] = 1
    index = Index(x/np.linalg.norm(x, axis=1, keepdims=True), table(n))
    q, drop = g.normal(size=(s, 3)), g.choice(n, g.integers(0, n + 1), replace=False)
    a, b = (index.search(q, k, exclude=drop, backend=name) for name in ("exact", "faiss"))
    pd.testing.assert_frame_equal(a, b)
    assert len(a) == min(k, n - len(drop)) and a.row.tolist() == search_loop(index.embeddings, q, k, set(drop.tolist()))[0]


def test_ivf_finds_nearly_all_and_never_what_is_excluded():
    g = np.random.default_rng(0)
    looks = g.normal(size=(50, 16))[g.integers(0, 50, 4000)] + .5*g.normal(size=(4000, 16))
    index = Index(looks/np.linalg.norm(looks, axis=1, keepdims=True), table(4000))
    recall = []
    for r in g.integers(0, 4000, 30):
        a, b = index.search(index[r], 10, exclude=[r]), index.search(index[r], 10, exclude=[r], backend="ivf")
        recall.append(len(set(a.row) & set(b.row))/10)
        assert r not in set(b.row) and b.score.is_monotonic_decreasing
    assert np.mean(recall) > .8


def test_the_first_hit_of_a_row_is_itself():
    index = Index(vectors(50), table(50))
    assert [index.search(index[i], 1).row[0] for i in range(50)] == list(range(50))
    np.testing.assert_allclose([index.search(index[i], 1).score[0] for i in range(50)], 1, atol=1e-9)


@pytest.mark.parametrize("call, word", [(dict(query=np.ones(5)), "d=16, got"), (dict(query=np.ones((2, 2, 16))), "d=16"), (dict(query=np.full(16, np.nan)), "NaN"),
    (dict(query=np.zeros(16)), "zero"), (dict(query=np.ones((0, 16))), "d=16"), (dict(query=np.ones(16), exclude=[50]), "row 50"), (dict(query=np.ones(16), exclude=[-1]), "row -1"),
    (dict(query=np.ones(16), k=0), "k=0"), (dict(query=np.ones(16), backend="annoy"), "annoy")])
def test_searches_that_make_no_sense(call, word):
    with pytest.raises(InputError, match=word): Index(vectors(50), table(50)).search(**call)


def test_a_gallery_of_nothing():
    assert len(Index(vectors(3), table(3)).search(np.ones(16), exclude=[0, 1, 2])) == 0
    assert len(Index(np.zeros((0, 16)), table(0)).search(np.ones(16))) == 0


@pytest.mark.parametrize("first", ["import torch", "import faiss"])
def test_faiss_and_torch_live_together_in_either_order(first):
    code = f"""{first}
import sys, numpy as np, torch
sys.path.insert(0, {str(__file__.rsplit('/', 1)[0])!r})
from freerep.index import Index
assert ("faiss" in sys.modules) == ("faiss" in {first!r}), "faiss must be loaded only when a search asks for it"
from test_index import table, vectors
index = Index(vectors(3000), table(3000))
for backend in ("exact", "faiss", "ivf"):
    torch.nn.Conv2d(3, 8, 3)(torch.randn(4, 3, 64, 64)).sum().backward()
    index.search(index[0], backend=backend)
assert "faiss" in sys.modules
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "alive", done.stderr[-2000:]


def test_without_faiss_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match="pip install faiss-cpu"): Index(vectors(5), table(5)).search(np.ones(16), backend="faiss")


# ---- embed

class Film(Video):
    "A video made in memory. Counts what is decoded; some frames are broken"
    def __init__(self, name, n=64, size=(60, 50), bad=(), boxes=()):
        super().__init__(name, name, fps=25, labels=lambda video: (box_table(boxes), []))
        self.frames, self.size, self.bad, self.decoded = np.arange(n), size, set(bad), []
        g = np.random.default_rng(len(name) + n)
        self.pictures = g.integers(0, 256, (n, 5, 6, 3)).astype(np.uint8)
    def _pictures(self, shrink):
        for f in sorted(shrink):
            self.decoded.append(f)
            if f in self.bad: self.broken[f] = "it is broken"
            else: yield f, Image.fromarray(self.pictures[f]).resize(self.size, Image.Resampling.BILINEAR), self.size, 1


@dataclass(frozen=True)
class Config:
    size: int = 24
    length: int = 8
    stride: int = 1
    mean: float = .45
    std: float = .225


class Run:
    path = "runs/test"
    def __init__(self, seed=0, **cfg): self.config, self.model = Config(**cfg), create_encoder(weights="random", seed=seed, **SMALL)
    def encoder(self): return self.model


run = Run()
polyp = lambda who, first, last, x=20: [(f, who, x + f/10, 12., x + 12 + f/10, 24., "film") for f in range(first, last)]


def films(**kw):
    "Two films: in the first, two polyps are in the picture at once; one polyp stays for 100 frames"
    a = Film("a", 130, boxes=polyp("a_1", 0, 100) + polyp("a_2", 60, 90, x=35) + polyp("a_2", 100, 120, x=35), **kw)
    return Source("films", "frames", [a, Film("bb", 70, size=(48, 64), boxes=polyp("b_1", 3, 30) + polyp("b_1", 40, 65))])


def reference(source, rows, view, size=24, model=None, **kw):
    "One tracklet at a time, through `encode`"
    clips = [to_batch([read_view(source[r.video], r, view, size, **kw)])[0] for r in rows.itertuples()]
    return np.concatenate([encode(model or run.model, c).numpy() for c in clips])


@pytest.mark.parametrize("most, workers", [(1, 1), (7, 1), (16, 3), (64, None), (1000, 2)])
def test_streaming_equals_one_clip_at_a_time(most, workers):
    source = films()
    index = embed(source, run, boxes=True, batch_frames=most, workers=workers)
    np.testing.assert_allclose(index.embeddings, reference(source, annotated_tracklets(source, stride=1), BoxCrop(5)), atol=2e-5)
    raw = embed(source, run, batch_frames=most, workers=workers)
    np.testing.assert_allclose(raw.embeddings, reference(source, make_tracklets(source, stride=1), FullFrame()), atol=2e-5)
    assert np.abs(np.linalg.norm(index.embeddings, axis=1) - 1).max() < 1e-5 and index.embeddings.dtype == np.float32


@pytest.mark.parametrize("kw, view, extra", [(dict(crop_scale=1.3), BoxCrop(1.3), {}), (dict(mask_polyp=True), BoxCrop(5.), dict(mask_polyp=True))])
def test_view_options(kw, view, extra):
    source = films()
    index = embed(source, run, boxes=True, batch_frames=20, **kw)
    np.testing.assert_allclose(index.embeddings, reference(source, annotated_tracklets(source, stride=1), view, **extra), atol=2e-5)
    assert not np.allclose(index.embeddings, embed(source, run, boxes=True).embeddings, atol=1e-4)
    assert index.meta["view"] == repr(view) and index.meta["mask_polyp"] == kw.get("mask_polyp", False)


def test_table_and_meta_say_what_was_done(tmp_path):
    source = films()
    index = embed(source, run, boxes=True)
    pd.testing.assert_frame_equal(index.table, annotated_tracklets(source, stride=1), check_dtype=False)
    assert index.meta["run"].endswith("/runs/test") and index.meta["config"]["size"] == 24 and index.meta["source"] == "films"
    assert (index.meta["tracklets"], index.meta["videos"], index.meta["polyps"]) == (5, 2, 3)
    index.save(tmp_path/"i")
    assert json.loads((tmp_path/"i"/"meta.json").read_text()) == json.loads(json.dumps(index.meta))
    pd.testing.assert_frame_equal(Index.load(tmp_path/"i").table, index.table)


def test_no_batch_is_larger_than_asked_and_nothing_is_read_far_ahead(monkeypatch):
    source, sizes, ahead, consumed = films(), [], [], [0]
    frames = type(run.model).frames
    def counted(self, clips, mask=None):
        sizes.append(clips.shape[1]); consumed[0] += clips.shape[1]
        ahead.append(sum(len(v.decoded) for v in source) - consumed[0])
        return frames(self, clips, mask)
    monkeypatch.setattr(type(run.model), "frames", counted)
    embed(source, run, batch_frames=10, workers=2)
    assert max(sizes) == 10 and max(ahead) <= 3*10


def test_frames_shared_by_two_polyps_are_decoded_once_per_job():
    source = films()
    embed(source, run, boxes=True, batch_frames=1000, workers=1)
    assert len(source["a"].decoded) == len(set(source["a"].decoded)) == 120
    raw = films()
    embed(raw, run, batch_frames=13, workers=1)
    assert all(len(v.decoded) == len(set(v.decoded)) for v in raw)


@pytest.mark.parametrize("most", [3, 16, 500])
def test_broken_frames_are_left_out_and_counted(capsys, most):
    bad = [2, 5, *range(16, 24), 120]
    source = films(bad=bad)
    index = embed(source, run, batch_frames=most)
    whole = make_tracklets(source, stride=1)
    rows = whole[~((whole.video == "a") & (whole.start_frame == 16))]
    assert index.meta["broken_frames"] == {"a": 11}
    assert index.meta["left_out"] == [dict(video="a", start_frame=16, end_frame=24)]
    assert index.table.row.tolist() == list(range(len(rows))) and index.table.start_frame.tolist() == rows.start_frame.tolist()
    np.testing.assert_allclose(index.embeddings, reference(source, rows, FullFrame()), atol=2e-5)
    boxed = embed(source, run, boxes=True, batch_frames=most, mask_polyp=True)       # boxes must follow the frames that are left
    np.testing.assert_allclose(boxed.embeddings, reference(source, annotated_tracklets(source, stride=1), BoxCrop(5), mask_polyp=True), atol=2e-5)


def test_nothing_readable_is_an_error():
    source = Source("dark", "frames", [Film("a", 20, bad=range(1, 20))])             # frame 0 gives the size
    source["a"].bad = set(range(20))
    with pytest.raises(InputError, match="dark: none of the frames"): embed(source, run)


def test_an_encoder_that_diverged_is_refused():
    broken = Run()
    with torch.no_grad(): broken.model.adapter.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="NaN"): embed(films(), broken)


def test_the_mode_and_weights_of_the_encoder_do_not_change():
    model = create_encoder(weights="random", **SMALL).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    own = Run(); own.model = model
    embed(films(), own)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_split_is_used_with_a_note(capsys):
    source = films(); source.splits = dict(train=["a"], test=["bb"])
    assert set(embed(source, run, boxes=True).table.video) == {"bb"} and "'test'" in capsys.readouterr().err
    assert set(embed(source, run, boxes=True, split=None).table.video) == {"a", "bb"}
    assert set(embed(source, run, boxes=True, split="train").table.video) == {"a"}
    assert set(embed(source, run).table.video) == {"a", "bb"}                        # raw tracklets: everything
    assert set(embed(source.subset("train"), run, boxes=True).table.video) == {"a"}


def test_wishes_that_need_boxes():
    with pytest.raises(InputError, match="needs boxes=True"): embed(films(), run, mask_polyp=True)
    with pytest.raises(InputError, match="has no boxes|no boxes"):
        plain = Video("x", "x"); plain.frames, plain.size = np.arange(30), (8, 8)
        embed(Source("plain", "frames", [plain]), run, boxes=True)


def test_no_annotation_is_read_for_raw_tracklets(monkeypatch):
    source = films()
    monkeypatch.setattr(Video, "annotations", property(lambda self: pytest.fail("annotations were read")))
    embed(source, run)


# ---- pixel baselines

def test_pixel_baselines_equal_a_loop():
    source = films()
    rows = annotated_tracklets(source, stride=1)
    clips = [read_view(source[r.video], r, BoxCrop(5), 64).astype(float) for r in rows.itertuples()]
    plain = dict(mean_colour=[c.mean((0, 1, 2)) for c in clips], thumbnail=[c.reshape(len(c), 8, 8, 8, 8, 3).mean((0, 2, 4)).transpose(2, 0, 1).ravel() for c in clips])
    for kind, x in plain.items():
        x = np.stack(x) - np.mean(x, 0)
        index = embed_pixels(source, kind, stride=1)
        np.testing.assert_allclose(index.embeddings, x/np.linalg.norm(x, axis=1, keepdims=True), atol=1e-4)
        assert index.table.equals(embed(source, run, boxes=True).table) and index.meta["pixels"] == kind
    assert set(PIXELS) == set(plain)
    with pytest.raises(InputError, match="unknown kind"): embed_pixels(source, "edges")
