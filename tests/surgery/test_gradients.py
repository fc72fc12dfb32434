"""Every weight of a rewired model learns, alone and under plain DistributedDataParallel; idle ones are named here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from families import FAMILIES, Family
from two_processes import in_two_processes
from vitruvius import rewire
from vitruvius._errors import SurgeryError
from vitruvius._processes import process_group

LABELS = torch.tensor([1, 2])
IDLE = ("q_norm.weight", "q_norm.bias", "q_proj.weight", "q_proj.bias")  # of cores that look at keys alone


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


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_weight_gets_a_gradient(family: Family) -> None:
    model, x = rewired(family, "softmax")
    loss_of(model, x).backward()
    assert without_gradient(model) == []


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_core_that_looks_at_keys_alone_leaves_the_queries_idle_and_nothing_else(family: Family) -> None:
    model, x = rewired(family, "rpc")
    loss_of(model, x).backward()
    assert [name for name in without_gradient(model) if not name.endswith(IDLE)] == []


def _two_steps(rank: int) -> None:
    with process_group("cpu"):
        for family in FAMILIES:
            model, x = family.randomised()
            rewire(model, "softmax", input_size=family.input_size)
            ddp = DistributedDataParallel(model.train())
            for _ in range(2):  # a weight without a gradient is noticed by the second
                loss_of(ddp, x).backward()
            del ddp


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of depthwise convolutions: not an error, says torch
def test_every_family_takes_two_steps_in_two_processes() -> None:
    in_two_processes(_two_steps)
