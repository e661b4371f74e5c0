"The commands of in-context segmentation: from labelled scans to masks and scores, and what they say when something is wrong"
import json
from importlib.util import find_spec
from pathlib import Path

import nibabel as nib
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from freerep import cli
from freerep.core import read_json

pytestmark = pytest.mark.skipif(find_spec("sam2") is None, reason="the package sam2 is not installed")


def run(*args): return cli.main([str(a) for a in args])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "Phantoms, a retriever and a segmenter of two steps each, and a bank of them"
    home = tmp_path_factory.mktemp("segmentation")
    assert run("synth", home/"scans", "--volumes", 3, "--size", 64, "--seed", 5) == 0
    assert run("retriever", home/"scans"/"images", "--preset", "tiny", "--set", "steps=2", "--out", home/"retriever") == 0
    assert run("finetune", home/"scans", "--retriever", home/"retriever", "--preset", "nano", "--set", "steps=2", "batch=2", "image_size=96", "--out", home/"tuned") == 0
    assert run("bank", home/"scans", "--retriever", home/"retriever", "--checkpoint", home/"tuned", "--out", home/"bank") == 0
    return home


def test_the_whole_way(home, tmp_path, capsys):
    "Two new scans: masks in their own space, confidences, a report, scores; the bank took name and size from the run"
    assert run("info", home/"scans") == 0 and "liver" in capsys.readouterr().out
    config = read_json(home/"bank"/"config.json")
    assert (config["sam2"], config["image_size"]) == ("nano", 96)
    assert run("synth", tmp_path/"new", "--volumes", 2, "--size", 64, "--seed", 6) == 0
    assert run("segment", home/"bank", tmp_path/"new"/"images", "--k", 3, "--out", tmp_path/"masks") == 0
    scans = sorted((tmp_path/"new"/"images").iterdir())
    for scan in scans:
        name = scan.name[:-7].removesuffix("_0000")
        folder = tmp_path/"masks"/name
        found, given = nib.load(folder/f"{name}_seg.nii.gz"), nib.load(scan)
        assert found.shape == given.shape and np.allclose(found.affine, given.affine)
        table = pd.read_csv(folder/"confidence.csv")
        assert list(table)[:3] == ["frame", "class", "confidence"] and len(table) == 7*given.shape[2] and table.confidence.between(0, 1).all()
        assert "://" not in (folder/"report.html").read_text()
    capsys.readouterr()
    assert run("segeval", tmp_path/"masks", tmp_path/"new"/"labels") == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["pairs"] == 2 and {"dice_slice", "dice_volume", "iou_slice", "iou_volume"} <= set(scores["mean"])
    assert run("segeval", tmp_path/"masks", tmp_path/"new", "--out", tmp_path/"s.json") == 0
    assert read_json(tmp_path/"s.json")["classes"] == scores["classes"]


def test_a_video_and_a_picture(home, tmp_path):
    "A folder of frames in several sizes of one scan: pictures one by one; a video file as a whole"
    slices = np.asarray(nib.load(next((home/"scans"/"images").iterdir())).dataobj)[..., 4:10]
    grey = np.clip((slices + 160)/400*255, 0, 255).astype(np.uint8)
    (tmp_path/"frames").mkdir()
    for i in range(grey.shape[2]): Image.fromarray(grey[..., i].T).convert("RGB").save(tmp_path/"frames"/f"{i:03d}.png")
    assert run("segment", home/"bank", tmp_path/"frames", "--k", 2, "--out", tmp_path/"a") == 0
    assert sorted(p.name for p in (tmp_path/"a").glob("*.png")) == [f"{i:03d}.png" for i in range(6)]
    assert run("segment", home/"bank", tmp_path/"frames"/"002.png", "--k", 2, "--out", tmp_path/"b") == 0
    np.testing.assert_array_equal(np.array(Image.open(tmp_path/"a"/"002.png")), np.array(Image.open(tmp_path/"b"/"002.png")))
    av = pytest.importorskip("av")
    with av.open(str(tmp_path/"film.mp4"), "w") as film:
        stream = film.add_stream("libx264", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for i in range(6):
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.array(Image.open(tmp_path/"frames"/f"{i:03d}.png")), format="rgb24")): film.mux(packet)
        for packet in stream.encode(): film.mux(packet)
    assert run("segment", home/"bank", tmp_path/"film.mp4", "--k", 2, "--gamma", 0, "--out", tmp_path/"c") == 0
    assert len(pd.read_csv(tmp_path/"c"/"confidence.csv").frame.unique()) == 6 and len(list((tmp_path/"c").rglob("*.png"))) >= 6 and (tmp_path/"c"/"report.html").exists()


def test_several_scans_one_of_which_fails(home, tmp_path, capsys):
    "The others are done, and the status says that something is missing; two of one name are refused before anything is done"
    folder = tmp_path/"scans"
    folder.mkdir()
    scan = next((home/"scans"/"images").iterdir()).read_bytes()
    (folder/"a.nii.gz").write_bytes(scan); (folder/"c.nii.gz").write_bytes(scan)
    (folder/"b.nii.gz").write_bytes(scan[:len(scan)//2])
    assert run("segment", home/"bank", folder, "--k", 2, "--out", tmp_path/"out") == 2
    err = capsys.readouterr().err
    assert "1 of 3 could not be segmented: b.nii.gz" in err and "b.nii.gz" in err and {p.name for p in (tmp_path/"out").iterdir()} == {"a", "c"}
    (folder/"a_0000.nii.gz").write_bytes(scan)
    assert run("segment", home/"bank", folder, "--k", 2, "--out", tmp_path/"twice") == 2
    assert "called a" in capsys.readouterr().err and not (tmp_path/"twice").exists()


def test_a_scan_as_a_video(home, tmp_path):
    "Masks carried from slice to slice, written in the scan's own space all the same"
    scan = next((home/"scans"/"images").iterdir())
    assert run("segment", home/"bank", scan, "--video", "--k", 2, "--gamma", 0, "--out", tmp_path/"out") == 0
    found, given = nib.load(next((tmp_path/"out").rglob("*_seg.nii.gz"))), nib.load(scan)
    assert found.shape == given.shape and np.allclose(found.affine, given.affine)


def test_force_spares_the_examples(home, tmp_path, capsys):
    "The folder of the examples given as --out by mistake"
    before = sorted(p for p in (home/"scans").rglob("*"))
    for args, words in ((("segment", home/"bank", next((home/"scans"/"images").iterdir()), "--out", home/"masks-of-mine"), "--force does not delete that"),
                        (("segment", home/"bank", home/"scans"/"images", "--out", home/"masks-of-mine"), "--force does not delete that"),
                        (("segment", home/"bank", home/"scans"/"images", "--out", home/"bank"), "is what is read"),
                        (("segment", home/"bank", home/"scans"/"images", "--out", home), "which is read"),
                        (("bank", home/"scans", "--sam2", "nano", "--out", home/"scans"), "is what is read"),
                        (("finetune", home/"scans", "--preset", "nano", "--set", "steps=1", "--out", home/"scans"), "is what is read"),
                        (("finetune", home/"scans", "--preset", "nano", "--set", "steps=1", "--out", home/"bank"), "not written by `freerep finetune`"),
                        (("retriever", home/"scans"/"images", "--preset", "tiny", "--out", home/"scans"), "which is read")):
        (home/"masks-of-mine").mkdir(exist_ok=True); (home/"masks-of-mine"/"a.txt").write_text("mine")
        assert run(*args, "--force") == 2
        assert words in capsys.readouterr().err and sorted(p for p in (home/"scans").rglob("*")) == before, args
    assert (home/"masks-of-mine"/"a.txt").read_text() == "mine" and (home/"bank"/"examples.json").exists()
    (home/"masks-of-mine"/"a.txt").unlink(); (home/"masks-of-mine").rmdir()


def test_force_leaves_no_result_of_other_scans(home, tmp_path):
    "What an earlier call wrote for scans that are not asked for any more goes; and names of classes are found below"
    new = tmp_path/"new"
    new.mkdir()
    scan = sorted((home/"scans"/"images").iterdir())[0].read_bytes()
    for n in "ab": (new/f"{n}.nii.gz").write_bytes(scan)
    assert run("segment", home/"bank", new, "--k", 2, "--out", tmp_path/"out") == 0
    (new/"a.nii.gz").rename(new/"c.nii.gz")
    assert run("segment", home/"bank", new, "--k", 2, "--out", tmp_path/"out") == 2
    assert run("segment", home/"bank", new, "--k", 2, "--out", tmp_path/"out", "--force") == 0
    assert {p.name for p in (tmp_path/"out").iterdir()} == {"b", "c"}
    assert run("segeval", tmp_path/"out", tmp_path/"out", "--out", tmp_path/"s.json") == 0
    assert "liver" in [c["name"] for c in read_json(tmp_path/"s.json")["classes"]]


def test_runs_replace_runs_of_their_kind_only(home, tmp_path, capsys):
    "--force on somebody's folder with a config.json, or with something in state/"
    own = tmp_path/"own"
    (own/"state").mkdir(parents=True); (own/"state"/"thesis.txt").write_text("mine"); (own/"config.json").write_text('{"mine": 1}')
    args = ("finetune", home/"scans", "--preset", "nano", "--set", "steps=1", "batch=1", "--out")
    assert run(*args, own, "--force") == 2 and "thesis.txt" in capsys.readouterr().err
    (own/"state"/"thesis.txt").unlink()
    assert run(*args, own, "--force") == 2 and "config.json" in capsys.readouterr().err and (own/"config.json").read_text() == '{"mine": 1}'
    assert run(*args, tmp_path/"run") == 0 and run(*args, tmp_path/"run", "--force") == 0


def test_info_knows_scans(home, tmp_path, capsys):
    "A scan, and a folder of scans without labels"
    scan = sorted((home/"scans"/"images").iterdir())[0]
    for what, n in ((scan, 1), (scan.parent, 3)):
        assert run("info", what, "--json", tmp_path/f"{n}.json") == 0
        assert "24" in capsys.readouterr().out and read_json(tmp_path/f"{n}.json")


def test_absent_is_passed_on(home, tmp_path, monkeypatch):
    "`--absent ignore` reaches the segmentation, and a word that is neither is refused"
    scan = next((home/"scans"/"images").iterdir())
    seen = []
    monkeypatch.setattr("freerep.image_segmentation.segment_query", lambda bank, query, out, **how: seen.append(how))
    assert run("segment", home/"bank", scan, "--absent", "ignore", "--out", tmp_path/"a") == 0
    assert run("segment", home/"bank", scan, "--out", tmp_path/"b") == 0
    assert [how["absent"] for how in seen] == ["ignore", "empty"]


def test_the_study_on_a_stand_in(home, tmp_path, capsys):
    "Three scans instead of fifty; a second call has nothing left to do"
    args = ("study", "icl", "--source", home/"scans", "--out", tmp_path/"study", "--sam2", "nano", "--retriever", "random", "--n-context", 2, "--n-test", 1)
    assert run(*args) == 0
    first, rows = capsys.readouterr().out, pd.read_csv(tmp_path/"study"/"results.csv")
    assert "90.95" in first and (tmp_path/"study"/"figure.png").exists() and rows.dice_volume.notna().any()
    assert run(*args) == 0 and capsys.readouterr().out == first


@pytest.mark.parametrize("args, words", [
    (["bank", "{home}/scans", "--sam2", "huge", "--out", "{out}"], ["huge", "nano"]),
    (["bank", "{home}/scans", "--sam2", "tiny", "--checkpoint", "{home}/tuned", "--out", "{out}"], ["tuned", "nano"]),
    (["bank", "{home}/scans", "--checkpoint", "{home}/retriever", "--out", "{out}"], ["retriever", "finetune"]),
    (["bank", "{home}/scans", "--sam2", "nano", "--retriever", "{home}/tuned", "--out", "{out}"], ["tuned", "freerep retriever"]),
    (["bank", "{home}/scans", "--sam2", "nano", "--window", "wide", "--out", "{out}"], ["wide", "level"]),
    (["bank", "{home}/scans", "--sam2", "nano", "--max-gb", "0", "--out", "{out}"], ["max_bytes", "not even one memory"]),
    (["bank", "{home}/nothing", "--out", "{out}"], ["nothing", "does not exist"]),
    (["bank", "{home}/scans", "--out", "{home}/bank"], ["bank", "--force"]),
    (["segment", "{home}/scans", "{home}/scans/images", "--out", "{out}"], ["no bank"]),
    (["segment", "{home}/bank", "{home}/nothing", "--out", "{out}"], ["nothing"]),
    (["segment", "{home}/bank", "{home}/scans/images", "--k", "0", "--out", "{out}"], ["at least 1"]),
    (["segment", "{home}/bank", "{home}/scans/images", "--strategy", "best", "--out", "{out}"], ["best", "diverse"]),
    (["segment", "{home}/bank", "{home}/scans/images", "--absent", "maybe", "--out", "{out}"], ["maybe", "ignore"]),
    (["segment", "{home}/bank", "{home}/scans/images", "--gamma", "2", "--out", "{out}"], ["gamma"]),
    (["segeval", "{home}/scans/images", "{home}/nothing"], ["nothing"]),
    (["finetune", "{home}/scans", "--preset", "nano", "--set", "score=nan", "--out", "{out}"], ["score", "0"]),
    (["finetune", "{home}/scans", "--preset", "nano", "--retriever", "{home}/bank", "--out", "{out}"], ["bank"]),
    (["retriever", "{home}/nothing", "--out", "{out}"], ["nothing"]),
    (["study", "icl", "--source", "{home}/scans", "--out", "{out}"], ["3 labelled scans", "--n-context"]),
    (["study", "tables", "--source", "{home}/scans", "--out", "{out}"], ["tables", "icl"]),
    (["synth", "{out}", "--volumes", "0"], ["volumes"]),
])
def test_what_is_wrong_is_said(home, tmp_path, capsys, args, words):
    "Status 2, one message with the words, and nothing written"
    before = sorted(p for p in home.rglob("*"))
    assert run(*[a.format(home=home, out=tmp_path/"out") for a in args]) == 2
    said = capsys.readouterr().err
    assert all(w in said for w in words) and "Traceback" not in said
    assert not (tmp_path/"out").exists() and sorted(p for p in home.rglob("*")) == before
