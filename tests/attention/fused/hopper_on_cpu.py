"""The pursuit's kernels for Hopper GPUs, run on the CPU: by test_hopper.py, in a process of its own."""

import gluon_on_cpu as gluon
import pytest
import torch
from heads_and_oracles import make_heads, pursue_slowly, site_of

from vitruvius.attention import part
from vitruvius.attention.base import build_core
from vitruvius.attention.fused.hopper import _calls as calls
from vitruvius.attention.fused.hopper import _pursuit, _pursuit_back

CASES = {
    "all iterations": (37, {}),
    "two tiles": (70, {"iterations": 3}),
    "no rows over": (64, {"iterations": 2}),
    "an odd width": (45, {"D": 48, "iterations": 2}),
    "one iteration": (33, {"iterations": 1}),
    "many iterations": (33, {"iterations": 6}),
    "nothing clipped": (37, {"sparsity": float("inf"), "iterations": 2}),
    "much clipped by the paper's rule, other sign": (40, {"variant": "paper", "sparsity": 0.1, "dual_sign": 1}),
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Kernels of the CPU in the place of the GPU's, and three programs."""
    for module, name in ((_pursuit, "pursue"), (_pursuit_back, "pursue_back")):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, Launcher(kernel))
    monkeypatch.setattr(calls, "slots", lambda x, programs: 3)


class Launcher:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments, **settings: gluon.launch(self.kernel, grid[0], arguments, **settings)


def attend(heads, grad_out, *, iterations, sparsity, variant="released", dual_sign=-1):
    """(out, gradients of k and v, flags) by both kernels."""
    _, k, v, _, scale, _ = heads
    B, H, N, D = k.shape
    out, grad_k, grad_v = (torch.full((B, N, H, D), torch.nan).to(k).transpose(1, 2) for _ in range(3))
    low, sums = torch.empty(max(1, iterations - 1), B, N, H, D).to(k), torch.empty(iterations, B, H, N)
    taus, flags = torch.empty(B, H), torch.empty(B * H, dtype=torch.int32)
    released = variant == "released"
    rule = (iterations, sparsity * H / 4 if released else 4 * sparsity, released, dual_sign, scale)
    calls.pursue(k, v, out, low, sums, taus, flags, *rule)
    calls.pursue_back(grad_out, k, v, out, low, sums, taus, flags, grad_k, grad_v, *rule)
    return out, grad_k, grad_v, flags


@pytest.mark.parametrize("case", CASES)
def test_pursuit_and_its_gradients(case):
    N, options = CASES[case]
    options = {"iterations": 4, "sparsity": 0.5, **options}
    heads = make_heads(N, options.pop("D", 32), torch.bfloat16, batch=2)
    grad_out = torch.randn(heads.k.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    *found, flags = attend(heads, grad_out, **options)
    exact = heads._replace(**{x: getattr(heads, x).double().requires_grad_() for x in "qkv"})
    true = pursue_slowly(exact, **{**options, "sparsity": min(options["sparsity"], 1e6)})
    wanted = [true.detach(), *torch.autograd.grad(true, [exact.k, exact.v], grad_out.double())]
    twin = build_core([part("rpc", **options)], site_of(heads))
    plain = heads._replace(**{x: getattr(heads, x).clone().requires_grad_() for x in "qkv"})
    out = twin(plain)
    twins = [out.detach(), *torch.autograd.grad(out, [plain.k, plain.v], grad_out)]
    for ours, theirs, exactly in zip(found, twins, wanted, strict=True):  # keys near tau may be clipped or not
        assert distance(ours, exactly) < max(1e-2, 1.5 * distance(theirs, exactly))
    assert set(flags.tolist()) == ({0} if options["sparsity"] == float("inf") else {2})  # something was clipped


def distance(found, true):
    return float((found.double() - true).norm() / true.norm())


def test_heads_with_very_long_keys_are_flagged():
    heads = make_heads(37, 32, torch.bfloat16)
    heads = heads._replace(k=heads.k * torch.tensor([1.0, 60.0]).to(heads.k)[:, None, None])
    *_, flags = attend(heads, heads.v, iterations=2, sparsity=1e6)
    assert flags.tolist() == [0, 3]


def test_keys_that_nothing_is_cut_from_need_no_cuts():
    heads = make_heads(37, 32, torch.bfloat16)
    grad_out = torch.randn(heads.k.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    *found, flags = attend(heads, grad_out, iterations=3, sparsity=1e6)
    *wanted, _ = attend(heads, grad_out, iterations=3, sparsity=float("inf"))
    assert flags.tolist() == [0, 0]
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
