"""Orthogonal weights (Saxe et al. 2014, arXiv:1312.6120): the QR factor of a normal matrix, its signs made uniform."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.init._base import bases
from vitruvius.init._modules import draw_tokens, is_layer, normal, reset, walk, weight, zero_bias


@bases.register("orthogonal")
@torch.no_grad()
def orthogonal(model: nn.Module, *, gain: float = 1.0, generator: torch.Generator) -> None:
    """Linear layers and convolutions with orthonormal rows or columns times gain, zero biases; tokens as timm's.

    q, k and v of one fused projection are each orthogonal. All of `model` begins anew, from the numbers of `generator`
    alone; `gain` is positive, 1 by default.
    """
    if gain <= 0:
        raise ConfigError(f"gain={gain}, expected a positive number.")
    draw_tokens(model, generator)
    for name, module in walk(model):
        if is_layer(module):
            blocks: tuple[Tensor, ...] = (weight(module),)
            if "qkv" in name:
                blocks = weight(module).chunk(3)
            for block in blocks:
                block.copy_(gain * random_orthogonal(block.flatten(1), generator).view_as(block))
            zero_bias(module)
        else:
            reset(module, generator)


def random_orthogonal(like: Tensor, generator: torch.Generator) -> Tensor:
    """A uniformly random matrix whose shorter side is orthonormal.

    `like` gives shape, dtype and device; `generator` draws.
    """
    rows, columns = like.shape
    tall = like.new_empty(max(rows, columns), min(rows, columns))
    q, r = torch.linalg.qr(normal(tall, 1.0, generator))
    q = q * r.diagonal().sign()
    if rows < columns:
        return q.mT
    return q
