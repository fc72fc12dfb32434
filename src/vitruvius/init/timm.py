"""timm's own start for ViTs: linear weights of std 0.02, zero biases, the rest as PyTorch constructs it."""

from __future__ import annotations

import torch
from torch import nn

from vitruvius.init._base import bases
from vitruvius.init._modules import draw_tokens, reset, truncated_normal, walk, weight, zero_bias


@bases.register("timm")
@torch.no_grad()
def timm(model: nn.Module, *, generator: torch.Generator) -> None:
    """timm's default: linear weights N(0, 0.02²), zero biases, convolutions as PyTorch constructs them.

    All of `model` begins anew, from the numbers of `generator` alone.
    """
    draw_tokens(model, generator)
    for _, module in walk(model):
        if isinstance(module, nn.Linear):
            weight(module).copy_(truncated_normal(weight(module), 0.02, 2.0, generator))
            zero_bias(module)
        else:
            reset(module, generator)
