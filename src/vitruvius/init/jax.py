"""The start of the original JAX ViTs (Dosovitskiy et al. 2021, arXiv:2010.11929), as timm carries it over."""

from __future__ import annotations

import math

import torch
from torch import nn

from vitruvius.init._base import bases
from vitruvius.init._modules import (
    bias_of,
    draw_tokens,
    fan_in,
    fan_out,
    normal,
    reset,
    truncated_normal,
    uniform,
    walk,
    weight,
    zero_bias,
)

UNIT = 0.87962566103423978  # std of a standard normal cut at ±2


@bases.register("jax")
@torch.no_grad()
def jax(model: nn.Module, *, negative_log_head_bias: bool = False, generator: torch.Generator) -> None:
    """Xavier-uniform linear layers, tiny MLP biases, LeCun-normal convolutions, a head of zeros.

    All of `model` begins anew, from the numbers of `generator` alone. `negative_log_head_bias` starts the head's bias
    at −ln(classes), for losses of many binary classes (timm's `jax_nlhb`); by default it is zero.
    """
    draw_tokens(model, generator)
    for name, module in walk(model):
        if isinstance(module, nn.Linear) and name.startswith("head"):
            _head(module, negative_log_head_bias)
        elif isinstance(module, nn.Linear):
            _linear(module, "mlp" in name, generator)
        elif isinstance(module, nn.Conv2d):
            std = fan_in(module) ** -0.5 / UNIT
            weight(module).copy_(std * truncated_normal(weight(module), 1.0, 2.0, generator))
            zero_bias(module)
        else:
            reset(module, generator)


def _head(module: nn.Linear, negative_log_bias: bool) -> None:
    weight(module).zero_()
    zero_bias(module)
    bias = bias_of(module)
    if bias is not None and negative_log_bias:
        bias.fill_(-math.log(module.out_features))


def _linear(module: nn.Linear, in_mlp: bool, generator: torch.Generator) -> None:
    bound = math.sqrt(6 / (fan_in(module) + fan_out(module)))
    weight(module).copy_(uniform(weight(module), bound, generator))
    zero_bias(module)
    bias = bias_of(module)
    if bias is not None and in_mlp:
        bias.copy_(normal(bias, 1e-6, generator))
