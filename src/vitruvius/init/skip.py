"""PyTorch's constructor values, what timm calls `skip`: where the released impulse and mimetic inits begin."""

from __future__ import annotations

import torch
from torch import nn

from vitruvius.init._base import bases
from vitruvius.init._modules import normal, reset, tokens, walk


@bases.register("skip")
@torch.no_grad()
def skip(model: nn.Module, *, generator: torch.Generator) -> None:
    """PyTorch's constructor values: uniform within ±1/√fan_in, biases too; positions N(0, 0.02²), tokens zero.

    All of `model` begins anew, from the numbers of `generator` alone.
    """
    for name, token in tokens(model):
        if name == "pos_embed":
            token.copy_(normal(token, 0.02, generator))
        else:
            token.zero_()
    for _, module in walk(model):
        reset(module, generator)
