"""The start of MoCo v3 (Chen et al. 2021, arXiv:2104.02057), as timm carries it over."""

from __future__ import annotations

import math

import torch
from torch import nn

from vitruvius.init._base import bases
from vitruvius.init._modules import draw_tokens, fan_in, fan_out, reset, uniform, walk, weight, zero_bias


@bases.register("moco")
@torch.no_grad()
def moco(model: nn.Module, *, generator: torch.Generator) -> None:
    """Xavier-uniform linear layers with q, k and v counted apart, zero biases, convolutions as PyTorch's.

    All of `model` begins anew, from the numbers of `generator` alone.
    """
    draw_tokens(model, generator)
    for name, module in walk(model):
        if isinstance(module, nn.Linear):
            outputs = fan_out(module)
            if "qkv" in name:
                outputs //= 3
            bound = math.sqrt(6 / (outputs + fan_in(module)))
            weight(module).copy_(uniform(weight(module), bound, generator))
            zero_bias(module)
        else:
            reset(module, generator)
