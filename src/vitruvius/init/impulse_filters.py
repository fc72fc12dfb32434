"""Depth-wise convolutions begin as impulses: for models that mix space by them, such as XCiT and ConvNeXt.

Zheng et al. 2024, arXiv:2401.12511, show it for ConvMixer; XCiT attends among channels and leaves space to the two
3×3 convolutions of its local patch interaction, so these are the place of its impulses.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from vitruvius._errors import UnsuitableSite
from vitruvius.init._base import bases
from vitruvius.init.filters import filters


@bases.register("impulse_filters")
@torch.no_grad()
def impulse_filters(
    model: nn.Module, *, kind: Literal["impulse", "random"] = "impulse", generator: torch.Generator
) -> None:
    """Every depth-wise convolution begins with one random tap a channel, no bias; all else stays as it is.

    `model` is written to, `generator` draws the taps. `kind` "random" draws all taps as PyTorch does, without a bias:
    the start to compare with.
    """
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d) and mixes_space(module)]
    if not found:
        raise UnsuitableSite(
            f"'impulse_filters' starts depth-wise convolutions, and {type(model).__name__} has none. "
            "For attention over tokens use init: impulse."
        )
    for convolution in found:
        made = filters[kind](len(convolution.weight), convolution.kernel_size[0], generator=generator)
        convolution.weight.copy_(made[:, None])
        if convolution.bias is not None:
            convolution.bias.zero_()


def mixes_space(convolution: nn.Conv2d) -> bool:
    """Whether a `convolution` sees one channel at a time and more than one pixel of it."""
    rows, columns = convolution.kernel_size
    return 1 < convolution.groups == convolution.in_channels and rows == columns > 1
