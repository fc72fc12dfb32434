"""Every weight of a rewired model learns, alone and under plain DistributedDataParallel; idle ones are named here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from families import FAMILIES, Family
from two_processes import in_two_processes
from vitruvius import record, restore, rewire
from vitruvius._errors import SurgeryError
from vitruvius._processes import process_group

LABELS = torch.tensor([1, 2])
FEED_QUERIES = ("q_norm.weight", "q_norm.bias", "q_proj.weight", "q_proj.bias")


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(x)
    if isinstance(logits, tuple):  # a head for labels and a head for a teacher
        logits = logits[0] + logits[1]
    return cross_entropy(logits, LABELS)


def rewired(family: Family, core: str) -> tuple[nn.Module, Tensor]:
    """The model with that core, in train mode, and two images; skipped where the core does not fit."""
    model, x = family.randomised()
    try:
        rewire(model, core, input_size=family.input_size)
    except SurgeryError as error:
        pytest.skip(str(error))
    return model.train(), x


def without_gradient(model: nn.Module) -> list[str]:
    return [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]


@pytest.mark.parametrize("core", ["softmax", "rpc"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_weight_gets_a_gradient_but_those_frozen_that_feed_queries_nobody_looks_at(
    family: Family, core: str
) -> None:
    model, x = rewired(family, core)
    loss_of(model, x).backward()
    assert without_gradient(model) == []
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert all(core == "rpc" and name.endswith(FEED_QUERIES) for name in frozen)
    restore(model)
    assert all(weight.requires_grad for name, weight in model.named_parameters() if name in frozen)


@pytest.mark.parametrize("core", ["symmetric", "rpc"])
def test_queries_that_nobody_looks_at_are_not_computed(core: str) -> None:
    model, x = FAMILIES[0].randomised()
    rewire(model, core)
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn.qkv.register_forward_hook(lambda *_: None)  # who watches the projection gets all of it
    expected = torch.autograd.grad(loss_of(model, x), list(model.parameters()))
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn.qkv._forward_hooks.clear()
    torch.testing.assert_close(torch.autograd.grad(loss_of(model, x), list(model.parameters())), expected)
    first = model.blocks[0].attn  # type: ignore[index,union-attr]
    with record(model) as heads:
        model(x)
    entering: list[Tensor] = []
    with first.register_forward_pre_hook(lambda _, args: entering.append(args[0])):
        model(x)
    queries = first.qkv(entering[0]).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)[0]
    torch.testing.assert_close(heads["blocks.0.attn"].q, queries.detach())
    with torch.no_grad():
        first.qkv.weight[: first.qkv.in_features] = torch.nan
    assert model(x).isfinite().all()


def test_what_was_frozen_before_stays_so() -> None:
    model, _ = FAMILIES[1].randomised()  # with norms of queries and keys
    model.requires_grad_(False)
    restore(rewire(model, "symmetric"))
    assert not any(weight.requires_grad for weight in model.parameters())


def _two_steps(rank: int) -> None:
    with process_group("cpu"):
        idle_queries = [family for family in FAMILIES if str(family) in ("vit_qk_norm", "rope_separate")]
        for family, core in [*((family, "softmax") for family in FAMILIES), *((f, "rpc") for f in idle_queries)]:
            model, x = family.randomised()
            where = "*" if core == "softmax" else "blocks.*"  # a pool of few queries keeps its own attention
            rewire(model, core, where=where, input_size=family.input_size)
            ddp = DistributedDataParallel(model.train())
            for _ in range(2):  # a weight without a gradient is noticed by the second
                loss_of(ddp, x).backward()
            del ddp


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of depthwise convolutions: not an error, says torch
def test_every_family_takes_two_steps_in_two_processes() -> None:
    in_two_processes(_two_steps)
