"""Upstream's state-dict keys are sacred: with parameter-free cores the list is identical, in order."""

from __future__ import annotations

import torch

from families import Family
from vitruvius.surgery import restore, rewire


@torch.no_grad()
def test_keys_are_identical_and_checkpoints_go_both_ways(family: Family) -> None:
    plain, x = family.randomised(seed=1)
    model, _ = family.randomised(seed=2)
    rewire(model, "softmax", input_size=family.input_size)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict(), strict=True)
    copy_other_buffers(plain, model)
    torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=0)
    plain.load_state_dict(restore(model).state_dict(), strict=True)


def copy_other_buffers(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Buffers outside the state dict, which the randomised models have made their own."""
    for mine, theirs in zip(target.buffers(), source.buffers(), strict=True):
        mine.copy_(theirs)
