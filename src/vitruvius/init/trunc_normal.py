"""Truncated normal weights everywhere."""

from __future__ import annotations

import torch
from torch import nn

from vitruvius._errors import ConfigError
from vitruvius.init._base import bases
from vitruvius.init._modules import draw_tokens, is_layer, reset, truncated_normal, walk, weight, zero_bias


@bases.register("trunc_normal")
@torch.no_grad()
def trunc_normal(model: nn.Module, *, std: float = 0.02, generator: torch.Generator) -> None:
    """Linear layers and convolutions N(0, std²) cut at two std, zero biases; positions and tokens as timm's.

    All of `model` begins anew, from the numbers of `generator` alone; `std` is positive, 0.02 by default.
    """
    if std <= 0:
        raise ConfigError(f"std={std}, expected a positive number.")
    draw_tokens(model, generator)
    for _, module in walk(model):
        if is_layer(module):
            weight(module).copy_(truncated_normal(weight(module), std, 2 * std, generator))
            zero_bias(module)
        else:
            reset(module, generator)
