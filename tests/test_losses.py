"""Losses: against loops over Python numbers, closed forms, torchmetrics-free oracles, properties and faults."""
import math
import numpy as np, pytest, torch, torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from freerep.core import InputError
from freerep.losses import LOSSES, noise_aware_loss, noise_aware_all_loss, supcon_loss

names = pytest.mark.parametrize("name", list(LOSSES))

def unit(z): return [[[x/math.sqrt(sum(y*y for y in v)) for x in v] for v in bag] for bag in z]
def dot(v, w): return sum(x*y for x, y in zip(v, w))

def slow_noise_aware(z, tau):
    z, total = unit(z.tolist()), 0.
    for i, bag in enumerate(z):
        own = sum(math.exp(dot(m, bag[0])/tau) for m in bag[1:])
        rest = sum(math.exp(dot(m, other[0])/tau) for j, other in enumerate(z) if j != i for m in bag[1:])
        total -= math.log(own/(own + rest))
    return total/len(z)

def slow_all(z, tau, supcon=False):
    items = [(i, v) for i, bag in enumerate(unit(z.tolist())) for v in bag]
    total = 0.
    for a, (i, v) in enumerate(items):
        e = [(j, math.exp(dot(v, w)/tau)) for m, (j, w) in enumerate(items) if m != a]
        mates, everything = [x for j, x in e if j == i], sum(x for _, x in e)
        total -= sum(math.log(x/everything) for x in mates)/len(mates) if supcon else math.log(sum(mates)/everything)
    return total/len(items)

SLOW = dict(noise_aware=slow_noise_aware, noise_aware_all=slow_all, supcon=lambda z, tau: slow_all(z, tau, True))

def batch(seed, b=4, k=5, d=8, dtype=torch.float64): return torch.randn(b, k, d, dtype=dtype, generator=torch.Generator().manual_seed(seed))

@names
@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 2, 2), (3, 5, 4), (7, 3, 16), (12, 5, 8)])
@pytest.mark.parametrize("tau", [.07, .5, 2.])
def test_equals_the_loop(name, shape, tau):
    for seed in range(3):
        z = batch(seed, *shape)
        assert LOSSES[name](z, tau).item() == pytest.approx(SLOW[name](z, tau), rel=1e-10, abs=1e-12)

@settings(max_examples=60, deadline=None)
@given(b=st.integers(2, 8), k=st.integers(2, 7), tau=st.floats(.02, 5))
def test_closed_forms(b, k, tau):
    same, own = torch.ones(b, k, 3, dtype=torch.float64), torch.eye(b, dtype=torch.float64)[:, None].expand(b, k, b)
    opposite = torch.tensor([[1.], [-1.]], dtype=torch.float64)[:, None].expand(2, k, 1)     # two bags, at 180 degrees
    q = math.exp(-1/tau)
    assert noise_aware_loss(same, tau).item() == pytest.approx(math.log(b))
    assert noise_aware_all_loss(same, tau).item() == pytest.approx(math.log((b*k - 1)/(k - 1)))
    assert supcon_loss(same, tau).item() == pytest.approx(math.log(b*k - 1))
    assert noise_aware_loss(own, tau).item() == pytest.approx(math.log1p((b - 1)*q), rel=1e-9)
    assert noise_aware_all_loss(own, tau).item() == pytest.approx(math.log1p((b - 1)*k/(k - 1)*q), rel=1e-9)
    assert supcon_loss(own, tau).item() == pytest.approx(math.log(k - 1 + (b - 1)*k*q), rel=1e-9, abs=1e-9)
    assert noise_aware_loss(opposite, tau).item() == pytest.approx(math.log1p(q*q), rel=1e-9)

def test_noise_aware_from_angles():
    "Two bags, by hand: cosines of 0, 60, 90, 120 and 180 degrees are 1, 1/2, 0, -1/2 and -1"
    a = torch.deg2rad(torch.tensor([[0., 60., 90.], [180., 180., 120.]], dtype=torch.float64))
    z, e = torch.stack([a.cos(), a.sin()], -1), math.exp
    first = -math.log((e(.5) + e(0))/(e(.5) + e(0) + e(-.5) + e(0)))
    second = -math.log((e(1) + e(.5))/(e(1) + e(.5) + e(-1) + e(-.5)))
    assert noise_aware_loss(z, 1.).item() == pytest.approx((first + second)/2, rel=1e-12)

def test_supcon_is_cross_entropy_with_soft_targets():
    for seed in range(5):
        z = batch(seed, 5, 4, 6)
        n, y = F.normalize(z.flatten(0, 1), dim=1), torch.arange(5).repeat_interleave(4)
        off = ~torch.eye(20, dtype=bool)
        target = ((y[:, None] == y) & off).double()
        logits = (n @ n.T/.3).masked_fill(~off, -1e30)
        assert torch.allclose(supcon_loss(z, .3), F.cross_entropy(logits, target/target.sum(1, keepdim=True)), rtol=1e-10)

@names
def test_gradcheck(name):
    for seed in range(3): assert torch.autograd.gradcheck(lambda z: LOSSES[name](z, .3), batch(seed, 3, 4, 5).requires_grad_())
    assert torch.autograd.gradcheck(lambda z: LOSSES[name](z), batch(9, 3, 3, 4).requires_grad_())

@names
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_symmetries(name, seed):
    "Order of bags, order of the members, scale of each embedding and a common rotation change nothing"
    loss, z, g = LOSSES[name], batch(seed), torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64, generator=g))[0]
    members = torch.cat([torch.tensor([0]), 1 + torch.randperm(4, generator=g)])
    scale = .1 + 5*torch.rand(4, 5, 1, dtype=torch.float64, generator=g)
    for other in (z[torch.randperm(4, generator=g)], z[:, members], z*scale, z @ rotation):
        assert torch.allclose(loss(other), loss(z), rtol=1e-9, atol=1e-9)

def test_only_the_first_form_knows_an_anchor():
    z = batch(3)
    moved = z.roll(1, dims=1)
    assert not torch.allclose(noise_aware_loss(moved), noise_aware_loss(z), rtol=1e-3)
    for loss in (noise_aware_all_loss, supcon_loss): assert torch.allclose(loss(moved), loss(z), rtol=1e-10)

@names
def test_small_tau_in_single_precision(name):
    for seed in range(5):
        z = batch(seed, 12, 5, 64)
        x = z.float().requires_grad_()
        loss = LOSSES[name](x, .01)
        loss.backward()
        assert loss.item() == pytest.approx(LOSSES[name](z, .01).item(), rel=1e-4)
        assert x.grad.isfinite().all() and x.grad.abs().sum() > 0

def test_tiny_losses_keep_their_digits():
    "Bags that are right beyond doubt: the loss is about 1e-6 and must not round to zero in single precision"
    z = torch.eye(12)[:, None].expand(12, 5, 12)
    assert noise_aware_loss(z, .06).item() == pytest.approx(math.log1p(11*math.exp(-1/.06)), rel=1e-4)

@names
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_converted_first(name, dtype):
    z = batch(1).to(dtype)
    assert LOSSES[name](z, .01).dtype == torch.float32
    assert torch.equal(LOSSES[name](z, .01), LOSSES[name](z.float(), .01))

@names
def test_autocast_changes_nothing(name):
    z = batch(1, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16): inside = LOSSES[name](z, .01)
    assert torch.equal(inside, LOSSES[name](z, .01))

@names
def test_zero_and_equal_embeddings_have_finite_gradients(name):
    for z in (torch.zeros(3, 4, 5), torch.ones(3, 4, 5)):
        z.requires_grad_()
        LOSSES[name](z).backward()
        assert z.grad.isfinite().all()

def force(name, cosines, tau=.3):
    "Derivative of the loss by the angle of each member, for a bag with the anchor at 0 degrees and a far negative bag"
    a = torch.acos(torch.tensor([1., *cosines], dtype=torch.float64)).requires_grad_()
    z = torch.stack([a.cos(), a.sin(), torch.zeros_like(a)], -1)
    far = torch.tensor([0., 0., 1.], dtype=torch.float64).expand_as(z)
    return torch.autograd.grad(LOSSES[name](torch.stack([z, far]), tau), a)[0][1:]

def test_supcon_pulls_the_misfit_and_noise_aware_does_not():
    near, misfit = range(3), 3
    na, sc = force("noise_aware", [.95, .9, .8, 0.]), force("supcon", [.95, .9, .8, 0.])
    assert na[misfit] < na[near].max()/2          # the loss falls when the angle shrinks; the misfit is nearly left alone
    assert sc[misfit] == sc.max() and sc[misfit] > 2*sc[near].abs().max()

@names
@pytest.mark.parametrize("shape, text", [((64, 128), r"expected \(b, k, d\), got \(64, 128\)"), ((2, 3, 4, 5), r"got \(2, 3, 4, 5\)"), ((128,), r"got \(128,\)"),
                                         ((1, 5, 8), "one bag alone has no negatives"), ((0, 5, 8), "at least 2 bags, got 0"), ((4, 1, 8), "k >= 2")])
def test_wrong_shapes(name, shape, text):
    with pytest.raises(InputError, match=text): LOSSES[name](torch.randn(shape))

@names
@pytest.mark.parametrize("tau", [0, -.1, float("nan")])
def test_wrong_temperature(name, tau):
    with pytest.raises(InputError, match="temperature above 0"): LOSSES[name](batch(0), tau)
