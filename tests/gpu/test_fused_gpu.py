"""The kernels on a GPU: every width, precision and option against float64, compiled, under autocast, exported.

Run by hand:  python scripts/gpu_tests.py tests/gpu/test_fused_gpu.py
"""

import sys
from pathlib import Path

import pytest
import torch

from vitruvius.attention import part
from vitruvius.attention.base import build_core
from vitruvius.attention.fused import masked, use
from vitruvius.attention.fused.hopper import _dispatch
from vitruvius.attention.fused.hopper._dispatch import on_hopper
from vitruvius.heads import Heads

sys.path.insert(0, str(Path(__file__).parents[1] / "attention" / "fused"))
from heads_and_oracles import attend_slowly, errors, make_heads, make_keep, pursue_slowly, site_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}
HALF = torch.bfloat16
same_kernels = pytest.mark.kernels("197 tokens, width 64, bfloat16")  # compiled once, by one process
FEW_AND_MANY = ({"iterations": 1}, {"iterations": 7}, {"sparsity": 0.3})  # settings that are no part of a kernel
WIDTHS = [  # every width in two precisions: each pair is minutes of compiling
    *((D, HALF) for D in (32, 48, 64, 80, 96, 128)),
    *((D, torch.float16) for D in (48, 64, 128)),
    *((D, torch.float32) for D in (32, 80, 96)),
]


def shape(N, D, dtype):
    """Parameters of a test, marked by the kernels that it compiles."""
    key = f"{N} tokens, width {D}, {str(dtype).removeprefix('torch.')}"
    return pytest.param(N, D, dtype, marks=pytest.mark.kernels(key))


def check_pursuit(heads, **options):
    options = {"iterations": 4, "sparsity": 4.0, **options}
    core = build_core([part("rpc", **options)], site_of(heads))
    found, finite = {}, {**options, "sparsity": min(options["sparsity"], 1e6)}  # the oracle divides infinities
    for mode in ("fused", "plain"):
        with use(mode):
            found[mode] = errors(core, lambda h: pursue_slowly(h, **finite), heads)
    for ours, plain in zip(found["fused"], found["plain"], strict=True):  # rounding K' may cost more, whoever does it
        assert ours < max(TOLERANCE[heads.k.dtype], 1.5 * plain), found


def on_gpu(N, D, dtype, *, batch=4, heads=3, size=0.5, **more):
    return make_heads(N, D, dtype, batch=batch, heads=heads, device="cuda", size=size, **more)


@pytest.mark.parametrize(("N", "D", "dtype"), [shape(197, D, dtype) for D, dtype in WIDTHS])
def test_rpc_in_every_width_and_precision(N, D, dtype):
    check_pursuit(on_gpu(N, D, dtype))


@pytest.mark.parametrize("N", [1, 16, 49, 65, 196, 256, 257, 577, 1025])
def test_rpc_with_any_number_of_tokens(N):
    if N == 1:
        with use("fused"):
            heads = on_gpu(1, 64, HALF)
            torch.testing.assert_close(build_core(["rpc"], site_of(heads))(heads), heads.v)
    else:
        check_pursuit(on_gpu(N, 64, HALF))


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "paper", "sparsity": 0.3},
        {"asymmetric": True},
        {"dual_sign": 1, "iterations": 3},
        {"sparsity": float("inf"), "iterations": 2},
        *(pytest.param(one, marks=pytest.mark.kernels("70 tokens")) for one in FEW_AND_MANY),
    ],
    ids=str,
)
def test_rpc_with_every_option_whole_and_in_launches(options):
    check_pursuit(on_gpu(70, 64, torch.float32, bias=True), **options)  # in launches
    check_pursuit(on_gpu(70, 64, HALF), **options)  # whole


@same_kernels
def test_rpc_with_keys_so_long_that_greatest_scores_must_be_sought():
    heads = on_gpu(197, 64, HALF)
    heads = heads._replace(k=heads.k * torch.tensor([1.0, 30.0, 1.0], device="cuda", dtype=HALF)[:, None, None])
    core = build_core([part("rpc", sparsity=1e6)], site_of(heads))  # no key is cut short
    with torch.no_grad(), use("fused"):
        out = core(heads)
    with torch.no_grad(), use("plain"):
        expected = core(heads)
    assert (out - expected).float().norm() < 2e-2 * expected.float().norm()


@needs_hopper
@same_kernels
def test_on_hopper_its_own_kernels_are_taken_and_agree_with_the_general_ones(monkeypatch):
    heads = on_gpu(197, 64, HALF)
    assert on_hopper(*heads[:3])
    check_pursuit(heads)
    core = build_core(["rpc"], site_of(heads))
    with torch.no_grad(), use("fused"):
        out = core(heads)
        monkeypatch.setattr(_dispatch, "_wanted", False)
        general = core(heads)
    assert not torch.equal(out, general)
    assert (out - general).float().norm() < 2e-3 * general.float().norm()


@pytest.mark.parametrize("D", [32, 64])
@pytest.mark.parametrize("N", [65, 197])
def test_the_general_kernels_where_those_of_hopper_are_not_wanted(N, D, monkeypatch):
    monkeypatch.setattr(_dispatch, "_wanted", False)
    check_pursuit(on_gpu(N, D, HALF))
    check_pursuit(on_gpu(N, D, HALF), variant="paper", sparsity=0.3)


@same_kernels
def test_rpc_gives_the_same_twice():
    heads = on_gpu(197, 64, HALF)
    k = heads.k.detach().requires_grad_()
    core = build_core(["rpc"], site_of(heads))

    def grad_out():
        return torch.autograd.grad(core(heads._replace(k=k)).float().square().sum(), k)[0]

    assert torch.equal(grad_out(), grad_out())


@pytest.mark.parametrize(
    ("N", "D", "dtype"),
    [
        *((50, 32, dtype) for dtype in TOLERANCE),
        *((197, 64, dtype) for dtype in (HALF, torch.float16)),
        *((577, 80, dtype) for dtype in (HALF, torch.float32)),
        (1025, 64, HALF),
    ],
)
def test_mask_in_every_precision(N, D, dtype):
    heads, keep = on_gpu(N, D, dtype), make_keep(3, N, kept=0.05)
    core = build_core([part("sparse_softmax", keep=keep)], site_of(heads)).cuda()
    with use("fused"):
        assert max(errors(core, lambda h: attend_slowly(h, keep.cuda()), heads)) < TOLERANCE[dtype]


@needs_hopper
@pytest.mark.parametrize("size", [1, 40])  # 40: greatest scores must be sought
@pytest.mark.parametrize("N", [137, 197, 256])
def test_mask_on_hopper_its_own_kernel_is_taken_and_agrees_with_the_general_one(N, size, monkeypatch):
    heads, keep = on_gpu(N, 64, HALF, batch=140, size=1.0), make_keep(3, N, kept=0.05)  # more than run at once
    keep[1] = True
    keep[2, 50] = False  # `sparse_softmax` refuses such a row; for the kernels it is nothing
    pattern, qkv = [x.cuda() for x in masked.make_pattern(keep)], (heads.q * size, heads.k, heads.v)
    assert masked._hopper_takes(*qkv, pattern)
    out, sums = masked._forward(*qkv, pattern, heads.scale)
    monkeypatch.setattr(_dispatch, "_wanted", False)
    general, general_sums = masked._forward(*qkv, pattern, heads.scale)
    assert (out - general).float().norm() < 5e-3 * general.float().norm()
    torch.testing.assert_close(sums, general_sums, rtol=1e-5, atol=1e-3)


@needs_hopper
def test_gradients_after_the_kernel_of_hopper_for_masks():
    heads, keep = on_gpu(197, 64, HALF), make_keep(3, 197, kept=0.05)
    pattern = [x.cuda() for x in masked.make_pattern(keep)]
    assert masked._hopper_takes(*heads[:3], pattern)
    found = errors(lambda h: masked.attend_kept(h, pattern), lambda h: attend_slowly(h, keep.cuda()), heads)
    assert max(found) < TOLERANCE[HALF], found


@pytest.mark.parametrize("name", ["rpc", "sparse_softmax"])
def test_compiled_under_autocast_it_is_one_graph(name):
    settings = {} if name == "rpc" else {"keep": make_keep(3, 197, kept=0.05)}
    heads = on_gpu(197, 64, HALF)
    core = build_core([part(name, **settings)], site_of(heads)).cuda()
    x = torch.randn(4, 197, 192, device="cuda")
    linear = torch.nn.Linear(192, 576, device="cuda")

    def layer(x):
        q, k, v = linear(x).view(4, 197, 3, 3, 64).permute(2, 0, 3, 1, 4).unbind(0)
        return core(Heads(q, k, v, None, 0.125)).float().square().mean()

    def grad_out(call):
        with torch.autocast("cuda", HALF), use("fused"):
            return torch.autograd.grad(call(x), linear.weight)[0]

    expected, found = grad_out(layer), grad_out(torch.compile(layer, fullgraph=True))
    assert (found - expected).norm() / expected.norm() < 2e-2


@pytest.mark.parametrize("name", ["rpc", "sparse_softmax"])
def test_it_exports(name):
    settings = {} if name == "rpc" else {"keep": make_keep(3, 65, kept=0.1)}
    heads = on_gpu(65, 64, HALF)
    core = build_core([part(name, **settings)], site_of(heads)).cuda().eval()

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.core = core

        def forward(self, q, k, v):
            return self.core(Heads(q, k, v, None, 0.125))

    with use("fused"), torch.no_grad():
        program = torch.export.export(Module(), heads[:3])
        torch.testing.assert_close(program.module()(*heads[:3]), core(heads))
    assert "vitruvius." in str(program.graph)


@pytest.mark.parametrize("N", [64, 192])
def test_gradients_are_finite_where_those_of_cudnn_are_not(N):
    q, k, v = (0.1 * torch.randn(1, 3, N, 64, device="cuda", dtype=HALF) for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, -960.0  # every score is about −120: PyTorch issue 196678
    heads = Heads(q, k, v, torch.zeros(1, 1, N, N, device="cuda", dtype=HALF), 0.125)
    leaves = [x.requires_grad_() for x in heads[:3]]
    out = build_core(["softmax"], site_of(heads))(heads)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.float().square().sum(), leaves))
