"""What is chosen for speed alone: optimisers that update in one launch on a GPU, and dice seeded without detours."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from vitruvius.training._build import _in_one_kernel
from vitruvius.training._seeding import seed_batch


def model_on_a_gpu() -> SimpleNamespace:
    weights = [SimpleNamespace(is_cuda=True)]
    return SimpleNamespace(parameters=lambda: weights)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "momentum"])
def test_pytorchs_own_optimisers_are_fused_on_an_nvidia_gpu(name: str) -> None:
    assert _in_one_kernel(name, {}, model_on_a_gpu()) == {"fused": True}
    assert _in_one_kernel(name, {}, nn.Linear(2, 2)) == {}


@pytest.mark.parametrize("asked", [{"fused": False}, {"foreach": True}])
def test_what_the_recipe_asks_for_is_left_alone(asked: dict[str, bool]) -> None:
    assert _in_one_kernel("adamw", asked, model_on_a_gpu()) == {}


@pytest.mark.parametrize("name", ["lamb", "nadamw", "radam", "no such optimiser"])
def test_others_are_not_asked_for_what_they_cannot_do(name: str) -> None:
    assert _in_one_kernel(name, {}, model_on_a_gpu()) == {}


def test_dice_are_those_of_manual_seed_and_differ_from_batch_to_batch() -> None:
    thrown = []
    for batch in (0, 1, 0):
        seed_batch(seed=3, epoch=1, batch=batch, rank=0, device=torch.device("cpu"))
        thrown.append((float(torch.rand(())), random.random(), float(np.random.rand())))  # noqa: NPY002
    assert thrown[0] == thrown[2]
    assert all(a != b for a, b in zip(thrown[0], thrown[1], strict=True))
    mixed = np.random.SeedSequence([3, 1, 0, 0]).generate_state(4)
    torch.manual_seed((int(mixed[0]) << 31) ^ int(mixed[1]))
    assert float(torch.rand(())) == thrown[0][0]
