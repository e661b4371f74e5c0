"""The ground: files, seeds, settings, weights."""
import dataclasses
import errno
import os
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from freerep.core import *


def test_a_writer_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path/"a.json"
    write_json({"v": 1}, path)
    with pytest.raises(OSError), atomic_path(path) as tmp:
        tmp.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert read_json(path) == {"v": 1} and os.listdir(tmp_path) == ["a.json"]


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path/"a.csv"
    write_csv(pd.DataFrame({"v": [1]}), path)
    code = f"import os; from freerep.core import *\nwith atomic_path({str(path)!r}) as t: t.write_text('half'); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert pd.read_csv(path).v.tolist() == [1]


@pytest.mark.parametrize("made", [True, False])
def test_new_folder_appears_whole_or_not(tmp_path, made):
    out = tmp_path/"run"
    with pytest.raises(KeyboardInterrupt):
        with new_folder(out) as tmp:
            (tmp/"a").write_text("a")
            raise KeyboardInterrupt
    assert not os.listdir(tmp_path)
    if made: out.mkdir()
    with new_folder(out) as tmp: (tmp/"a").write_text("a")
    assert sorted(os.listdir(out)) == [".freerep", "a"] and os.listdir(tmp_path) == ["run"]


def test_force_replaces_what_we_made_and_nothing_else(tmp_path):
    "A folder of somebody's pictures, one to which something was added, a file: all stay; our own goes"
    with new_folder(tmp_path/"ours") as tmp: (tmp/"a").write_text("1"); (tmp/"b").mkdir(); (tmp/"b"/"c").write_text("1")
    with new_folder(tmp_path/"ours", force=True) as tmp: (tmp/"a").write_text("2")
    assert sorted(os.listdir(tmp_path/"ours")) == [".freerep", "a"] and (tmp_path/"ours"/"a").read_text() == "2"
    (tmp_path/"ours"/"notes.txt").write_text("mine")
    (tmp_path/"theirs").mkdir(); (tmp_path/"theirs"/"picture.png").write_text("mine"); (tmp_path/"file").write_text("mine")
    for name, why in (("ours", "notes.txt"), ("theirs", "picture.png"), ("file", "is a file")):
        with pytest.raises(InputError, match=why):
            with new_folder(tmp_path/name, force=True): raise AssertionError("began to work")
    with new_folder(tmp_path/"deep") as tmp: (tmp/"images").mkdir(); (tmp/"images"/"1.png").write_text("1"); (tmp/"memories").mkdir()
    (tmp_path/"deep"/"memories"/"x").write_text("a folder that was empty is ours as a whole")
    with new_folder(tmp_path/"deep", force=True) as tmp: (tmp/"images").mkdir()
    (tmp_path/"deep"/"images"/"picture.png").write_text("mine")      # an empty folder of ours may be filled, then it goes with it
    with new_folder(tmp_path/"sub") as tmp: (tmp/"images").mkdir(); (tmp/"images"/"1.png").write_text("1")
    (tmp_path/"sub"/"images"/"picture.png").write_text("mine")
    with pytest.raises(InputError, match="images/picture.png"):
        with new_folder(tmp_path/"sub", force=True): pass
    shutil.rmtree(tmp_path/"deep"), shutil.rmtree(tmp_path/"sub")
    with pytest.raises(InputError, match="late.txt"):      # it came while we worked
        with new_folder(tmp_path/"new", force=True) as tmp: (tmp_path/"new").mkdir(); (tmp_path/"new"/"late.txt").write_text("mine")
    assert {p.name: p.read_text() for p in tmp_path.rglob("*") if p.is_file() and p.name not in ("a", ".freerep")} == {n: "mine" for n in ("notes.txt", "picture.png", "file", "late.txt")}


def test_new_folder_takes_its_parents_back(tmp_path):
    "Those that it made, unless something else has come into them"
    (tmp_path/"mine").mkdir()
    for other in (False, True):
        with pytest.raises(ZeroDivisionError):
            with new_folder(tmp_path/"mine"/"a"/"b"/"run") as tmp:
                if other: (tmp_path/"mine"/"a"/"x").write_text("x")
                1/0
        assert [p.name for p in tmp_path.rglob("*")] == (["mine", "a", "x"] if other else ["mine"])


def test_what_a_user_made_is_kept(tmp_path):
    (tmp_path/"out").mkdir()
    (tmp_path/"out/mine.txt").write_text("mine")
    for bad in (tmp_path/"out", tmp_path/"out/mine.txt"):
        with pytest.raises(InputError, match="exists already"): check_free(bad)
    with pytest.raises(InputError, match="mine.txt"), new_folder(tmp_path/"out", force=True): pass
    assert (tmp_path/"out/mine.txt").read_text() == "mine"


def test_streams_are_independent_of_their_length():
    "Streams that differ only by zeros at the end are different streams"
    first = {rng(*names).random() for names in [(1,), (1, 0), (1, 0, 0), (0,), (0, 1), (1, "a"), (1, "b"), (1, "a", 0)]}
    assert len(first) == 8


def test_seeded_gives_the_state_back():
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    with seeded(1): torch.rand(7)
    assert torch.equal(torch.rand(3), want)


def test_weights_survive_the_round_trip(tmp_path):
    shared = torch.arange(6.).view(2, 3)
    save_tensors({"a": shared, "b": shared.t(), "c": shared[1]}, tmp_path/"w.safetensors")
    got = load_tensors(tmp_path/"w.safetensors")
    assert all(torch.equal(got[k], v) for k, v in {"a": shared, "b": shared.t(), "c": shared[1]}.items())


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth", "w.ckpt"])
def test_garbage_is_refused(tmp_path, name):
    (tmp_path/name).write_bytes(os.urandom(200))
    with pytest.raises(InputError, match=name): load_tensors(tmp_path/name)
    with pytest.raises(InputError, match="does not exist"): load_tensors(tmp_path/"other.pth")


@dataclasses.dataclass(frozen=True)
class Cfg:
    lr: float = 1.
    n: int = 2
    name: str = "a"
    stride: int | None = 4
    on: bool = True


@pytest.mark.parametrize("pair, key, value", [("lr=1e-5", "lr", 1e-5), ("n=7", "n", 7), ("name=b=c", "name", "b=c"),
                                              ("stride=none", "stride", None), ("stride=3", "stride", 3), ("on=false", "on", False)])
def test_settings_are_typed(pair, key, value):
    got = getattr(override(Cfg(), [pair]), key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("pair", ["lr=fast", "n=1.5", "on=perhaps", "nn=3", "n"])
def test_wrong_settings_are_errors(pair):
    with pytest.raises(InputError): override(Cfg(), [pair])


def test_json_has_no_nan(tmp_path):
    write_json({"a": np.array([1., np.nan]), "b": torch.tensor(2), "c": np.inf, 3: {"d": np.bool_(True)}}, tmp_path/"a.json")
    assert read_json(tmp_path/"a.json") == {"a": [1., None], "b": 2, "c": None, "3": {"d": True}}


@dataclasses.dataclass(frozen=True, init=False)
class Tea(Config):
    degrees: float = 90.
    minutes: int = 3
    sugar: int | None = None
    leaf: str = "green"
    steps: tuple[float, ...] = (1., 2.)
    sweet: bool = False
    presets = dict(paper={}, black=dict(degrees=100., leaf="black", steps=[3., 4.]))
    choices, least, positive = dict(leaf=("green", "black")), dict(minutes=1, sugar=0), ("degrees",)
    def _check(self):
        if self.sweet and not self.sugar: raise InputError("sweet without sugar")


def test_config_fills_in_presets_and_changes():
    assert Tea("black", minutes=4) == Tea(preset="black", degrees=100., leaf="black", steps=(3., 4.), minutes=4)
    assert Tea() == Tea("paper") != Tea("black") and Tea("black").steps == (3., 4.) and Tea(sugar=None).sugar is None
    assert override(Tea("black"), ["sugar=2", "sweet=yes", "steps=5"]) == Tea("black", sugar=2, sweet=True, steps=[5.])
    assert [f.name for f in dataclasses.fields(Tea)] == ["preset", "degrees", "minutes", "sugar", "leaf", "steps", "sweet"]
    assert Tea(**dataclasses.asdict(Tea("black"))) == Tea("black") and hash(Tea()) == hash(Tea())
    with pytest.raises(dataclasses.FrozenInstanceError): Tea().minutes = 1


@pytest.mark.parametrize("bad, why", [
    (dict(preset="mint"), "unknown preset 'mint': the presets are paper, black"), (dict(sugars=1), "unknown setting 'sugars': the settings are preset, degrees"),
    (dict(leaf="mint"), "leaf='mint': expected one of green, black"), (dict(leaf=None), "leaf=None: expected one of"), (dict(minutes=0), "minutes=0: expected at least 1"),
    (dict(minutes=None), "minutes=None: expected at least 1"), (dict(minutes="4"), "minutes=4: expected at least 1"), (dict(sugar=-1), "sugar=-1: expected at least 0"),
    (dict(degrees=0), "degrees=0: expected a number above 0"), (dict(degrees=None), "degrees=None: expected a number above 0"), (dict(sweet=True), "sweet without sugar"),
    (dict(preset="black", steps=(1., float("nan"))), "steps=.*nan.*: expected a finite number")])
def test_config_refuses_what_cannot_work(bad, why):
    with pytest.raises(InputError, match=why): Tea(**bad)
    if set(bad) & {"degrees", "sugar", "leaf"} and None not in bad.values():
        with pytest.raises(InputError, match=why): override(Tea(), bad)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float32("nan")])
@pytest.mark.parametrize("field", ["degrees", "minutes", "sugar"])
def test_config_takes_finite_numbers_only(field, value):
    with pytest.raises(InputError, match=f"{field}="): Tea(**{field: value})
