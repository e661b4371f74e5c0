"""The ground: files, seeds, settings, weights."""
import dataclasses
import errno
import os
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
    assert os.listdir(out) == ["a"] and os.listdir(tmp_path) == ["run"]


def test_what_a_user_made_is_kept(tmp_path):
    (tmp_path/"out").mkdir()
    (tmp_path/"out/mine.txt").write_text("mine")
    for bad in (tmp_path/"out", tmp_path/"out/mine.txt"):
        with pytest.raises(InputError, match="exists already"): check_free(bad)
    with pytest.raises(RuntimeError), new_folder(tmp_path/"out", force=True) as tmp: raise RuntimeError
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
