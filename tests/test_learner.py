"""The Learner: what it trains, what it survives, and what several processes compute."""
import errno, math, os, pickle, random, signal, subprocess, sys, threading, time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn as nn

from freerep.core import InputError, load_tensors, rng, save_tensors, seeded
from freerep.learner import *
from freerep.losses import noise_aware_loss

TIMING = ["frames_per_s", "seconds"]


class Bags:
    "Random bags of points; a batch depends on (seed, epoch, position) alone"
    def __init__(self, n=5, bags=4, kappa=2, seed=0): self.n, self.bags, self.kappa, self.seed, self.epoch = n, bags, kappa, seed, 0
    def __len__(self): return self.n
    def set_epoch(self, epoch): self.epoch = epoch
    def __iter__(self): return self.iter_from(0)
    def iter_from(self, start): return (self.batch(i) for i in range(start, self.n))
    def batch(self, i):
        x = rng(self.seed, self.epoch, i).standard_normal((self.bags, 1 + self.kappa, 3)) + 3*np.arange(self.bags)[:, None, None]
        return torch.tensor(x, dtype=torch.float32)


def new_model(dropout=.1, seed=0):
    with seeded(seed): return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))

def loss_fn(model, batch): return noise_aware_loss(model(batch), tau=.2)

def make(folder, *, cbs=(), minutes=10., **kw):
    "A learner that keeps everything it has in `folder`"
    model, folder = new_model(), Path(folder)
    own = [ScheduleCB(cosine_schedule), LogCB(folder/"log.csv", count=lambda b: b.shape[0]*b.shape[1], wave=lambda l: l.epoch/2),
           CheckpointCB(folder/"state"/"last.pt", minutes=minutes, weights=folder/"last.safetensors"), *cbs]
    return Learner(model, kw.pop("batches", None) or Bags(), **{**dict(loss_fn=loss_fn, opt=torch.optim.AdamW(model.parameters(), lr=.02), epochs=4, cbs=own, device="cpu"), **kw})

def go(folder, seed=0, **kw):
    "Train to the end, from the state in `folder` if there is one"
    learn, state = make(folder, **kw), Path(folder)/"state"/"last.pt"
    with seeded(seed):
        if state.exists(): learn.load(state)
        return learn.fit()

def same_run(a, b):
    "Weights and log of two runs are equal, bit for bit and byte for byte apart from the timing"
    wa, wb = (load_tensors(Path(f)/"last.safetensors") for f in (a, b))
    assert wa.keys() == wb.keys() and all(torch.equal(wa[k], wb[k]) for k in wa)
    la, lb = (pd.read_csv(Path(f)/"log.csv", dtype=str).drop(columns=TIMING) for f in (a, b))
    pd.testing.assert_frame_equal(la, lb)
    assert list(la.step.astype(int)) == list(range(1, len(la) + 1))


def test_equals_a_hand_written_loop(tmp_path):
    learn, model, losses = go(tmp_path), new_model(), []
    opt = torch.optim.AdamW(model.parameters(), lr=.02)
    with seeded(0):
        for epoch in range(4):
            for i in range(5):
                b = Bags(); b.set_epoch(epoch)
                opt.param_groups[0]["lr"] = .02*cosine_schedule((5*epoch + i)/20)
                loss = loss_fn(model, b.batch(i)); loss.backward(); opt.step(); opt.zero_grad()
                losses.append(loss.item())
    for p, q in zip(learn.model.parameters(), model.parameters()): assert torch.equal(p, q)
    log = pd.read_csv(tmp_path/"log.csv")
    assert list(log) == ["step", "epoch", "loss", "wave", "lr", "frames_per_s", "seconds"]
    assert np.array_equal(log.loss.astype(np.float32), np.float32(losses))
    assert list(log.epoch) == [1]*5 + [2]*5 + [3]*5 + [4]*5 and list(log.wave) == [0]*5 + [.5]*5 + [1]*5 + [1.5]*5
    assert log.seconds.is_monotonic_increasing and (log.frames_per_s > 0).all()


def test_moments_and_order():
    heard = []
    class Ear(Callback):
        def __init__(self, name, order): self.name, self.order = name, order
        def __getattr__(self, moment):
            if moment.startswith(("before_", "after_")): return lambda: heard.append((moment, self.name))
            raise AttributeError(moment)
    model = new_model()
    Learner(model, Bags(n=2), loss_fn=loss_fn, opt=torch.optim.SGD(model.parameters(), lr=0.), cbs=[Ear("second", 2), Ear("first", 1)], device="cpu").fit()
    moments = ["before_fit", "before_epoch", *["before_batch", "after_batch"]*2, "after_epoch", "after_fit"]
    assert heard == [(m, name) for m in moments for name in ("first", "second")]


def test_loss_falls_and_progress_speaks(tmp_path, capfd):
    go(tmp_path, cbs=[ProgressCB(every=0)], epochs=30)
    log = pd.read_csv(tmp_path/"log.csv")
    assert log.loss.tail(20).mean() < .7*log.loss.head(5).mean()
    out = capfd.readouterr().out
    assert "epoch 30 of 30, step 150 of 150: loss" in out and out.count("epoch") == 30


# ---- interrupted, killed, resumed

class AtStep(Callback):
    order = 50
    def __init__(self, step, do): self.at, self.do = step, do
    def before_batch(self):
        if self.learn.step == self.at: self.do(self.learn)

@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, "stop"])
@pytest.mark.parametrize("step", [0, 7, 14, 19])
def test_interrupt_saves_a_whole_step(tmp_path, how, step):
    go(tmp_path/"a")
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    do = (lambda l: l.stop()) if how == "stop" else (lambda l: os.kill(os.getpid(), how))
    with pytest.raises(KeyboardInterrupt): go(tmp_path/"b", cbs=[AtStep(step, do)])
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert load_tensors(tmp_path/"b"/"state"/"last.pt")["step"] == step + 1
    assert len(pd.read_csv(tmp_path/"b"/"log.csv")) == step + 1
    go(tmp_path/"b", seed=99)      # the seed of the resumed run must not matter
    same_run(tmp_path/"a", tmp_path/"b")


def test_second_interrupt_stops_at_once(tmp_path):
    def twice(learn): learn.stop(); learn.stop()
    with pytest.raises(KeyboardInterrupt): go(tmp_path/"b", cbs=[AtStep(7, twice)])
    assert load_tensors(tmp_path/"b"/"state"/"last.pt")["step"] == 5       # the end of the first epoch
    go(tmp_path/"a"), go(tmp_path/"b")
    same_run(tmp_path/"a", tmp_path/"b")


def test_fit_can_be_called_again_after_an_interrupt(tmp_path):
    go(tmp_path/"a")
    learn = make(tmp_path/"b", cbs=[AtStep(7, lambda l: l.stop())])
    with seeded(0):
        with pytest.raises(KeyboardInterrupt): learn.fit()
        learn.fit()
    same_run(tmp_path/"a", tmp_path/"b")


def test_works_in_a_thread(tmp_path):
    t = threading.Thread(target=go, args=(tmp_path,)); t.start(); t.join()
    assert len(pd.read_csv(tmp_path/"log.csv")) == 20


def in_child(f):
    "Run `f` in a forked child; the signal that ended it (0: it ended by itself)"
    child = os.fork()
    if child == 0:
        try: f()
        except BaseException: os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"the child failed with status {status}"
    return status

def kill_at(call, name, *, after):
    "SIGKILL this process at the `call`-th use of `os.<name>`, before or after it took place"
    real, seen = getattr(os, name), [0]
    def deadly(*args, **kw):
        seen[0] += 1
        if seen[0] == call and not after: os.kill(os.getpid(), signal.SIGKILL)
        out = real(*args, **kw)
        if seen[0] == call and after: os.kill(os.getpid(), signal.SIGKILL)
        return out
    setattr(os, name, deadly)

@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_every_kind_of_moment(tmp_path, name, after):
    "Dies at the 1st, 2nd, ... file operation of the run, resumes, dies at the next: nothing may be lost or doubled"
    go(tmp_path/"a")
    def run(call): kill_at(call, name, after=after); go(tmp_path/"b", seed=5 if (tmp_path/"b"/"state"/"last.pt").exists() else 0, minutes=0)
    deaths = sum(in_child(lambda: run(call)) == signal.SIGKILL for call in [1, 2, 3, 4, 5, 6, 7, 8, 11, 14])
    assert deaths >= 5
    go(tmp_path/"b")
    same_run(tmp_path/"a", tmp_path/"b")
    assert [p.name for p in (tmp_path/"b"/"state").iterdir()] == ["last.pt"]


def test_killed_in_the_middle_of_a_write(tmp_path):
    "Half of the bytes of the new state are on the disk when the process dies"
    def run():
        real, calls = Path.write_bytes, [0]
        def half(self, data):
            calls[0] += 1
            if calls[0] < 8: return real(self, data)
            real(self, bytes(data)[:len(data)//2])
            os.kill(os.getpid(), signal.SIGKILL)
        Path.write_bytes = half
        go(tmp_path/"b", minutes=0)
    assert in_child(run) == signal.SIGKILL
    assert load_tensors(tmp_path/"b"/"state"/"last.pt")["step"] in (6, 7)
    go(tmp_path/"a"), go(tmp_path/"b")
    same_run(tmp_path/"a", tmp_path/"b")


SCRIPT = """
import sys; sys.path[:0] = [{tests!r}, {repo!r}]
import torch; torch.set_num_threads(1)
from test_learner import *
go(sys.argv[1], minutes=0, epochs=30, batches=Slow())
"""

class Slow(Bags):
    "Takes its time, so that a kill finds the run at work"
    def batch(self, i): time.sleep(.004); return super().batch(i)

def kill_at_work(start, log, delay):
    "SIGKILL the process that `start` begins, `delay` seconds after the first new line in `log`; was it still at work?"
    size, p = log.stat().st_size if log.exists() else 0, start()
    while p.poll() is None and (not log.exists() or log.stat().st_size == size): time.sleep(.002)
    time.sleep(delay)
    p.kill()
    return p.wait() == -signal.SIGKILL

class Forked:
    "Runs `f` in a forked child, with the face of `subprocess.Popen`"
    def __init__(self, f):
        self.pid = os.fork()
        self.returncode = None
        if self.pid == 0:
            try: f()
            except BaseException: os._exit(1)
            os._exit(0)
    def poll(self, block=os.WNOHANG):
        if self.returncode is None and (found := os.waitpid(self.pid, block))[0]: self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode
    def wait(self): return self.poll(0)
    def kill(self):
        if self.poll() is None: os.kill(self.pid, signal.SIGKILL)

def test_sigkill_at_random_moments(tmp_path):
    "Killed from outside again and again, a run ends with the weights and the log of one that was left alone"
    here, r = Path(__file__).resolve().parent, random.Random(0)
    (tmp_path/"run.py").write_text(SCRIPT.format(tests=str(here), repo=str(here.parent)))
    def real(): return subprocess.Popen([sys.executable, tmp_path/"run.py", tmp_path/"b"], env={**os.environ, "OMP_NUM_THREADS": "1"})
    def forked(): return Forked(lambda: go(tmp_path/"b", minutes=0, epochs=30, batches=Slow()))
    go(tmp_path/"a", epochs=30)
    kills = [kill_at_work(start, tmp_path/"b"/"log.csv", r.uniform(0, .15)) for start in (real, *[forked]*7)]
    assert sum(kills) >= 4
    p = real(); assert p.wait() == 0
    same_run(tmp_path/"a", tmp_path/"b")


def test_batches_without_iter_from_resume_too(tmp_path):
    batches = [Bags().batch(i) for i in range(5)]
    go(tmp_path/"a", batches=batches)
    with pytest.raises(KeyboardInterrupt): go(tmp_path/"b", batches=batches, cbs=[AtStep(7, lambda l: l.stop())])
    go(tmp_path/"b", batches=batches)
    same_run(tmp_path/"a", tmp_path/"b")


def test_resume_of_a_finished_run_changes_nothing(tmp_path):
    go(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    go(tmp_path)
    assert before.keys() == {p for p in tmp_path.rglob("*") if p.is_file()}
    assert all(p.read_bytes() == b for p, b in before.items() if p.name != "last.pt")


def test_state_holds_the_global_generators():
    random.seed(1), np.random.seed(2)
    with seeded(3):
        state = random_state()
        def draw(): return [random.random(), np.random.standard_normal(3).tolist(), torch.rand(2).tolist(), random.gauss(0, 1)]
        first = draw(); draw()
        set_random_state(state)
        assert draw() == first


# ---- accumulation, caps

@pytest.mark.parametrize("accumulate", [1, 2, 3, 5, 7])
def test_accumulated_gradient_is_the_mean(tmp_path, accumulate):
    grads = []
    class Look(Callback):
        def after_batch(self): grads.append([p.grad.clone() for p in self.learn.model.parameters()])
    model = new_model(dropout=0.)
    learn = Learner(model, Bags(), loss_fn=loss_fn, opt=torch.optim.SGD(model.parameters(), lr=0.), accumulate=accumulate, cbs=[Look()], device="cpu").fit()
    groups = [range(i, min(i + accumulate, 5)) for i in range(0, 5, accumulate)]
    assert learn.step == len(groups) == len(grads)
    for group, got in zip(groups, grads):
        model.zero_grad(); (sum(loss_fn(model, Bags().batch(i)) for i in group)/len(group)).backward()
        for p, g in zip(model.parameters(), got): torch.testing.assert_close(g, p.grad, rtol=1e-5, atol=1e-7)


def test_accumulation_resumes(tmp_path):
    go(tmp_path/"a", accumulate=2)
    with pytest.raises(KeyboardInterrupt): go(tmp_path/"b", accumulate=2, cbs=[AtStep(4, lambda l: l.stop())])
    go(tmp_path/"b", accumulate=2)
    same_run(tmp_path/"a", tmp_path/"b")
    assert len(pd.read_csv(tmp_path/"a"/"log.csv")) == 12


@pytest.mark.parametrize("steps,want", [(None, 20), (7, 7), (10, 10), (999, 20), (0, 0)])
def test_steps_cap_the_epochs(tmp_path, steps, want):
    learn = go(tmp_path, steps=steps)
    assert learn.step == learn.total == want and len(pd.read_csv(tmp_path/"log.csv")) == want
    end = load_tensors(tmp_path/"last.safetensors")
    assert all(torch.equal(v, end[k]) for k, v in learn.model.state_dict().items())
    if not want: assert all(torch.equal(v, end[k]) for k, v in new_model().state_dict().items())


# ---- faults

@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_loss_that_is_no_number_stops(tmp_path, bad):
    class Bad(Bags):
        def batch(self, i): return super().batch(i)*(bad if (self.epoch, i) == (2, 1) else 1)
    learn = make(tmp_path, batches=Bad())
    with pytest.raises(InputError, match="at step 12 .*lower learning rate"): learn.fit()
    assert all(p.isfinite().all() for p in learn.model.parameters())
    assert load_tensors(tmp_path/"state"/"last.pt")["step"] == 10 and len(pd.read_csv(tmp_path/"log.csv")) == 11


def test_gradient_that_is_no_number_stops():
    model = nn.Linear(1, 1, bias=False)
    def root(model, x): return (model(x)*0).sqrt().sum()
    learn = Learner(model, [torch.ones(1, 1)], loss_fn=root, opt=torch.optim.SGD(model.parameters(), lr=1.), device="cpu")
    with pytest.raises(InputError, match="the gradient is not finite at step 1"): learn.fit()
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_while_saving_the_state(tmp_path, monkeypatch, code):
    real, calls = Path.write_bytes, [0]
    def full(self, data):
        calls[0] += 1
        if calls[0] < 8: return real(self, data)
        real(self, bytes(data)[:100])
        raise OSError(code, os.strerror(code))
    with monkeypatch.context() as m:
        m.setattr(Path, "write_bytes", full)
        with pytest.raises(InputError, match="no space left on the disk while writing .*last.pt.*--resume"): go(tmp_path/"b", minutes=0)
    assert [p.name for p in (tmp_path/"b"/"state").iterdir()] == ["last.pt"]
    go(tmp_path/"a"), go(tmp_path/"b")
    same_run(tmp_path/"a", tmp_path/"b")


@pytest.mark.parametrize("short", [True, False])
def test_full_disk_while_logging(tmp_path, short):
    class Full:
        "A file on a disk with room for a few lines only"
        def __init__(self, file): self.file, self.left = file, 200
        def write(self, data):
            n = self.file.write(data[:self.left]); self.left -= n
            if n < len(data) and not short: raise OSError(errno.ENOSPC, "No space left on device")
            return n
        def __getattr__(self, name): return getattr(self.file, name)
    learn = make(tmp_path)
    with pytest.raises(InputError, match="no space left on the disk while writing .*log.csv"):
        class Swap(Callback):
            order = 11
            def before_fit(self): log = next(c for c in self.learn.cbs if isinstance(c, LogCB)); log.file = Full(log.file)
        learn.cbs.append(swap := Swap()); swap.learn = learn
        learn.fit()
    text = (tmp_path/"log.csv").read_text()
    assert text.endswith("\n") and len({line.count(",") for line in text.splitlines()}) == 1


def test_full_disk_while_saving_the_weights(tmp_path, monkeypatch):
    import freerep.core
    def full(tensors, path): raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(freerep.core, "save_file", full)
    with pytest.raises(InputError, match="no space left on the disk while writing .*last.safetensors"): go(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.csv", "state"]


def test_other_errors_of_the_disk_stay_what_they_are(tmp_path):
    with pytest.raises(PermissionError), disk_room("x"): raise PermissionError(errno.EACCES, "no")


class Evil:
    def __reduce__(self): return os.system, ("touch EVIL",)

def test_state_files_that_are_refused(tmp_path):
    go(tmp_path)
    good, learn = (tmp_path/"state"/"last.pt").read_bytes(), make(tmp_path/"x")
    (tmp_path/"half.pt").write_bytes(good[:len(good)//2])
    (tmp_path/"code.pt").write_bytes(pickle.dumps(Evil()))
    torch.save({"step": 1}, tmp_path/"little.pt")
    save_tensors(new_model().state_dict(), tmp_path/"weights.safetensors")
    for name, why in [("half.pt", "broken"), ("code.pt", "could run code"), ("little.pt", "not a state"), ("weights.safetensors", "not a state"), ("none.pt", "does not exist")]:
        with pytest.raises(InputError, match=f"{name}.*{why}"): learn.load(tmp_path/name)
    assert not Path("EVIL").exists()
    learn.model[0] = nn.Linear(3, 9)
    with pytest.raises(InputError, match="not a state of this training.*size mismatch"): learn.load(tmp_path/"state"/"last.pt")
    learn = make(tmp_path/"x"); learn.world = 2
    with pytest.raises(InputError, match="saved by 1 processes and there are 2 now"): learn.load(tmp_path/"state"/"last.pt")


def test_log_that_lost_lines_is_an_error(tmp_path):
    go(tmp_path)
    (tmp_path/"log.csv").write_text("step\n1\n")
    with pytest.raises(InputError, match="log.csv is shorter"): go(tmp_path)


def test_no_batches():
    model = new_model()
    with pytest.raises(InputError, match="no batch"): Learner(model, [], loss_fn=loss_fn, opt=torch.optim.SGD(model.parameters(), lr=0.), device="cpu").fit()


def test_to_device_keeps_the_structure():
    t = torch.zeros(2)
    out = to_device([t, (t, {"a": t, "b": "text"}), None], "meta")
    assert out[0].is_meta and out[1][0].is_meta and out[1][1]["a"].is_meta and out[1][1]["b"] == "text" and out[2] is None


# ---- several processes

class Share(Bags):
    "The bags of one process"
    def batch(self, i): rank, world = rank_and_world(); return super().batch(i).chunk(world)[rank]

def gathered(model, batch): return noise_aware_loss(all_gather_with_grad(model(batch)), tau=.2)

def plain_model():
    with seeded(0): return nn.Sequential(nn.Linear(3, 8), nn.GroupNorm(1, 3), nn.Tanh(), nn.Linear(8, 2)).double()

class Double(Share):
    def batch(self, i): return super().batch(i).double()

def train_share(folder, interrupt=None):
    model = plain_model()
    if rank_and_world()[0]: nn.init.zeros_(model[0].weight)      # only the first process has the right start
    cbs = [LogCB(folder/"log.csv", count=lambda b: b.shape[0]*b.shape[1]), CheckpointCB(folder/"state"/"last.pt", minutes=0, weights=folder/"last.safetensors")]
    if interrupt is not None: cbs.append(AtStep(interrupt, lambda l: l.stop() if l.rank == l.world - 1 else None))
    learn = Learner(model, Double(), loss_fn=gathered, opt=torch.optim.AdamW(model.parameters(), lr=.02), epochs=3, cbs=cbs, device="cpu")
    with seeded(rank_and_world()[0]):
        if (folder/"state"/"last.pt").exists(): learn.load(folder/"state"/"last.pt")
        learn.fit()

def one_of_two(rank, folder, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with process_group():
        assert rank_and_world() == (rank, 2)
        gradients = [per_rank_gradient(seed) for seed in range(5)]
        assert any_process(rank == 1) and not any_process(False)
        own = nn.Linear(1, 1); own.weight.grad = torch.full((1, 1), float(rank)); average_gradients(own.parameters())
        assert own.weight.grad.item() == .5
        train_share(folder/"two")
        try: train_share(folder/"resumed", interrupt=6)          # asked of the last process alone
        except KeyboardInterrupt: stopped = True
        if rank == 0: torch.save([gradients, stopped, load_tensors(folder/"resumed"/"state"/"last.pt")["step"]], folder/"found.pt")
        train_share(folder/"resumed")
    assert rank_and_world() == (0, 1)

def per_rank_gradient(seed):
    model, x = plain_model(), Double(seed=seed).batch(0)
    gathered(model, x).backward(); average_gradients(model.parameters())
    return [p.grad.clone() for p in model.parameters()]

def test_two_processes_equal_one(tmp_path):
    import socket
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    torch.multiprocessing.spawn(one_of_two, args=(tmp_path, port), nprocs=2)
    gradients, stopped, at = torch.load(tmp_path/"found.pt", weights_only=True)
    for seed, got in enumerate(gradients):
        for g, want in zip(got, per_rank_gradient(seed)): torch.testing.assert_close(g, want, rtol=1e-6, atol=1e-9)
    assert stopped and at == 7
    train_share(tmp_path/"one")
    one, two = (load_tensors(tmp_path/f/"last.safetensors") for f in ("one", "two"))
    for k in one: torch.testing.assert_close(one[k], two[k], rtol=1e-6, atol=1e-9)
    a, b = (pd.read_csv(tmp_path/f/"log.csv").drop(columns=TIMING) for f in ("one", "two"))
    pd.testing.assert_frame_equal(a, b, rtol=1e-6)
    same_run(tmp_path/"two", tmp_path/"resumed")
    with pytest.raises(InputError, match="saved by 2 processes"): train_share(tmp_path/"two")
