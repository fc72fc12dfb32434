"""The same numbers on a GPU: every precision, autocast, sparse masks in fused kernels, inductor. Run by hand."""

import copy

import pytest
import timm
import torch
from attending import make_heads, make_site
from torch import nn

from vitruvius.attention import part
from vitruvius.attention.base import build_core
from vitruvius.heads import Heads
from vitruvius.surgery import rewire

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
SITE = make_site(heads=3, queries=197, key_dim=64)


def sparse_keep(density=0.05):
    """About as sparse as ViTCoD's; whole tiles of a row are empty, the class token is kept."""
    keep = torch.rand(3, 197, 197, generator=torch.Generator().manual_seed(0)) < density
    keep[:, 0] = True
    keep[..., 0] = True
    keep[:, 5] = False
    keep[:, 5, 190] = True  # one key, far from the first tile
    return keep


CHAINS = {
    "softmax": ["softmax"],
    "rpc": [part("rpc", sparsity=0.5)],
    "rpc_paper": [part("rpc", variant="paper", sparsity=0.3)],
    "rpc_asymmetric": [part("rpc", asymmetric=True)],
    "masked": [part("mask", keep=sparse_keep())],
    "masked_rpc": [part("low_rank", tensors="k"), "symmetric", part("mask", keep=sparse_keep()), part("rpc")],
    "scaled": [part("scaled")],
    "scaled_alpha": [part("scaled", form="alpha"), part("mask", keep=sparse_keep())],
    "standardised": ["standardised"],
    "truncated": [part("truncated", rank=32)],
}


def run(name, dtype, device, autocast=False, rounded=torch.float64):
    core = build_core(CHAINS[name], SITE)
    for parameter in core.parameters():
        nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(1))
    core.to(device, torch.float32 if autocast else dtype)
    q, k, v = make_heads(4, 3, 197, 64)[:3]
    mild = (0.4 * q, 0.4 * k, v)  # a saturated softmax has gradients below the noise of any half precision
    q, k, v = (x.detach().to(rounded).to(device, dtype).requires_grad_() for x in mild)
    with torch.autocast(device, dtype, enabled=autocast):
        out = core(Heads(q, k, v, None, 0.125))
    found = torch.autograd.grad(out.float().square().sum(), (q, k, v), allow_unused=True, materialize_grads=True)
    return [x.detach().double().cpu() for x in (out, *found)]


def cases():
    """Every chain in every precision; autocast is for half precision, and compiles the same kernels."""
    for name in CHAINS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            kernels = pytest.mark.kernels(f"{name} in {dtype}")
            yield pytest.param(name, dtype, False, marks=kernels)
            if dtype.itemsize == 2:
                yield pytest.param(name, dtype, True, marks=kernels)


@pytest.mark.parametrize(("name", "dtype", "autocast"), list(cases()))
def test_the_gpu_agrees_with_float64_on_the_cpu(name, dtype, autocast):
    expected = run(name, torch.float64, "cpu", rounded=dtype)  # the same keys: rpc magnifies what rounding changes
    tolerance = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 8e-2}[dtype]
    for actual, wanted in zip(run(name, dtype, "cuda", autocast), expected, strict=True):
        assert actual.isfinite().all()
        assert (actual - wanted).norm() <= tolerance * wanted.norm().clamp(min=1)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_do_not_depend_on_the_layout_they_come_in(compiled):
    heads = [x.half().cuda().requires_grad_() for x in make_heads(4, 3, 89 + compiled, 64)[:3]]
    core = build_core(["softmax"], make_site(heads=3, queries=89 + compiled, key_dim=64))
    core = torch.compile(core, fullgraph=True) if compiled else core
    grad_out = torch.randn(4, 3, 89 + compiled, 64, device="cuda").half()
    grads = [grad_out, grad_out.transpose(1, 2).contiguous().transpose(1, 2)]
    first, second = (torch.autograd.grad(core(Heads(*heads, None, 0.125)), heads, given) for given in grads)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_whole_model_trains_under_inductor_as_one_graph():
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=2, num_classes=10).cuda()
    parts = [part("low_rank", tensors="k"), "symmetric", part("mask", keep=sparse_keep()), part("rpc", iterations=2)]
    rewire(model, *parts)
    x = torch.randn(8, 3, 224, 224, device="cuda")
    twin = copy.deepcopy(model)
    out, fast = model(x), torch.compile(twin, fullgraph=True)(x)
    out.square().sum().backward()
    fast.square().sum().backward()
    torch.testing.assert_close(fast, out, rtol=1e-2, atol=1e-3)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert b.grad is not None, name
        assert (a.grad - b.grad).norm() <= 0.02 * a.grad.norm().clamp(min=1e-3), name
