"""The command line as a user meets it: real processes, statuses, messages, files."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from freerep import cli
from freerep.synth import write_procedures

program = [sys.executable, "-c", "import sys; from freerep.cli import main; sys.exit(main())"]


def freerep(*args, **kw):
    "Run the command in a process of its own"
    return subprocess.run([*program, *map(str, args)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **kw)


def said(*args, capsys):
    "Run the command in this process: status, output, errors"
    try: status = cli.main([str(a) for a in args])
    except SystemExit as e: status = e.code
    return status, *capsys.readouterr()


@pytest.fixture(scope="module")
def procedures(tmp_path_factory):
    return write_procedures(tmp_path_factory.mktemp("cli")/"procedures", procedures=2, frames=200, seed=11, workers=1)


@pytest.fixture(scope="module")
def run(procedures):
    out = procedures.parent/"run"
    assert cli.main(["train", str(procedures), "--preset", "tiny", "--set", "steps=3", "workers=0", "--out", str(out)]) == 0
    return out


def test_the_whole_way(procedures, run, tmp_path, capsys):
    "train, embed, search, evaluate: statuses and contracts of the files"
    assert {"config.json", "log.csv", "last.safetensors", "state"} <= {p.name for p in run.iterdir()}
    assert cli.main(["embed", str(procedures), "--run", str(run), "--boxes", "--out", str(tmp_path/"index")]) == 0
    x, table = np.load(tmp_path/"index/embeddings.npy"), pd.read_csv(tmp_path/"index/tracklets.csv")
    assert x.dtype == np.float32 and np.allclose(np.linalg.norm(x, axis=1), 1, atol=1e-5)
    assert list(table)[:14] == "row source video start_frame end_frame stride fps start_s end_s identity x0 y0 x1 y1".split() and len(x) == len(table)
    assert cli.main(["search", str(tmp_path/"index"), "--query", "0", "1", "--top", "2", "--out", str(tmp_path/"hits")]) == 0
    hits = pd.read_csv(tmp_path/"hits/hits.csv")
    assert list(hits)[:6] == ["rank", "row", "score", "video", "start_s", "end_s"] and len(hits) == 2 and not set(hits.row) & {0, 1}
    assert "://" not in (tmp_path/"hits/report.html").read_text()
    capsys.readouterr()
    assert cli.main(["evaluate", str(tmp_path/"index")]) == 0
    of_index = json.loads(capsys.readouterr().out)
    assert cli.main(["evaluate", str(procedures), "--run", str(run), "--out", str(tmp_path/"m.json")]) == 0
    of_source = json.loads((tmp_path/"m.json").read_text())
    assert of_source["retrieval"] == pytest.approx(of_index["retrieval"]) and of_source["few_shot"] == of_index["few_shot"]
    assert {"mAP", "HR@1", "HR@5", "within_video_mAP", "queries", "skipped"} <= set(of_index["retrieval"])


def test_embeddings_from_elsewhere_are_scored(tmp_path, capsys):
    "An index needs two files, and an empty meta.json will do"
    columns = "row source video start_frame end_frame stride fps start_s end_s identity x0 y0 x1 y1".split()
    rows = [[i, "elsewhere", f"v{i%2}", 100*i, 100*i + 30, 4, 25., 4.*i, 4.*i + 1.2, f"p{i%3}", 0, 0, 9, 9] for i in range(9)]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path/"tracklets.csv", index=False)
    np.save(tmp_path/"embeddings.npy", np.eye(3, dtype=np.float32)[np.arange(9) % 3])
    (tmp_path/"meta.json").write_text("{}")
    assert cli.main(["evaluate", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["retrieval"]["mAP"] == 1


@pytest.mark.parametrize("args, words", [
    (["train", "{src}", "--preset", "tiny", "--set", "leraning_rate=1", "--out", "{out}"], ["leraning_rate", "settings are"]),
    (["train", "{src}", "--preset", "tiny", "--set", "lr=quick", "--out", "{out}"], ["lr", "float"]),
    (["train", "{src}", "--preset", "huge", "--out", "{out}"], ["huge", "paper"]),
    (["train", "{src}/nothing", "--preset", "tiny", "--out", "{out}"], ["nothing"]),
    (["train", "{empty}", "--preset", "tiny", "--out", "{out}"], ["empty"]),
    (["embed", "{src}", "--run", "{empty}", "--out", "{out}"], ["config.json"]),
    (["embed", "{src}", "--run", "{evil}", "--out", "{out}"], ["evil.ckpt", "code"]),
    (["embed", "{src}", "--run", "{run}", "--out", "{full}"], ["full", "--force"]),
    (["search", "{full}", "--query", "0", "--out", "{out}"], ["embeddings.npy"]),
    (["evaluate", "{src}"], ["--run"]),
    (["evaluate", "{full}"], []),
    (["synth", "{out}", "--frames", "3"], ["frames=3"]),
    (["synth", "{full}"], ["--force"]),
    (["info", "{full}/mine.txt"], ["mine.txt"]),
    (["demo", "--out", "{full}"], ["--force"]),
])
def test_bad_input_is_one_message_and_nothing_half_written(args, words, procedures, run, tmp_path, capsys):
    import torch

    class Attack:
        def __reduce__(self): return os.system, (f"touch {tmp_path}/attacked",)
    for name in ("empty", "full"): (tmp_path/name).mkdir()
    (tmp_path/"full/mine.txt").write_text("mine")
    torch.save({"state_dict": Attack()}, tmp_path/"evil.ckpt")
    where = dict(src=procedures, run=run, out=tmp_path/"out", empty=tmp_path/"empty", full=tmp_path/"full", evil=tmp_path/"evil.ckpt")
    before = sorted(tmp_path.rglob("*"))
    status, out, err = said(*[a.format(**where) for a in args], capsys=capsys)
    assert status == 2 and "Traceback" not in err and all(w in err for w in words), err
    assert sorted(tmp_path.rglob("*")) == before


def test_status_and_message_of_a_real_process(tmp_path):
    done = freerep("info", tmp_path/"nothing")
    assert done.returncode == 2 and "Traceback" not in done.stderr and str(tmp_path/"nothing") in done.stderr and done.stderr.count("\n") == 1
    assert freerep("--version").returncode == 0 and freerep().returncode == 2 and freerep("train", "--help").returncode == 0


def test_help_does_not_wait_for_torch():
    code = "import sys; from freerep.cli import main; main(['--help']); main(['--version']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_interrupt_then_resume(procedures, tmp_path):
    "Ctrl-C gives 130 and says --resume; the resumed run equals one that was never stopped"
    args = ["train", str(procedures), "--preset", "tiny", "--set", "steps=12", "workers=0", "--out"]
    p = subprocess.Popen([*program, *args, str(tmp_path/"a")], stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    log = tmp_path/"a/log.csv"
    while p.poll() is None and not (log.exists() and log.read_text().count("\n") > 3): time.sleep(.02)
    p.send_signal(signal.SIGINT)
    err = p.communicate()[1]
    assert p.returncode == 130 and "--resume" in err and "Traceback" not in err, err
    assert freerep(*args, tmp_path/"a", "--resume").returncode == 0
    assert freerep(*args, tmp_path/"b").returncode == 0
    assert (tmp_path/"a/last.safetensors").read_bytes() == (tmp_path/"b/last.safetensors").read_bytes()


def test_full_disk_is_a_message(procedures, run, tmp_path, monkeypatch, capsys):
    import errno
    from freerep.index import Index
    def no_room(*a, **k): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path/"index"))
    monkeypatch.setattr(Index, "save", no_room)
    status, out, err = said("embed", procedures, "--run", run, "--out", tmp_path/"index", capsys=capsys)
    assert status == 2 and "No space left" in err and not list(tmp_path.iterdir())


def test_a_bug_keeps_its_traceback(monkeypatch):
    def broken(source: str): "A broken command"; raise KeyError("bug")
    monkeypatch.setitem(cli.commands, "broken", broken)
    with pytest.raises(KeyError): cli.main(["broken", "x"])
