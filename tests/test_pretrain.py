"""From a folder of frames to a run: settings, data, files, resume, faults, several processes."""
import dataclasses, errno, json, math, os, pickle, random, shutil, signal, socket, subprocess, sys, threading, time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

import freerep.core
import freerep.pretraining as P
from freerep.bags import temperature
from freerep.core import InputError, load_tensors, override, read_json, rng, seeded
from freerep.encoder import BACKBONES, SmallNet, TrackletEncoder
from freerep.learner import Callback
from freerep.pretraining import *
from freerep.sources import open_source
from test_learner import Forked, kill_at_work, same_run

TIMING = ["frames_per_s", "seconds"]
CFG = dict(preset="tiny", length=4, stride=1, n_frames=2, size=16, d=16, layers=1, heads=2, ff=16, out=8, kappa=2, bags=4, epochs=3, steps=None, lr=1e-3, workers=0)
def config(**changes): return PretrainConfig(**{**CFG, **changes})

def write_frames(folder, videos=3, frames=24, seed=0):
    "Folders of small pictures, each video with a pattern of its own"
    for v in range(videos):
        r, own = rng(seed, "frames", v), Path(folder)/f"video{v}"
        own.mkdir(parents=True)
        base = r.integers(0, 256, (8, 10, 3))
        for t in range(frames): Image.fromarray(np.roll(base, t, 0).repeat(4, 0).repeat(4, 1).astype(np.uint8)).save(own/f"{t}.png")
    return Path(folder)

@pytest.fixture(scope="module")
def frames(tmp_path_factory): return write_frames(tmp_path_factory.mktemp("data")/"frames")

@pytest.fixture(autouse=True)
def fresh_notes(): freerep.core._noted.clear()

@pytest.fixture(autouse=True)
def quick_plot(request, monkeypatch):
    "The picture of the loss takes longer than these trainings; one test looks at the real one"
    if request.function is not test_a_run: monkeypatch.setattr(P, "plot_log", lambda log: P.Figure(figsize=(.1, .1)))

class StopAt(Callback):
    def __init__(self, step): self.at = step
    def before_batch(self):
        if self.learn.step == self.at: os.kill(os.getpid(), signal.SIGINT)


# ---- settings

def test_paper_preset_has_the_numbers_of_the_paper():
    c = PretrainConfig()
    want = dict(preset="paper", length=8, stride=4, view="random_crop", scale=(.08, 1), ratio=(3/4, 4/3), size=232, n_frames=None, backbone="resnet50", weights="imagenet", d=256, layers=3,
                heads=8, ff=1024, dropout=.1, out=128, loss="noise_aware", tau=.07, kappa=4, bags=12, tmin=.3, tmax=12, epochs=25, steps=None, lr=1e-5, weight_decay=1e-4,
                schedule="constant", accumulate=1, mean=.45, std=.225)
    assert {k: getattr(c, k) for k in want} == want and c == PretrainConfig("paper") == PretrainConfig(preset="paper")
    assert c.bags*(1 + c.kappa) == 60


def test_config_is_frozen_and_changes_make_another():
    c = PretrainConfig(preset="laptop", epochs=5)
    assert (c.backbone, c.size, c.epochs, c.preset) == ("lite0", 112, 5, "laptop")
    with pytest.raises(dataclasses.FrozenInstanceError): c.lr = 1
    assert dataclasses.replace(c, lr=.5).lr == .5 and dataclasses.replace(c, lr=.5).size == 112
    assert override(c, ["stride=2", "scale=0.5,0.9", "distinct_videos=yes", "weights=x.pth"]) == PretrainConfig("laptop", epochs=5, stride=2, scale=(.5, .9), distinct_videos=True, weights="x.pth")
    with pytest.raises(InputError, match="unknown setting 'sise'.*size"): override(c, ["sise=3"])


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["paper", "laptop", "tiny"]), st.fixed_dictionaries({}, optional=dict(epochs=st.integers(0, 99), lr=st.floats(1e-9, 10), stride=st.none() | st.integers(1, 60),
       scale=st.tuples(st.floats(.01, .5), st.floats(.5, 1)), loss=st.sampled_from(["supcon", "noise_aware_all"]), distinct_videos=st.booleans())))
def test_config_survives_json(preset, changes):
    c = PretrainConfig(preset, **changes)
    assert PretrainConfig(**json.loads(json.dumps(dataclasses.asdict(c)))) == c
    assert all(getattr(c, k) == v for k, v in changes.items())


@pytest.mark.parametrize("bad,why", [(dict(preset="huge"), "unknown preset 'huge'.*paper, laptop, tiny"), (dict(lrr=1), "unknown setting 'lrr'"), (dict(loss="x"), "loss='x'.*supcon"),
    (dict(backbone="vit"), "backbone='vit'"), (dict(view="box"), "view='box'.*full_frame"), (dict(schedule="step"), "schedule='step'.*cosine"), (dict(size=0), "size=0: expected at least 8"),
    (dict(epochs=-1), "epochs=-1"), (dict(accumulate=0), "accumulate=0"), (dict(lr=0.), "lr=0.0"), (dict(lr=math.nan), "lr=nan"), (dict(tau=-1), "tau=-1"), (dict(std=0), "std=0"),
    (dict(n_frames=0), "n_frames=0"), (dict(steps=-2), "steps=-2"), (dict(workers=-1), "workers=-1"), (dict(save_minutes=math.nan), "save_minutes=nan")])
def test_settings_that_cannot_work(bad, why):
    with pytest.raises(InputError, match=why): PretrainConfig(**bad)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(PretrainConfig) if isinstance(f.default, (int, float)) and not isinstance(f.default, bool)] + ["steps", "n_frames"])
def test_numbers_are_finite(field):
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(InputError, match=f"{field}="): PretrainConfig(**{field: value})


@pytest.mark.parametrize("bad", [dict(bags=1), dict(kappa=0), dict(tmin=0.), dict(scale=(0., 1.)), dict(length=0), dict(stride=0), dict(heads=3), dict(weights="missing.pth"), dict(weights="imagenet")])
def test_wrong_settings_leave_nothing_behind(frames, tmp_path, bad):
    with pytest.raises(InputError): pretrain(frames, config(**bad), out=tmp_path/"run")
    assert not (tmp_path/"run").exists()


# ---- what a run is

def test_a_run(frames, tmp_path):
    run = pretrain(frames, config(), out=tmp_path/"a")
    assert sorted(p.name for p in (tmp_path/"a").iterdir()) == ["config.json", "last.safetensors", "log.csv", "loss.png", "state"]
    assert [p.name for p in (tmp_path/"a"/"state").iterdir()] == ["last.pt"]
    facts, log = read_json(tmp_path/"a"/"config.json"), run.log
    assert facts["kind"] == "pretrain" and facts["seed"] == 0 and facts["processes"] == 1 and facts["device"] == "cpu" and facts["versions"]["torch"] == torch.__version__.split("+")[0]
    assert {k: facts["data"][k] for k in ("videos", "frames", "tracklets")} == dict(videos=3, frames=72, tracklets=18)
    assert facts["data"]["sources"] == [dict(path=str(frames), kind="frames", videos=3, frames=72, tracklets=18)]
    assert list(log) == ["step", "epoch", "loss", "temperature", "lr", "frames_per_s", "seconds"] and len(log) == 3*(18//4)
    assert np.allclose(log.temperature, [float(temperature(e/3, .3, 12)) for e in range(3) for _ in range(4)], rtol=1e-5)
    assert log.lr.max() <= 1e-3 and log.lr.iloc[-1] < .2*log.lr.max() and (log.frames_per_s > 0).all()
    assert Image.open(tmp_path/"a"/"loss.png").size[0] > 200
    back = load_run(tmp_path/"a")
    assert back.config == run.config == config() and back.settings == dict(length=4, stride=1, n_frames=2, size=16, mean=.45, std=.225)
    model = back.encoder()
    assert not model.training
    for k, v in load_tensors(tmp_path/"a"/"last.safetensors").items(): assert torch.equal(model.state_dict()[k], v)


def test_one_seed_one_run_whatever_the_workers(frames, tmp_path):
    pretrain(frames, config(), out=tmp_path/"0")
    for w in (1, 3):
        pretrain(frames, config(workers=w), out=tmp_path/str(w))
        same_run(tmp_path/"0", tmp_path/str(w))
    pretrain(frames, config(seed=1), out=tmp_path/"other")
    assert not np.allclose(load_run(tmp_path/"other").log.loss, load_run(tmp_path/"0").log.loss)


def test_global_random_state_is_left_alone(frames, tmp_path):
    torch.manual_seed(7); before = torch.get_rng_state()
    pretrain(frames, config(epochs=1), out=tmp_path/"a")
    assert torch.equal(before, torch.get_rng_state())


def test_zero_epochs_is_the_untrained_encoder(frames, tmp_path):
    run, new = pretrain(frames, config(epochs=0), out=tmp_path/"a"), new_encoder(config())
    for k, v in run.encoder().state_dict().items(): assert torch.equal(v, new.state_dict()[k])
    assert len(run.log) == 0


@pytest.mark.parametrize("steps,temps", [(3, [.3]*3), (6, [.3]*4 + [float(temperature(.5, .3, 12))]*2), (99, None)])
def test_steps_cap_and_curriculum(frames, tmp_path, steps, temps):
    log = pretrain(frames, config(steps=steps), out=tmp_path/"a").log
    assert len(log) == min(steps, 12)
    if temps: assert np.allclose(log.temperature, temps, rtol=1e-5)


def test_constant_schedule_and_accumulation(frames, tmp_path):
    log = pretrain(frames, config(schedule="constant", accumulate=3), out=tmp_path/"a").log
    assert (log.lr == 1e-3).all() and len(log) == 3*2


@pytest.mark.parametrize("loss", ["noise_aware", "noise_aware_all", "supcon"])
@pytest.mark.parametrize("view", ["random_crop", "full_frame"])
def test_losses_and_views(frames, tmp_path, loss, view):
    run = pretrain(frames, config(loss=loss, view=view, steps=2), out=tmp_path/"a")
    model, batches = new_encoder(run.config), P._batches(run.config, *training_data(frames, run.config))
    clips, mask = next(iter(batches))
    with seeded(0): z = model.train().project(model((clips.flatten(0, 1)/255 - .45)/.225)).unflatten(0, (4, 3))
    assert abs(P.LOSSES[loss](z, .07).item() - run.log.loss[0]) < 1e-4


def test_full_frame_view_shows_the_whole_frame(frames):
    cfg = config(view="full_frame", n_frames=None)
    batches = P._batches(cfg, *training_data(frames, cfg))
    anchor = batches.data.table.iloc[next(iter(batches.sampler))[0, 0]]
    want = open_source(frames)[anchor.video].read(range(anchor.start_frame, anchor.end_frame), size=16)
    assert np.array_equal(next(iter(batches))[0][0, 0].permute(0, 2, 3, 1).numpy(), want)


def test_training_lowers_the_loss(frames, tmp_path):
    log = pretrain(frames, config(epochs=15, lr=5e-3, tmax=.3), out=tmp_path/"a").log
    assert log.loss.tail(12).mean() < log.loss.head(8).mean() - .1


def test_no_annotation_is_touched(frames, tmp_path):
    class Sealed:
        def __init__(self, video): self._video = video
        def __getattr__(self, name):
            if name in ("annotations", "mask", "has_annotations", "labels"): raise AssertionError(f"{name} was read")
            return getattr(self._video, name)
    src = open_source(frames)
    src.videos = [Sealed(v) for v in src.videos]; src._by_name = {v.name: v for v in src.videos}
    with pytest.raises(AssertionError): src.videos[0].annotations
    pretrain(src, config(), out=tmp_path/"a"), pretrain(frames, config(), out=tmp_path/"b")
    same_run(tmp_path/"a", tmp_path/"b")


# ---- data

def test_several_sources(frames, tmp_path):
    other = write_frames(tmp_path/"more", videos=2, frames=16, seed=5)       # its videos have names that the first source has too
    run = pretrain([frames, open_source(other)], config(epochs=1), out=tmp_path/"a")
    data = read_json(run.path/"config.json")["data"]
    assert (data["videos"], data["tracklets"]) == (5, 18 + 8) and [s["tracklets"] for s in data["sources"]] == [18, 8]
    _, table = training_data([frames, other], config())
    batches = P._batches(config(), *training_data([frames, other], config()))
    for bags in batches.sampler:
        for bag in bags: assert len({(table.source[i], table.video[i]) for i in bag}) == 1
    with pytest.raises(InputError, match="given twice"): pretrain([frames, str(frames)], config(), out=tmp_path/"b")
    with pytest.raises(InputError, match="no source"): pretrain([], config(), out=tmp_path/"b")


def test_training_split(frames, capsys):
    src = open_source(frames)
    src.splits = dict(train=["video0"], test=["video2"])        # video1 belongs to none
    kept, table = training_data(src, config())
    assert [v.name for v in kept[0]] == ["video0", "video1"] and set(table.video) == {"video0", "video1"}
    assert "trains on 2 videos; 1 belong to another split" in capsys.readouterr().err
    src = open_source(frames); src.splits = dict(train=[], test=["video0", "video1", "video2"])
    assert len(training_data(src, config())[0][0]) == 3 and "no video belongs to its training split" in capsys.readouterr().err


def test_a_single_video_and_a_batch_larger_than_the_data(tmp_path, capsys):
    one = write_frames(tmp_path/"one", videos=1, frames=14)
    log = pretrain(one, config(bags=60, kappa=4), out=tmp_path/"a").log
    assert len(log) == 3 and np.isfinite(log.loss).all() and "fewer than bags=60" in capsys.readouterr().err


@pytest.mark.parametrize("n,why", [(3, "no video gives a tracklet"), (7, "at least 2")])
def test_too_little_to_learn_from(tmp_path, n, why):
    with pytest.raises(InputError, match=why): pretrain(write_frames(tmp_path/"d", videos=1, frames=n), config(), out=tmp_path/"a")
    assert not (tmp_path/"a").exists()


def test_unreadable_frames_and_bags(tmp_path, capsys):
    data = write_frames(tmp_path/"d", videos=4)
    for t in (1, 5, 9, 13): (data/"video0"/f"{t}.png").write_bytes(b"damaged")
    for t in range(8, 12): (data/"video1"/f"{t}.png").write_bytes(b"damaged")
    for t in range(24): (data/"video2"/f"{t}.png").write_bytes(b"damaged") if t else None
    for w in (0, 2): pretrain(data, config(workers=w), out=tmp_path/str(w))
    same_run(tmp_path/"0", tmp_path/"2")
    told = capsys.readouterr().err
    assert "frames could not be read and were left out: " in told and "of video2" in told and "times a bag without a readable frame was replaced" in told


def test_nothing_readable(tmp_path):
    data = write_frames(tmp_path/"d", videos=1)
    for t in range(1, 24): (data/"video0"/f"{t}.png").write_bytes(b"damaged")
    with pytest.raises(InputError, match="not one bag of a batch can be read.*freerep info"): pretrain(data, config(), out=tmp_path/"a")


def test_replaced_bag_is_another_of_the_batch(frames):
    batches = P._batches(config(), *training_data(frames, config()))
    bags = next(iter(batches.sampler))
    whole, _, none = batches._load(0, bags)
    assert none == 0
    real, bad = batches.data.batch, int(bags[1, 0])
    def batch(bags, epoch=0):
        if bad in bags[:, 0]: raise P.EmptyClip("no")
        return real(bags, epoch)
    batches.data.batch = batch
    clips, mask, replaced = batches._load(0, bags)
    assert replaced == 1 and clips.shape == whole.shape
    for got in clips: assert any(torch.equal(got, whole[i]) for i in (0, 2, 3))


def test_resumed_epoch_reads_nothing_of_what_was_done(frames):
    batches = P._batches(config(), *training_data(frames, config()))
    want, read, real = list(batches), [], batches.data.batch
    batches.data.batch = lambda bags, epoch=0: read.append(1) or real(bags, epoch)
    got = list(batches.iter_from(3))
    assert len(read) == len(got) == 1 and torch.equal(got[0][0], want[3][0])


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_read_ahead(workers):
    started, lock = [], threading.Lock()
    def f(x):
        with lock: started.append(x)
        time.sleep(.002*(x % 3))
        if x == 20: raise KeyError(x)
        return x*x
    def items():
        for i in range(100): yield i
    stream, got = read_ahead(f, items(), workers), []
    for _ in range(10):
        got.append(next(stream))
        assert len(started) <= len(got) + workers
    assert got == [i*i for i in range(10)]
    with pytest.raises(KeyError): list(stream)
    assert len(started) <= 21 + workers and 20 in started
    stream = read_ahead(f, items(), workers); next(stream); stream.close()
    assert list(read_ahead(f, [], workers)) == [] and list(read_ahead(f, [3], workers)) == [9]


def test_video_file(shared_data, tmp_path):
    video = shared_data/"ldpolypvideo"/"video_101.mp4"
    for w in (0, 2): run = pretrain(video, PretrainConfig("tiny", size=32, epochs=2, workers=w), out=tmp_path/str(w))
    assert read_json(run.path/"config.json")["data"]["frames"] == 181 and len(run.log) == 2 and run.settings["stride"] is None
    same_run(tmp_path/"0", tmp_path/"2")


# ---- interrupt, kill, resume

@pytest.mark.parametrize("step", [0, 5, 7])
def test_interrupt_and_resume(frames, tmp_path, step, capsys):
    pretrain(frames, config(), out=tmp_path/"a")
    with pytest.raises(KeyboardInterrupt): pretrain(frames, config(), out=tmp_path/"b", cbs=[StopAt(step)])
    assert f"interrupted after step {step + 1} of 12, go on with --resume" in capsys.readouterr().err
    assert (tmp_path/"b"/"loss.png").exists() and len(pd.read_csv(tmp_path/"b"/"log.csv")) == step + 1
    pretrain(frames, config(workers=2, save_minutes=0), out=tmp_path/"b", resume=True)      # these two may change
    same_run(tmp_path/"a", tmp_path/"b")
    before = (tmp_path/"b"/"last.safetensors").read_bytes()
    pretrain(frames, config(), out=tmp_path/"b", resume=True)
    assert (tmp_path/"b"/"last.safetensors").read_bytes() == before


SCRIPT = """
import sys; sys.path.insert(0, {repo!r})
import torch; torch.set_num_threads(1)
from freerep.pretraining import *
pretrain({frames!r}, PretrainConfig(**{cfg!r}), out={out!r}, resume=True)
"""

def test_sigkill_at_random_moments(frames, tmp_path):
    "Killed from outside at random moments, before the first step and later, resumed each time: the end is that of a quiet run"
    here, r, cfg = Path(__file__).resolve().parent, random.Random(1), dict(epochs=20, save_minutes=0, workers=1)
    (tmp_path/"run.py").write_text(SCRIPT.format(repo=str(here.parent), frames=str(frames), cfg={**CFG, **cfg}, out=str(tmp_path/"b")))
    def real(): return subprocess.Popen([sys.executable, tmp_path/"run.py"], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    def forked(): return Forked(lambda: pretrain(frames, config(**cfg), out=tmp_path/"b", resume=True))
    kills = [kill_at_work(start, tmp_path/"b"/file, r.uniform(0, .3)) for start, file in [(forked, "config.json"), (real, "log.csv"), *[(forked, "log.csv")]*4]]
    assert kills[1] and sum(kills) >= 3
    pretrain(frames, config(**cfg), out=tmp_path/"b", resume=True), pretrain(frames, config(**cfg), out=tmp_path/"a")
    same_run(tmp_path/"a", tmp_path/"b")


@pytest.fixture(scope="module")
def begun_once(frames, tmp_path_factory):
    out = tmp_path_factory.mktemp("begun")/"run"
    with pytest.raises(KeyboardInterrupt): pretrain(frames, config(), out=out, cbs=[StopAt(2)])
    return out

@pytest.fixture
def begun(begun_once, tmp_path): return shutil.copytree(begun_once, tmp_path/"run")

@pytest.mark.parametrize("key,value", [("lr", 2e-3), ("seed", 1), ("epochs", 4), ("size", 24), ("kappa", 3), ("bags", 5), ("tmax", 9.), ("scale", (.2, 1.)), ("loss", "supcon"), ("d", 32), ("dropout", .2), ("stride", 2)])
def test_resume_with_other_settings_is_refused(frames, begun, key, value):
    before = {p: p.read_bytes() for p in begun.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match=f"begun with {key}=.*now {key}="): pretrain(frames, config(**{key: value}), out=begun, resume=True)
    assert before == {p: p.read_bytes() for p in begun.rglob("*") if p.is_file()}


def test_resume_with_other_data_is_refused(frames, begun, tmp_path):
    with pytest.raises(InputError, match="data videos=3, and now data videos=2"): pretrain(open_source(frames).subset(["video0", "video1"]), config(), out=begun, resume=True)
    with pytest.raises(InputError, match="data frames=72"): pretrain(write_frames(tmp_path/"longer", frames=25), config(), out=begun, resume=True)
    with pytest.raises(InputError, match="data fingerprint"): pretrain(write_frames(tmp_path/"pixels", seed=9), config(), out=begun, resume=True)
    moved = shutil.copytree(frames, tmp_path/"moved")
    pretrain(moved, config(), out=begun, resume=True), pretrain(frames, config(), out=tmp_path/"whole")
    same_run(begun, tmp_path/"whole")


def test_resume_where_there_is_nothing(frames, tmp_path, capsys):
    pretrain(frames, config(epochs=1), out=tmp_path/"a", resume=True)
    assert "no run to resume" in capsys.readouterr().err
    (tmp_path/"other").mkdir(); (tmp_path/"other"/"thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="exists already"): pretrain(frames, config(), out=tmp_path/"other", resume=True)
    assert [p.name for p in (tmp_path/"other").iterdir()] == ["thesis.tex"]


def test_resume_of_broken_files(frames, begun):
    state = begun/"state"/"last.pt"
    good = state.read_bytes()
    state.write_bytes(good[:1000])
    with pytest.raises(InputError, match="last.pt was refused"): pretrain(frames, config(), out=begun, resume=True)
    state.write_bytes(good); (begun/"config.json").write_text("{")
    with pytest.raises(InputError, match="config.json is not valid JSON"): pretrain(frames, config(), out=begun, resume=True)


def test_overwriting(frames, tmp_path):
    out = tmp_path/"a"
    pretrain(frames, config(), out=out)
    with pytest.raises(InputError, match="exists already.*--force"): pretrain(frames, config(), out=out)
    (out/"notes.txt").write_text("mine")
    before = (out/"last.safetensors").read_bytes()
    with pytest.raises(InputError): pretrain(tmp_path/"nowhere", config(), out=out, force=True)
    assert (out/"last.safetensors").read_bytes() == before           # a mistake costs nothing
    pretrain(frames, config(seed=3), out=out, force=True), pretrain(frames, config(seed=3), out=tmp_path/"b")
    same_run(out, tmp_path/"b")
    assert (out/"notes.txt").read_text() == "mine"


# ---- faults

def test_learning_rate_that_explodes(frames, tmp_path):
    with pytest.raises(InputError, match="step [0-9]+ .*lower learning rate"): pretrain(frames, config(lr=1e30, schedule="constant"), out=tmp_path/"a")
    assert (tmp_path/"a"/"loss.png").exists()


@pytest.mark.parametrize("name", ["config.json", "last.pt", "last.safetensors"])
def test_full_disk(frames, tmp_path, monkeypatch, name):
    real = os.replace
    def replace(a, b):
        if Path(b).name == name: raise OSError(errno.ENOSPC, "No space left on device")
        return real(a, b)
    with monkeypatch.context() as m:
        m.setattr(os, "replace", replace)
        with pytest.raises(InputError, match=f"no space left on the disk while writing .*{'a' if name == 'config.json' else name}"): pretrain(frames, config(), out=tmp_path/"a")
    assert not (tmp_path/"a"/name).exists() and not list((tmp_path/"a").rglob("*.tmp"))
    pretrain(frames, config(), out=tmp_path/"a", resume=True), pretrain(frames, config(), out=tmp_path/"b")
    same_run(tmp_path/"a", tmp_path/"b")


@pytest.mark.parametrize("kind", ["retriever", "finetune"])
def test_a_run_of_another_kind_is_named(frames, tmp_path, kind):
    run = pretrain(frames, config(epochs=0), out=tmp_path/"a")
    facts = {**read_json(run.path/"config.json"), "kind": kind}
    freerep.core.write_json(facts, run.path/"config.json")
    said = f"holds a run of `freerep {kind}`: expected one of `freerep train`"
    with pytest.raises(InputError, match=said): load_run(run.path)
    with pytest.raises(InputError, match=said): pretrain(frames, config(epochs=0), out=run.path, resume=True)
    assert read_json(run.path/"config.json") == facts
    freerep.core.write_json({**facts, "kind": "cake"}, run.path/"config.json")
    with pytest.raises(InputError, match="does not describe a run of `freerep train`"): load_run(run.path)


def test_what_decides_a_run():
    "Settings, counts and fingerprints do; where the data lie and what they are called, when to save, device and versions do not"
    old = dict(kind="x", config=dict(lr=.1, scale=(.1, 1.), workers=1), data=dict(images=4, fingerprint="ab", path="/a", names={1: "a"}), teacher=dict(name="n", fingerprint="cd"), by="me",
               processes=1, device="cpu", versions=dict(torch="1"))
    stored, compare = json.loads(json.dumps(old)), lambda **kw: P._compare("runs/a", stored, {**old, **kw})
    compare(), compare(device="cuda", config={**old["config"], "workers": 9}, data={**old["data"], "path": "/b", "names": {}})
    for change, why in ((dict(config={**old["config"], "lr": .2}), "begun with lr=0.1, and now lr=0.2"), (dict(config={**old["config"], "scale": (.2, 1.)}), "scale="), (dict(processes=2), "processes=1"),
                        (dict(data={**old["data"], "images": 5}), "data images=4, and now data images=5"), (dict(data={**old["data"], "fingerprint": "x"}), "data fingerprint=ab"),
                        (dict(teacher=dict(name="n", fingerprint="x")), "teacher fingerprint=cd"), (dict(by="you"), "by=me, and now by=you")):
        with pytest.raises(InputError, match=why): compare(**change)


def test_load_run_refuses(frames, begun, tmp_path):
    for path, why in [(tmp_path/"none", "does not exist"), (frames, "holds no run"), (begun, "no last.safetensors.*--resume")]:
        with pytest.raises(InputError, match=why): load_run(path)
    facts = read_json(begun/"config.json")
    for text, why in [("[]", "does not describe"), ("{}", "does not describe"), (json.dumps({**facts, "config": {**facts["config"], "new": 1}}), "unknown setting 'new'")]:
        (begun/"config.json").write_text(text); (begun/"last.safetensors").write_bytes(b"x")
        with pytest.raises(InputError, match=why): load_run(begun)
    (begun/"config.json").write_text(json.dumps(facts))
    with pytest.raises(InputError, match="last.safetensors was refused"): load_run(begun).encoder()
    freerep.core.save_tensors(new_encoder(config(d=32)).state_dict(), begun/"last.safetensors")
    with pytest.raises(InputError, match="do not fit.*wrong shape"): load_run(begun).encoder()


class Evil:
    def __reduce__(self): return os.system, ("touch EVIL",)

def test_released_checkpoint_is_a_run(tmp_path):
    with seeded(0): model = TrackletEncoder()
    names = {k: f"mve.sfe.{k}" if k.startswith("backbone") else k if k.startswith("projector") else f"mve.{k}" for k in model.state_dict()}
    torch.save({"state_dict": {names[k]: v for k, v in model.state_dict().items()}, "epoch": 24}, tmp_path/"released.ckpt")
    run = load_run(tmp_path/"released.ckpt")
    for k, v in run.encoder().state_dict().items(): assert torch.equal(v, model.state_dict()[k])
    assert run.config == PretrainConfig() and run.settings == dict(length=8, stride=4, n_frames=None, size=232, mean=.45, std=.225) and len(run.log) == 0
    (tmp_path/"evil.ckpt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InputError, match="evil.ckpt was refused"): load_run(tmp_path/"evil.ckpt").encoder()
    assert not Path("EVIL").exists()


# ---- several processes

GROUP = dict(backbone="group", dropout=0., epochs=2, lr=1e-3, bags=4)

def train_group(frames, out, **kw):
    "Group normalisation: no statistics of the batch, so that sharing the batch must change nothing"
    BACKBONES["group"] = lambda: (SmallNet(norm="group"), 128)
    return pretrain(frames, config(**GROUP), out=out, device="cpu", **kw)

def one_of_two(rank, frames, folder, ports):
    torch.set_num_threads(1)
    for port, (out, kw) in zip(ports, [("two", {}), ("resumed", dict(cbs=[StopAt(5)] if rank else ())), ("resumed", dict(resume=True))]):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        try: train_group(frames, folder/out, **kw)
        except KeyboardInterrupt: assert kw.get("cbs") is not None

def test_two_processes_train_like_one(frames, tmp_path):
    sockets = [socket.socket() for _ in range(3)]
    for s in sockets: s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets: s.close()
    torch.multiprocessing.spawn(one_of_two, args=(frames, tmp_path, ports), nprocs=2)
    try:
        train_group(frames, tmp_path/"one")
        one, two = (load_tensors(tmp_path/f/"last.safetensors") for f in ("one", "two"))
        for k in one: torch.testing.assert_close(one[k], two[k], rtol=1e-3, atol=2e-5)
        a, b = (pd.read_csv(tmp_path/f/"log.csv").drop(columns=TIMING) for f in ("one", "two"))
        pd.testing.assert_frame_equal(a, b, rtol=1e-4)
        assert len(a) == 8 and read_json(tmp_path/"two"/"config.json")["processes"] == 2
        same_run(tmp_path/"two", tmp_path/"resumed")
        with pytest.raises(InputError, match="begun with processes=2, and now processes=1"): train_group(frames, tmp_path/"two", resume=True)
        with pytest.raises(InputError, match="no.*equally by 3|cannot be shared equally"): P.BagSampler(["a"]*9, range(9), bags=4, world=3)
    finally: BACKBONES.pop("group", None)
