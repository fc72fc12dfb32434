"""The kernels on a GPU: every width, precision and option against float64, compiled, under autocast, exported.

Run by hand:  pytest tests/gpu -m gpu
"""

import sys
from pathlib import Path

import pytest
import torch

from vitruvius.attention import build_core, part
from vitruvius.attention.fused import use
from vitruvius.heads import Heads, Site

sys.path.insert(0, str(Path(__file__).parents[1] / "attention" / "fused"))
from heads_and_oracles import attend_slowly, errors, make_heads, make_keep, pursue_slowly

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}
HALF = torch.bfloat16


def site_of(heads):
    _, H, N, D = heads.k.shape
    return Site(
        name="blocks.0.attn", family="vit", attends="tokens", num_heads=H, num_queries=N, num_keys=N, key_dim=D,
        value_dim=D, dim=H * D,
    )  # fmt: skip


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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("D", [32, 48, 64, 80, 96, 128])
def test_rpc_in_every_width_and_precision(D, dtype):
    check_pursuit(on_gpu(197, D, dtype))


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
        {"iterations": 1},
        {"iterations": 7},
        {"sparsity": float("inf"), "iterations": 2},
        {"sparsity": 0.3},
    ],
    ids=str,
)
def test_rpc_with_every_option_whole_and_in_launches(options):
    check_pursuit(on_gpu(70, 64, torch.float32, bias=True), **options)  # in launches
    check_pursuit(on_gpu(70, 64, HALF), **options)  # whole


def test_rpc_with_keys_so_long_that_greatest_scores_must_be_sought():
    heads = on_gpu(197, 64, HALF)
    heads = heads._replace(k=heads.k * torch.tensor([1.0, 30.0, 1.0], device="cuda", dtype=HALF)[:, None, None])
    core = build_core(["rpc"], site_of(heads))
    with torch.no_grad(), use("fused"):
        out = core(heads)
    with torch.no_grad(), use("plain"):
        expected = core(heads)
    assert (out - expected).float().norm() < 2e-2 * expected.float().norm()


def test_rpc_gives_the_same_twice():
    heads = on_gpu(197, 64, HALF)
    k = heads.k.detach().requires_grad_()
    core = build_core(["rpc"], site_of(heads))

    def slope():
        return torch.autograd.grad(core(heads._replace(k=k)).float().square().sum(), k)[0]

    assert torch.equal(slope(), slope())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("N", "D"), [(50, 32), (197, 64), (577, 80), (1025, 64)])
def test_mask_in_every_precision(N, D, dtype):
    heads, keep = on_gpu(N, D, dtype), make_keep(3, N, kept=0.05)
    core = build_core([part("sparse_softmax", keep=keep)], site_of(heads)).cuda()
    with use("fused"):
        assert max(errors(core, lambda h: attend_slowly(h, keep.cuda()), heads)) < TOLERANCE[dtype]


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

    def slope(call):
        with torch.autocast("cuda", HALF), use("fused"):
            return torch.autograd.grad(call(x), linear.weight)[0]

    expected, found = slope(layer), slope(torch.compile(layer, fullgraph=True))
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
