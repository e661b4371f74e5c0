"""The segmenter against SAM2's own predictor, its weights files, its gradients and what it leaves behind."""
import functools
import gc
import shutil
import subprocess
import sys
import weakref
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from PIL import Image

import freerep.segmenter as module
from freerep.core import InputError, save_tensors, write_json
from freerep.segmenter import Memory, Segmenter, episode_logits, load_segmenter, plain_predictor

pytestmark = pytest.mark.skipif(find_spec("sam2") is None, reason="the package sam2 is not installed")
devices = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def shake(segmenter, seed=1, present=3., scale=3.):
    "Random weights hardly answer to the context; these do"
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in segmenter.model.named_parameters():
            if p.ndim < 2: p.add_((torch.randn(p.shape, generator=g)*.05).to(p.device))
            elif name.startswith(("memory_attention", "memory_encoder", "sam_mask_decoder", "obj_ptr_proj")): p.mul_(scale)
        segmenter.model.sam_mask_decoder.pred_obj_score_head.layers[-1].bias.add_(present)
    return segmenter


def shaken(name="nano", side=None, seed=0, **kwargs): return shake(load_segmenter(name, device=kwargs.pop("device", "cpu"), image_size=side, seed=seed), seed + 1, **kwargs)


shaken_once = functools.cache(shaken)


def pictures(seed, n, h=64, w=64):
    "Smooth noise, (n, h, w, 3) uint8"
    small = np.random.default_rng(seed).integers(0, 256, (n, 7, 9, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(i).resize((w, h), Image.Resampling.BICUBIC)) for i in small])


def discs(seed, k, o, h=64, w=64, absent=.35):
    "Masks (k, o, h, w): discs, some with a hole, some missing, the first of each image there"
    r = np.random.default_rng([seed, 7])
    y, x = np.mgrid[:h, :w]/max(h, w)
    out = np.zeros((k, o, h, w), bool)
    for t in range(k):
        for c in range(o):
            cx, cy, radius = *r.uniform(.2, .8, 2), r.uniform(.03, .25)
            d = (x - cx)**2 + (y - cy)**2
            out[t, c] = (d < radius**2) & ((d > (radius/3)**2) | (r.random() < .5))
            if c and r.random() < absent: out[t, c] = False
    return out


class Plain:
    "A video of context images with masks, and the query, through SAM2's own predictor"
    def __init__(self, predictor, images, masks, tmp_path):
        self.encodings, self.iou = 0, []
        inner, (k, o) = predictor.forward_image, masks.shape[:2]
        def counted(x): self.encodings += len(x); return inner(x)
        predictor.forward_image = counted
        hook = predictor.sam_mask_decoder.register_forward_hook(lambda m, i, out: self.iou.append(out[1]))
        for t, im in enumerate(images): Image.fromarray(im).save(tmp_path/f"{t}.jpg", quality=95)
        self.images = [np.asarray(Image.open(tmp_path/f"{t}.jpg").convert("RGB"))[None] for t in range(len(images))]
        state = predictor.init_state(str(tmp_path))
        for t in range(k):
            for c in range(o): predictor.add_new_mask(state, t, c, torch.tensor(masks[t, c]))
        for _, _, self.video in predictor.propagate_in_video(state): pass
        hook.remove()
        predictor.forward_image = inner
        self.outputs = state["output_dict_per_obj"]
        last = [self.outputs[c]["non_cond_frame_outputs"][len(images) - 1] for c in range(o)]
        self.logits = torch.cat([x["pred_masks"][0] for x in last])
        self.score = torch.cat([x["object_score_logits"][0] for x in last])
        self.iou = torch.cat([x.max(-1)[0] for x in self.iou[-o:]])


def ours(segmenter, images, masks, use=None):
    memories = [segmenter.remember(segmenter.encode(im), m) for im, m in zip(images, masks)]
    return segmenter.segment(segmenter.encode(images[-1]), memories, use=use), memories


def assert_same(p, plain, side, pixels=1e-5):
    assert (p.logits - plain.logits).abs().max() < 1e-3
    big = [F.interpolate(x[None], size=(side, side), mode="bilinear")[0] > 0 for x in (p.logits, plain.logits)]
    assert (big[0] != big[1]).float().mean() <= pixels
    assert torch.allclose(p.object_score, plain.score, atol=1e-3) and torch.allclose(p.iou, plain.iou, atol=1e-4)


# ---------------------------------------------------------------- the architecture

@pytest.fixture
def no_init(monkeypatch):
    "Building a model without filling in random numbers"
    for f in ("kaiming_uniform_", "uniform_", "trunc_normal_", "normal_", "xavier_uniform_"): monkeypatch.setattr(torch.nn.init, f, lambda t, *a, **k: t)


def behaviour(model):
    "Every plain number, word or tuple on every part of a model, as it decides what the part does"
    from omegaconf import ListConfig
    plain, lists = (int, float, str, bool, tuple, list, type(None), ListConfig), (tuple, list, ListConfig)
    skip = {"training", "image_size", "sam_mask_decoder_extra_args", "dynamic_multimask_via_stability", "dynamic_multimask_stability_thresh",
            "fill_hole_area"}  # of clicks and hole filling, which a mask-prompted video does not meet
    return {f"{n}.{k}": list(v) if isinstance(v, lists) else v for n, m in model.named_modules() for k, v in vars(m).items()
            if isinstance(v, plain) and not k.startswith("_") and k not in skip}


@pytest.mark.parametrize("name, file", [("tiny", "t"), ("small", "s"), ("base_plus", "b+"), ("large", "l")])
def test_sizes_are_those_of_the_package(name, file, no_init):
    "Same weights by name and shape, and same settings of every part, as SAM2's own builder gives"
    from sam2.build_sam import build_sam2_video_predictor
    official = build_sam2_video_predictor(f"configs/sam2.1/sam2.1_hiera_{file}.yaml", None, device="cpu")
    own = module._build(name, 1024, "SAM2VideoPredictor")
    assert {k: v.shape for k, v in own.state_dict().items()} == {k: v.shape for k, v in official.state_dict().items()}
    assert behaviour(own) == behaviour(official)


def test_nano_is_small():
    assert 1.5e6 < sum(p.numel() for p in load_segmenter("nano", device="cpu").model.parameters()) < 2.5e6


def test_random_weights_depend_on_the_seed_alone():
    state = torch.random.get_rng_state()
    a, b, c = (load_segmenter("nano", device="cpu", seed=s).fingerprint for s in (3, 3, 4))
    assert a == b != c and torch.equal(state, torch.random.get_rng_state())


# ---------------------------------------------------------------- Hydra

def test_hydra_is_left_alone():
    "Importing the module imports no sam2; loading a model leaves an application's Hydra free, and sam2 usable afterwards"
    code = """
import sys, freerep.segmenter as s
print("sam2" in sys.modules or "hydra" in sys.modules)
from hydra.core.global_hydra import GlobalHydra
from hydra import version
before = version.getbase()
s.load_segmenter("nano", device="cpu")
print(GlobalHydra.instance().is_initialized(), version.getbase() is before)
s.load_segmenter("nano", device="cpu")
print(GlobalHydra.instance().is_initialized())
from hydra import initialize
with initialize(version_base=None): print(GlobalHydra.instance().is_initialized())
from sam2.build_sam import build_sam2
from sam2.modeling.sam2_base import SAM2Base
model = build_sam2("configs/sam2.1/sam2.1_hiera_t.yaml", None, device="cpu")
print(isinstance(model, SAM2Base), isinstance(s.load_segmenter("nano", device="cpu").model, SAM2Base))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out == ["False", "False", "True", "False", "True", "True", "True"]


@pytest.mark.parametrize("before", ["own Hydra", "sam2"])
def test_hydra_of_the_application_stays(before, monkeypatch):
    "An initialised Hydra is the same afterwards, and so is sam2 where it was imported already"
    from hydra import initialize
    from hydra.core.global_hydra import GlobalHydra
    GlobalHydra.instance().clear()
    monkeypatch.delitem(sys.modules, "sam2", raising=False)
    if before == "sam2": import sam2
    else: initialize(version_base=None)
    own, package = GlobalHydra.instance().hydra, sys.modules.get("sam2")
    module._sam2.__wrapped__()
    assert own is not None and GlobalHydra.instance().hydra is own and (package is None or sys.modules["sam2"] is package)


def test_missing_sam2_is_an_input_error(monkeypatch):
    for name in [*sys.modules, "sam2"]:
        if name.split(".")[0] == "sam2": monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match="sam2 is not installed.*pip install"): module._sam2.__wrapped__()


# ---------------------------------------------------------------- weights

class Evil:
    def __reduce__(self): return exec, ("import pathlib; pathlib.Path('evil-was-here').touch()",)


def test_code_in_a_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = load_segmenter("nano", device="cpu").model.state_dict()
    for held in ({"model": Evil()}, {"model": good, "epoch": Evil()}, Evil()):
        torch.save(held, "x.pt")
        with pytest.raises(InputError, match="x.pt.*code"): load_segmenter("nano", "x.pt", device="cpu")
    assert not (tmp_path/"evil-was-here").exists()


def test_every_layout_is_read(tmp_path):
    segmenter = load_segmenter("nano", device="cpu", seed=9)
    good = segmenter.model.state_dict()
    trainer = {"model": good, "optimizer": {"state": {0: {"step": torch.tensor(1.)}}, "param_groups": [{"lr": 1e-5}]}, "epoch": 3, "steps": {"train": 7}}
    for i, held in enumerate((good, {"model": good}, {"state_dict": good}, trainer)): torch.save(held, tmp_path/f"{i}.pt")
    segmenter.save(tmp_path/"4.safetensors")
    save_tensors({k: v.half() for k, v in good.items()}, tmp_path/"half.safetensors")
    for file in ("0.pt", "1.pt", "2.pt", "3.pt", "4.safetensors"):
        assert load_segmenter("nano", tmp_path/file, device="cpu").fingerprint == segmenter.fingerprint
    assert next(load_segmenter("nano", tmp_path/"half.safetensors", device="cpu").model.parameters()).dtype == torch.float32


def test_a_run_of_finetuning_is_a_checkpoint(tmp_path):
    "Its folder brings weights, name and image size; what is asked for goes before them"
    segmenter = load_segmenter("nano", device="cpu", seed=9, image_size=96)
    segmenter.save(tmp_path/"run"/"last.safetensors")
    write_json(dict(kind="finetune", segmenter=dict(name="nano", image_size=96)), tmp_path/"run"/"config.json")
    assert load_segmenter(checkpoint=tmp_path/"run", device="cpu").fingerprint == segmenter.fingerprint
    assert load_segmenter(checkpoint=tmp_path/"run", device="cpu", image_size=64).image_size == 64
    with pytest.raises(InputError, match="does not fit the model 'tiny'.*checkpoint of 'nano'"): load_segmenter("tiny", tmp_path/"run", device="cpu")
    (tmp_path/"run"/"last.safetensors").unlink()
    with pytest.raises(InputError, match="nothing was saved yet"): load_segmenter(checkpoint=tmp_path/"run", device="cpu")
    for content in ({}, [], {"segmenter": "nano"}, {"kind": "pretrain"}):
        write_json(content, tmp_path/"run"/"config.json")
        with pytest.raises(InputError, match="holds no run of `freerep finetune`"): load_segmenter(checkpoint=tmp_path/"run", device="cpu")
    with pytest.raises(InputError, match="holds no run"): load_segmenter("nano", tmp_path, device="cpu")


def test_what_does_not_fit_is_named_at_once(tmp_path):
    good = load_segmenter("nano", device="cpu").model.state_dict()
    bad = {k: v for k, v in good.items() if k != "no_obj_ptr"} | {"stranger": torch.zeros(1), "no_mem_embed": torch.zeros(1, 1, 7)}
    torch.save({"model": bad}, tmp_path/"bad.pt")
    with pytest.raises(InputError) as e: load_segmenter("nano", tmp_path/"bad.pt", device="cpu")
    assert all(w in str(e.value) for w in ("bad.pt", "missing: no_obj_ptr", "unexpected: stranger", "no_mem_embed (1, 1, 7) instead of (1, 1, 64)"))


def test_a_checkpoint_of_another_size_says_which(tmp_path, no_init):
    "By the image encoder alone: width and number of blocks"
    for name in module._TRUNKS:
        trunk = module._sam2().Hiera(**module._TRUNKS[name])
        assert module._looks_like({f"image_encoder.trunk.{k}": v for k, v in trunk.state_dict().items()}) == name
    assert module._looks_like({"weight": torch.zeros(3)}) is None
    load_segmenter("nano", device="cpu").save(tmp_path/"nano.safetensors")
    with pytest.raises(InputError, match="looks like a checkpoint of 'nano'"): load_segmenter("tiny", tmp_path/"nano.safetensors", device="cpu")


@pytest.mark.parametrize("held", [{"model": {"a": 3}}, {}, [torch.zeros(2)], torch.zeros(2), {"model": {}}])
def test_a_file_without_weights_is_refused(tmp_path, held):
    torch.save(held, tmp_path/"x.pt")
    with pytest.raises(InputError, match="x.pt"): load_segmenter("nano", tmp_path/"x.pt", device="cpu")


def test_missing_and_broken_files(tmp_path):
    (tmp_path/"broken.pt").write_bytes(b"PK\x03\x04 not really")
    for file in ("broken.pt", "absent.pt"):
        with pytest.raises(InputError, match=file): load_segmenter("nano", tmp_path/file, device="cpu")


def test_official_weights_are_fetched_once(tmp_path, monkeypatch, no_init):
    "From the official address to torch.hub's folder, then from there"
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    state, asked = module._build("tiny", 64).state_dict(), []
    def fetch(url, path): asked.append(url); torch.save({"model": state}, path)
    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    for _ in range(2): load_segmenter("tiny", "official", device="cpu", image_size=64)
    assert asked == ["https://dl.fbaipublicfiles.com/segment_anything_2/092824/sam2.1_hiera_tiny.pt"]
    def no_network(url, path): raise OSError("Name or service not known")
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    with pytest.raises(InputError, match="sam2.1_hiera_small.pt could not be fetched.*give the file"): load_segmenter("small", "official", device="cpu")
    with pytest.raises(InputError, match="no official weights"): load_segmenter("nano", "official", device="cpu")


@pytest.mark.parametrize("fault,words", [("page", "was refused"), ("cut", "broken"), ("other", "does not fit.*looks like a checkpoint of 'nano'"), ("empty", "holds no weights"), ("http", "could not be fetched.*IncompleteRead"), ("status", "could not be fetched")])
def test_a_bad_download_does_not_stay(tmp_path, monkeypatch, no_init, fault, words):
    "Nothing is left under the final name, or beside it, and a later attempt fetches again"
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    good = tmp_path/"good.pt"
    torch.save({"model": module._build("tiny", 64).state_dict()}, good)
    def fetch(url, path):
        from http.client import BadStatusLine, IncompleteRead
        if fault == "http": raise IncompleteRead(b"abc", 100)
        if fault == "status": raise BadStatusLine("")
        if fault == "other": return torch.save({"model": module._build("nano", 64).state_dict()}, path)
        if fault == "empty": return torch.save({"model": {}}, path)
        with open(path, "wb") as f: f.write(b"<html>log in</html>" if fault == "page" else good.read_bytes()[:100000])
    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    with pytest.raises(InputError, match=words) as said: load_segmenter("tiny", "official", device="cpu", image_size=64)
    assert "https://" in str(said.value) and ".tmp" not in str(said.value) and not list((tmp_path/"checkpoints").iterdir())
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda url, path: shutil.copy(good, path))
    load_segmenter("tiny", "official", device="cpu", image_size=64).close()
    assert [p.name for p in (tmp_path/"checkpoints").iterdir()] == ["sam2.1_hiera_tiny.pt"]


def test_fingerprint_follows_weights_size_and_behaviour(tmp_path):
    a = load_segmenter("nano", device="cpu")
    first = a.fingerprint
    assert a.fingerprint == first and load_segmenter("nano", device="cpu", image_size=96).fingerprint != first
    a.model.binarize_mask_from_pts_for_mem_enc = False
    with torch.no_grad(): a.model.no_mem_embed.add_(0)
    assert a.fingerprint != first
    a.model.binarize_mask_from_pts_for_mem_enc = True
    with torch.no_grad(): a.model.no_mem_embed.add_(0)
    assert a.fingerprint == first
    optimiser = torch.optim.AdamW(a.model.parameters(), lr=1e-3)
    episode_logits(a, pictures(0, 2)[None], discs(0, 1, 1)[None]).logits.sum().backward()
    optimiser.step()
    assert a.fingerprint != first
    a.save(tmp_path/"a.safetensors")
    assert load_segmenter("nano", tmp_path/"a.safetensors", device="cpu").fingerprint == a.fingerprint


# ---------------------------------------------------------------- arguments, closing

@pytest.mark.parametrize("kwargs", [dict(name="Tiny"), dict(name="sam3"), dict(image_size=100), dict(image_size=0), dict(image_size=-64),
                                    dict(image_size=32), dict(image_size=64.5), dict(device="abacus"), dict(device="cuda:77")])
def test_bad_arguments(kwargs):
    with pytest.raises(InputError): load_segmenter(**{"name": "nano", "device": "cpu", **kwargs})


def test_close_lets_go_of_the_weights():
    with load_segmenter("nano", device="cpu") as segmenter:
        segmenter.encode(pictures(0, 1))
        parts = [weakref.ref(segmenter.model), *map(weakref.ref, segmenter.model.parameters())]
    gc.collect()
    assert not any(p() is not None for p in parts)
    for use in (lambda: segmenter.encode(pictures(0, 1)), lambda: segmenter.fingerprint, lambda: segmenter.image_size):
        with pytest.raises(InputError, match="closed"): use()
    segmenter.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_close_frees_the_gpu():
    gc.collect(); torch.cuda.empty_cache(); before = torch.cuda.memory_allocated()
    with load_segmenter("tiny", device="cuda", image_size=256) as segmenter: segmenter.remember(segmenter.encode(pictures(0, 1)), discs(0, 1, 2)[0])
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 2**20


@pytest.mark.parametrize("images, why", [
    (np.zeros((64, 64, 3), np.uint8), "batch axis"), (np.zeros((1, 3, 64, 64), np.uint8), "RGB"), (np.zeros((0, 64, 64, 3), np.uint8), "RGB"),
    (np.zeros((1, 64, 64, 3), np.int64), "int64"), (np.full((1, 64, 64, 3), 2.), r"\[0, 1\]"), (np.full((1, 64, 64, 3), np.nan), r"\[0, 1\]")])
def test_bad_images(images, why):
    with pytest.raises(InputError, match=why): load_segmenter("nano", device="cpu").encode(images)


@pytest.mark.parametrize("masks", [np.zeros((64, 64), bool), np.zeros((2, 64, 64), np.uint8), np.zeros((0, 64, 64), bool), np.zeros((1, 1, 64, 64), bool)])
def test_bad_masks(masks):
    segmenter = load_segmenter("nano", device="cpu")
    with pytest.raises(InputError, match=r"\(o, h, w\)"): segmenter.remember(segmenter.encode(pictures(0, 1)), masks)


def test_bad_contexts():
    segmenter = load_segmenter("nano", device="cpu")
    two, one = segmenter.encode(pictures(0, 2)), segmenter.encode(pictures(0, 1))
    memory = segmenter.remember(one, discs(0, 1, 3)[0])
    for call, why in ((lambda: segmenter.segment(two, [memory]), "one image"), (lambda: segmenter.remember(two, discs(0, 1, 1)[0]), "one image"),
                      (lambda: segmenter.empty_memory(two), "one image"), (lambda: segmenter.segment(one, []), "at least one memory"),
                      (lambda: segmenter.segment(one, [memory, memory[[0]]]), "same classes"),
                      (lambda: segmenter.segment(one, [memory], use=np.ones((3, 1), bool)), r"\(1, 3\)"),
                      (lambda: segmenter.segment(one, [memory], use=np.ones((1, 3), int)), "bool"),
                      (lambda: segmenter.track(one, frame=0, keyframes={}, recent={}, n_frames=1), "keyframe"),
                      (lambda: segmenter.track(one, frame=1, keyframes={0: memory}, recent={2: memory[[0]]}, n_frames=3), "same objects"),
                      (lambda: segmenter.track(one, frame=1, keyframes={0: memory, 2: memory[[0]]}, recent={}, n_frames=3), "same objects"),
                      (lambda: episode_logits(segmenter, pictures(0, 2), discs(0, 1, 1)[None]), "query comes last"),
                      (lambda: episode_logits(segmenter, pictures(0, 2)[None], discs(0, 2, 1)[None]), "query comes last")):
        with pytest.raises(InputError, match=why): call()


# ---------------------------------------------------------------- looking

@pytest.mark.parametrize("h, w", [(64, 64), (50, 71), (200, 31), (1, 1)])
def test_pixels_are_those_of_the_official_loader(tmp_path, h, w):
    from sam2.utils.misc import load_video_frames
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (h, w, 3), dtype=np.uint8)).save(tmp_path/"0.jpg")
    official, height, width = load_video_frames(str(tmp_path), 64, False, compute_device="cpu")
    x = np.asarray(Image.open(tmp_path/"0.jpg").convert("RGB"))[None]
    assert (height, width) == (h, w) and torch.equal(module._pixels(x, 64), official)


def test_float_images_are_the_same_pictures():
    x = pictures(3, 2)
    assert torch.allclose(module._pixels(x, 64), module._pixels(x/255, 64), atol=1e-6)
    assert torch.equal(module._pixels(x, 64), module._pixels(torch.tensor(x), 64))
    assert (module._pixels(x/255., 96) - module._pixels(x, 96)).abs().max() < .06  # 8-bit rounding of the one


@pytest.mark.parametrize("side", [64, 96, 160])
def test_maps_have_the_computed_sizes(side):
    segmenter = load_segmenter("nano", device="cpu", image_size=side)
    f = segmenter.encode(pictures(0, 3, 40, 52))
    assert [tuple(m.shape) for m in f.maps] == [(3, 8, side//4, side//4), (3, 16, side//8, side//8), (3, 64, side//16, side//16)]
    assert f.size == (40, 52) and len(f) == 3 and len(f[1]) == len(f[1:2]) == 1 and torch.equal(f[1].maps[2], f[1:2].maps[2])
    assert segmenter.encodings == 3 and segmenter.encode(pictures(0, 1)).maps[0].shape[0] == 1 and segmenter.encodings == 4


# ---------------------------------------------------------------- remembering

@pytest.mark.parametrize("name, side, size, binarize", [
    ("nano", 64, (64, 64), True), ("nano", 96, (50, 70), True), ("nano", 64, (130, 90), False), ("tiny", 64, (64, 64), True)])
def test_memories_equal_those_of_the_predictor(tmp_path, name, side, size, binarize):
    "Bit for bit, in the predictor's own types; with empty, full, tiny and holed masks, of other sizes too"
    segmenter = shaken(name, side)
    segmenter.model.binarize_mask_from_pts_for_mem_enc = binarize
    predictor = plain_predictor(segmenter)
    predictor.binarize_mask_from_pts_for_mem_enc = binarize
    masks = discs(1, 2, 6, *size)
    masks[0, 1], masks[0, 2], masks[1, 3] = True, False, False
    masks[0, 4] = False
    masks[0, 4, 11, 17] = True
    masks[1, 5] = np.random.default_rng(0).random(size) < .5
    plain = Plain(predictor, pictures(1, 3, *size), masks, tmp_path)
    _, memories = ours(segmenter, plain.images, masks)
    for t in range(2):
        for o in range(6):
            stored = plain.outputs[o]["cond_frame_outputs"][t]
            assert stored["maskmem_features"].dtype == memories[t].maskmem.dtype == torch.bfloat16 and stored["obj_ptr"].dtype == torch.float32
            assert torch.equal(stored["maskmem_features"], memories[t].maskmem[o:o + 1]), (t, o)
            assert torch.equal(stored["obj_ptr"], memories[t].pointer[o:o + 1]), (t, o)


def test_a_memory_depends_on_its_own_mask_alone():
    segmenter = shaken()
    look, masks = segmenter.encode(pictures(0, 1)), discs(2, 1, 5)[0]
    together = segmenter.remember(look, masks)
    for o in range(5):
        alone = segmenter.remember(look, masks[o:o + 1])
        assert torch.equal(alone.maskmem, together[o].maskmem) and torch.equal(alone.pointer, together[o].pointer)


def test_one_empty_memory_serves_every_absent_class():
    segmenter = shaken()
    look, other = (segmenter.encode(pictures(s, 1)) for s in (0, 1))
    masks = discs(3, 1, 4)[0]
    masks[1:3] = False
    memory, empty = segmenter.remember(look, masks), segmenter.empty_memory(look)
    for o in (1, 2): assert torch.equal(memory[o].maskmem, empty.maskmem) and torch.equal(memory[o].pointer, empty.pointer)
    assert not torch.equal(memory[0].maskmem, empty.maskmem) and not torch.equal(segmenter.empty_memory(other).maskmem, empty.maskmem)
    assert torch.equal(empty.pointer, segmenter.model.no_obj_ptr)


@pytest.mark.parametrize("name, side", [("nano", 64), ("nano", 128), ("tiny", 64)])
def test_memory_bytes(name, side):
    segmenter = load_segmenter(name, device="cpu", image_size=side)
    m = segmenter.empty_memory(segmenter.encode(pictures(0, 1)))
    assert segmenter.memory_bytes == m.maskmem.nbytes + m.pointer.nbytes


def test_memory_bytes_at_the_usual_sizes():
    "64 channels of 2 bytes at a sixteenth of the side, and 256 numbers of 4"
    segmenter = load_segmenter("tiny", device="cpu", image_size=64)
    for side, expected in ((256, 33_792), (512, 132_096), (1024, 525_312)):
        segmenter.model.image_size = side
        assert segmenter.memory_bytes == expected


def test_memory_is_a_list_of_classes():
    m = Memory(torch.arange(3.)[:, None, None, None].to(torch.bfloat16), torch.arange(6.).view(3, 2))
    assert len(m) == 3 and len(m[1]) == 1 and m[[2, 0]].pointer.tolist() == [[4, 5], [0, 1]] and len(Memory.cat([m, m[0]])) == 4
    assert len(m[np.array([True, False, True])]) == 2 and len(m[np.int64(1)]) == 1 and m.to("cpu").maskmem.dtype == torch.bfloat16


# ---------------------------------------------------------------- segmenting

@pytest.mark.parametrize("o, weights", [(1, "shaken"), (3, "shaken"), (10, "shaken"), (3, "random")])
def test_segment_equals_the_built_predictor(tmp_path, o, weights):
    "`build_sam2_video_predictor` of the package with its defaults, from a checkpoint file in its layout"
    from sam2.build_sam import build_sam2_video_predictor
    segmenter = (shaken if weights == "shaken" else lambda n, s, seed: load_segmenter(n, device="cpu", image_size=s, seed=seed))("tiny", 128, seed=o)
    torch.save({"model": segmenter.model.state_dict()}, tmp_path/"x.pt")
    predictor = build_sam2_video_predictor("configs/sam2.1/sam2.1_hiera_t.yaml", str(tmp_path/"x.pt"), device="cpu",
                                           hydra_overrides_extra=["++model.image_size=128"])
    k = 1 if o == 10 else 2
    masks = discs(o, k, o, 128, 128)
    (tmp_path/"frames").mkdir()
    with pytest.warns(UserWarning, match="Skipping the post-processing"): plain = Plain(predictor, pictures(o, k + 1, 128, 128), masks, tmp_path/"frames")
    p, memories = ours(segmenter, plain.images, masks)
    assert_same(p, plain, 128)
    assert plain.encodings == k + (k*o if k > 1 else 0) + 1
    if weights == "shaken":
        wrong = segmenter.segment(segmenter.encode(plain.images[-1]), [m[np.roll(np.arange(o), 1)] for m in memories[::-1]])
        assert (wrong.candidates - p.candidates).abs().max() > .05, "these weights do not answer to the context: the test proves nothing"


def test_segment_equals_the_predictor_at_256(tmp_path):
    segmenter, masks = shaken("tiny", 256), discs(5, 2, 2, 200, 260)
    masks[:, 1] = False
    plain = Plain(plain_predictor(segmenter), pictures(5, 3, 200, 260), masks, tmp_path)
    p, _ = ours(segmenter, plain.images, masks)
    assert_same(p, plain, 256)
    assert torch.allclose(segmenter.upsample(p.logits, (200, 260)), plain.video[:, 0], atol=1e-3)


@pytest.mark.parametrize("k, o, present", [(1, 1, 3), (1, 4, 0), (5, 3, 0), (5, 10, 3), (15, 2, 3), (16, 2, 3), (18, 2, 0)])
def test_segment_equals_the_predictor_for_many_contexts(tmp_path, k, o, present):
    "Around the limit of 16 pointers too; with objects judged present and absent"
    segmenter, masks = shaken("nano", 64, seed=k, present=present), discs(k, k, o)
    plain = Plain(plain_predictor(segmenter), pictures(k, k + 1), masks, tmp_path)
    p, _ = ours(segmenter, plain.images, masks)
    assert_same(p, plain, 64)
    assert torch.equal(p.logits.amax((1, 2)) == -1024, p.object_score <= 0)
    assert torch.equal(p.iou, p.candidate_iou.amax(-1)) and p.iou.min() >= 0 and p.iou.max() <= 1


@pytest.mark.parametrize("seed", range(3))
def test_classes_know_nothing_of_each_other(seed):
    segmenter, images = shaken(seed=seed), [x[None] for x in pictures(seed, 4)]
    masks = discs(seed, 3, 5)
    p, memories = ours(segmenter, images, masks)
    order = np.random.default_rng(seed).permutation(5)
    q = segmenter.segment(segmenter.encode(images[-1]), [m[order] for m in memories])
    assert torch.allclose(q.candidates, p.candidates[order], atol=1e-4) and torch.allclose(q.iou, p.iou[order], atol=1e-5)
    alone = segmenter.segment(segmenter.encode(images[-1]), [m[2] for m in memories])
    assert torch.allclose(alone.candidates[0], p.candidates[2], atol=1e-4)


def test_order_of_the_context_matters_through_the_pointers_only():
    segmenter, images = shaken("tiny", 64), [x[None] for x in pictures(1, 4)]
    memories = ours(segmenter, images, discs(1, 3, 2))[1]
    query = segmenter.encode(images[-1])
    same = [Memory(m.maskmem, memories[0].pointer) for m in memories]
    a, b = (segmenter.segment(query, ms).candidates for ms in (memories, memories[::-1]))
    c, d = (segmenter.segment(query, ms).candidates for ms in (same, same[::-1]))
    assert torch.allclose(c, d, atol=1e-3) and (a - b).abs().max() > 10*(c - d).abs().max()


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**6))
def test_use_leaves_images_out_of_a_class(k, o, seed):
    "The same as handing over only those memories, class by class; none at all gives nothing"
    segmenter = shaken_once()
    use = np.random.default_rng(seed).random((k, o)) < .6
    images = [x[None] for x in pictures(seed, k + 1)]
    p, memories = ours(segmenter, images, discs(seed, k, o), use)
    query = segmenter.encode(images[-1])
    for c in range(o):
        own = [memories[t][c] for t in np.flatnonzero(use[:, c])]
        if own:
            q = segmenter.segment(query, own)
            assert all(torch.allclose(getattr(p, f)[c], getattr(q, f)[0], atol=1e-4) for f in ("logits", "iou", "object_score", "candidates"))
        else: assert (p.logits[c] == -1024).all() and p.iou[c] == 0 and p.object_score[c] == -1024
    assert p.logits.shape == (o, 16, 16) and p.candidates.shape == (o, 1, 16, 16)


def test_use_equals_a_video_of_that_context_alone(tmp_path):
    segmenter, masks, images = shaken("tiny", 64), discs(4, 3, 2), pictures(4, 4)
    use = np.array([[1, 0], [1, 1], [0, 1]], bool)
    for c, own in enumerate(([0, 1], [1, 2])):
        (tmp_path/str(c)).mkdir()
        plain = Plain(plain_predictor(segmenter), images[[*own, 3]], masks[own][:, c:c + 1], tmp_path/str(c))
        every = [None]*3
        for i, t in enumerate(own): every[t] = plain.images[i]
        every = [plain.images[0] if x is None else x for x in every] + [plain.images[-1]]
        p, _ = ours(segmenter, every, masks, use)
        assert (p.logits[c] - plain.logits[0]).abs().max() < 1e-3


@pytest.mark.parametrize("device", devices)
def test_memories_may_come_from_the_cpu(device):
    segmenter = shaken(device=device)
    memory = segmenter.remember(segmenter.encode(pictures(0, 1)), discs(0, 1, 2)[0])
    query = segmenter.encode(pictures(1, 1))
    assert torch.equal(segmenter.segment(query, [memory]).logits, segmenter.segment(query, [memory.to("cpu")]).logits)


# ---------------------------------------------------------------- tracking

@pytest.mark.parametrize("seed, n, keys, o, scale", [(0, 9, (2, 6), 2, 1.), (1, 24, (0, 20), 1, 3.), (2, 20, (19,), 1, 3.), (3, 20, (0,), 2, 1.)])
def test_track_equals_propagation(tmp_path, seed, n, keys, o, scale):
    "In both directions, frame for frame, with no more than `reach` frames kept (a batch rounds differently, and that grows from frame to frame)"
    segmenter = shaken(seed=seed, present=2., scale=scale)
    predictor = plain_predictor(segmenter)
    for t, im in enumerate(pictures(seed, n)): Image.fromarray(im).save(tmp_path/f"{t}.jpg")
    images = [np.asarray(Image.open(tmp_path/f"{t}.jpg").convert("RGB"))[None] for t in range(n)]
    masks = discs(seed, n, o)
    state = predictor.init_state(str(tmp_path))
    for t in keys:
        for c in range(o): predictor.add_new_mask(state, t, c, torch.tensor(masks[t, c]))
    for _ in predictor.propagate_in_video(state): pass
    for _ in predictor.propagate_in_video(state, start_frame_idx=max(keys), reverse=True): pass
    looks = [segmenter.encode(im) for im in images]
    keyframes = {t: segmenter.remember(looks[t], masks[t]) for t in keys}
    found, recent = {}, {}
    for reverse in (False, True):
        for t in (range(max(keys) - 1, -1, -1) if reverse else range(min(keys), n)):
            if t in keys: continue
            found[t], recent[t] = segmenter.track(looks[t], frame=t, keyframes=keyframes, recent=recent, n_frames=n, reverse=reverse)
            recent = {f: m for f, m in recent.items() if abs(f - t) < segmenter.reach}
    assert segmenter.encodings == n and sorted([*found, *keys]) == list(range(n))
    for t, p in found.items():
        official = [state["output_dict_per_obj"][c]["non_cond_frame_outputs"][t] for c in range(o)]
        assert (p.logits - torch.cat([x["pred_masks"][0] for x in official])).abs().max() < 1e-3, t
        if t in recent:
            assert torch.allclose(recent[t].pointer, torch.cat([x["obj_ptr"] for x in official]), atol=1e-3)
            assert torch.allclose(recent[t].maskmem.float(), torch.cat([x["maskmem_features"] for x in official]).float(), atol=.05, rtol=.02)


@pytest.mark.parametrize("reverse", [False, True])
def test_track_towards_the_first_keyframe(reverse):
    "A frame that has no pointer in its reach, only keyframes ahead of it, sees the same in bfloat16 and float32 memories"
    segmenter, images, masks = shaken(seed=4, present=2.), pictures(4, 3), discs(4, 2, 2, absent=0)
    at = (2, 3) if reverse else (8, 9)
    memories = [segmenter.remember(segmenter.encode(images[i:i + 1]), masks[i]) for i in range(2)]
    assert memories[0].maskmem.dtype == torch.bfloat16
    go = lambda ms, **kw: segmenter.track(segmenter.encode(images[2:]), frame=5, keyframes=dict(zip(at, ms)), recent={}, n_frames=12, reverse=reverse, **kw)[0].candidates
    exact = [Memory(m.maskmem.float(), m.pointer) for m in memories]
    assert torch.equal(go(memories), go(exact)) and not torch.allclose(go(memories), go(memories[:1]), atol=1e-3)
    unseen = [Memory(m.maskmem, m.pointer + 1) for m in memories]
    assert torch.equal(go(memories), go(unseen))           # no pointer was looked at


# ---------------------------------------------------------------- learning

def step_loss(p, target):
    target = F.avg_pool2d(torch.as_tensor(target).float(), 4)
    return F.binary_cross_entropy_with_logits(p.logits, target) + .1*F.binary_cross_entropy_with_logits(p.object_score, (target.flatten(2) > 0).any(-1).float())


def episodes(seed, b=2, k=2, o=2, h=64, w=64):
    every = [(pictures(seed + 100*i, k + 1, h, w), discs(seed + 100*i, k + 1, o, h, w)) for i in range(b)]
    return np.stack([x for x, _ in every]), np.stack([m for _, m in every])


@pytest.mark.parametrize("name, seed", [("nano", 0), ("nano", 1), ("nano", 2), ("tiny", 0)])
def test_one_step_lowers_the_loss(name, seed):
    segmenter = load_segmenter(name, device="cpu", image_size=64, seed=seed)
    x, m = episodes(seed)
    segmenter.model.train()
    for part in segmenter.model.modules():
        if isinstance(part, torch.nn.Dropout): part.p = 0.
        if hasattr(part, "dropout_p"): part.dropout_p = 0.
    before = step_loss(episode_logits(segmenter, x, m[:, :-1]), m[:, -1])
    optimiser = torch.optim.SGD(segmenter.model.parameters(), lr=.01 if name == "nano" else .001)
    before.backward()
    optimiser.step()
    assert step_loss(episode_logits(segmenter, x, m[:, :-1]), m[:, -1]) < before


@pytest.mark.parametrize("name, k, o, seed", [("nano", 1, 1, 0), ("nano", 3, 4, 1), ("tiny", 2, 2, 2)])
def test_training_path_equals_inference_in_eval_mode(name, k, o, seed):
    segmenter = shaken(name, 64, seed, scale=2.)
    x, m = episodes(seed, b=3, k=k, o=o, h=50, w=70)
    p = episode_logits(segmenter, x, m[:, :-1])
    assert p.logits.shape == (3, o, 16, 16) and p.iou.shape == p.object_score.shape == (3, o) and p.candidates.shape[:2] == p.candidate_iou.shape[:2] == (3, o)
    for b in range(3):
        q, _ = ours(segmenter, [i[None] for i in x[b]], m[b, :-1])
        assert (q.logits - p.logits[b]).abs().max() < 1e-3 and (q.candidates - p.candidates[b]).abs().max() < 1e-3
        assert torch.allclose(q.iou, p.iou[b], atol=1e-4) and torch.allclose(q.object_score, p.object_score[b], atol=1e-3)


def test_gradient_reaches_every_part_that_takes_part():
    "All but what belongs to clicks, to the other mask tokens and to a frame without memory"
    segmenter = shaken()
    segmenter.model.train()
    x, m = episodes(0)
    m[0, 0, 1] = False
    p = episode_logits(segmenter, x, m[:, :-1])
    (p.logits.square().mean() + p.iou.mean() + p.object_score.mean()).backward()
    none = {n for n, q in segmenter.model.named_parameters() if q.grad is None or not q.grad.any()}
    idle = ("no_mem_embed", "no_mem_pos_enc", "sam_prompt_encoder.point_embeddings", "sam_mask_decoder.output_hypernetworks_mlps",
            "maskmem_tpos_enc", "memory_attention.layers.0.self_attn.k_proj.bias")
    assert all(n.startswith(idle) or n.endswith("k_proj.bias") for n in none), none


def test_a_mask_judged_absent_still_learns():
    "In training the mask is not blanked, or its gradient would be gone"
    segmenter = shaken(present=-50.)
    x, m = episodes(0)
    assert (episode_logits(segmenter, x, m[:, :-1]).logits == -1024).all()
    segmenter.model.train()
    p = episode_logits(segmenter, x, m[:, :-1])
    step_loss(p, m[:, -1]).backward()
    assert (p.object_score < 0).all() and segmenter.model.sam_mask_decoder.output_hypernetworks_mlps[0].layers[-1].weight.grad.any()


def test_nano_starts_with_an_eye_for_its_context():
    "More so than with random attention; and learns one episode so that a wrong context gives something else"
    def effect(segmenter):
        x, m = episodes(3, b=4, o=3)
        a, b = (episode_logits(segmenter, x, np.roll(m[:, :-1], r, 2)).candidates for r in (0, 1))
        return ((a - b).std()/a.std()).item()
    segmenter, without = (load_segmenter("nano", device="cpu") for _ in range(2))
    for part in (*without.model.memory_attention.modules(), without.model.memory_encoder.pix_feat_proj, without.model.memory_encoder.out_proj):
        if hasattr(part, "reset_parameters"): part.reset_parameters()
    assert effect(segmenter) > 2*effect(without)
    x, m = episodes(1, b=1, o=2)
    m[0, :, 0], m[0, :, 1] = np.arange(64)[:, None] < 32, np.arange(64)[:, None] >= 32
    optimiser = torch.optim.AdamW(segmenter.model.parameters(), lr=1e-3)
    segmenter.model.train()
    for _ in range(50):
        loss = step_loss(episode_logits(segmenter, x, m[:, :-1]), m[:, -1])
        optimiser.zero_grad(); loss.backward(); optimiser.step()
    segmenter.model.eval()
    right, wrong = (step_loss(episode_logits(segmenter, x, np.roll(m[:, :-1], r, 2)), m[:, -1]) for r in (0, 1))
    assert right < .3 and wrong > 3*right


def test_frozen_parts_get_no_gradient():
    segmenter = load_segmenter("nano", device="cpu")
    segmenter.model.train()
    segmenter.model.image_encoder.requires_grad_(False)
    x, m = episodes(0)
    step_loss(episode_logits(segmenter, x, m[:, :-1]), m[:, -1]).backward()
    assert all(p.grad is None for p in segmenter.model.image_encoder.parameters()) and segmenter.model.obj_ptr_tpos_proj.weight.grad.any()


def test_inference_leaves_no_graph():
    segmenter = load_segmenter("nano", device="cpu")
    p, memories = ours(segmenter, [x[None] for x in pictures(0, 2)], discs(0, 1, 2))
    assert not any(x.requires_grad for x in (p.logits, p.iou, memories[0].maskmem, memories[0].pointer))


def test_the_package_can_be_imported_twice():
    "A notebook that defines the import anew finds sam2's parts already loaded, but not sam2 itself"
    code = ("import sys, freerep.segmenter as s; s._sam2(); assert 'sam2' not in sys.modules; s._sam2.cache_clear(); s._sam2(); "
            "s.load_segmenter('nano', device='cpu')")
    subprocess.run([sys.executable, "-c", code], check=True)
