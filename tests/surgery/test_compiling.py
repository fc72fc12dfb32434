"""Rewired models compile without graph breaks, recompute their activations, and run in half precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from operating import ONE_EACH, gradient, inputs_of, rewired
from torch import Tensor, nn

from families import Family
from vitruvius.attention import part
from vitruvius.surgery import rewire
from vitruvius.surgery.base import Socket

CHECKPOINTED = [family for family in ONE_EACH if family.name != "crossvit"]  # upstream has none there


@pytest.mark.parametrize("family", ONE_EACH, ids=str)
@torch.no_grad()
def test_sockets_compile_without_graph_breaks(family: Family) -> None:
    model, x = family.randomised()
    rewired(model, family)
    sockets = {type(m): m for m in model.modules() if isinstance(m, Socket)}
    calls = inputs_of(model, x, list(sockets.values()))
    torch.compiler.reset()
    for socket, (args, kwargs) in zip(sockets.values(), calls, strict=True):
        expected = socket(*args, **kwargs)
        found = torch.compile(socket, fullgraph=True, backend="eager")(*args, **kwargs)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_compiled_block_trains_through_aot_autograd(tiny_vit: tuple[nn.Module, Tensor]) -> None:
    block: Any = rewire(tiny_vit[0], "softmax").blocks[0]  # type: ignore[index,union-attr]
    x = torch.randn(2, 17, 32)
    expected = gradient(block, x)
    torch.compiler.reset()
    found = gradient(torch.compile(block, fullgraph=True, backend="aot_eager"), x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sparsity", [4.0, float("inf")])
@pytest.mark.parametrize("grad", [False, True])
def test_rpc_compiles_for_batches_of_any_size(grad: bool, sparsity: float, tiny_vit: tuple[nn.Module, Tensor]) -> None:
    block: Any = rewire(tiny_vit[0], part("rpc", iterations=2, sparsity=sparsity)).blocks[0]  # type: ignore[index,union-attr]
    torch.compiler.reset()
    compiled = torch.compile(block, dynamic=True, fullgraph=True, backend="aot_eager")
    for size in (2, 3):
        x = torch.randn(size, 17, 32)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(compiled(x), block(x))
        if grad:
            torch.testing.assert_close(gradient(compiled, x), gradient(block, x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", CHECKPOINTED, ids=str)
def test_activation_checkpointing_changes_nothing(family: Family) -> None:
    model, x = family.randomised()
    rewired(model, family).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.Dropout):
            module.eval()
    plain = gradient(model, x)
    model.set_grad_checkpointing()
    torch.testing.assert_close(gradient(model, x), plain, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # upstream's DiffAttention warns too
@pytest.mark.parametrize("family", ONE_EACH, ids=str)
@torch.no_grad()
def test_half_precision_and_autocast_work(family: Family) -> None:
    model, x = family.randomised()
    rewired(model, family)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(x).float()
    half = copy.deepcopy(model).bfloat16()(x.bfloat16()).float()
    for found in (mixed, half):
        assert (found - expected).norm() < 0.15 * expected.norm()
