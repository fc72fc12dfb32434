"""Depth-wise filters: how spatial mixing by convolutions begins, and stays if frozen.

Zheng et al. 2024, arXiv:2401.12511: ConvMixer's convolutions need not be learned when their filters span enough. XCiT
attends among channels and leaves space to the two 3×3 convolutions of its local patch interaction, so these are the
place of its impulses (`impulse_filters`).
Each registered function makes F = `count` filters of K×K taps, K = `size`, (F, K, K), on the generator's device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError, UnsuitableSite
from vitruvius._registry import Registry
from vitruvius.init.base import bases

filters: Registry[Callable[..., Tensor]] = Registry("filter")


@filters.register("random")
def random(count: int, size: int, *, generator: torch.Generator) -> Tensor:
    """Uniform within ±1/K, PyTorch's own start; squared norm one third on average."""
    blank = torch.empty(count, size, size, device=generator.device)
    return blank.uniform_(-1 / size, 1 / size, generator=generator)


@filters.register("softmax")
def softmax(count: int, size: int, *, generator: torch.Generator) -> Tensor:
    """Uniform within ±1/K, but the layer takes the softmax of its taps at every pass."""
    return random(count, size, generator=generator)


@filters.register("impulse")
def impulse(count: int, size: int, *, generator: torch.Generator) -> Tensor:
    """One random tap of height √(1/K)."""
    return box(count, size, taps=1, generator=generator)


@filters.register("box")
def box(count: int, size: int, *, taps: int, generator: torch.Generator) -> Tensor:
    """Distinct random taps, 1 to K² of them, all equal, of squared norm 1/K together."""
    if not 1 <= taps <= size * size:
        raise ConfigError(f"taps={taps}, expected 1 to {size * size} for a {size}×{size} filter.")
    order = torch.rand(count, size * size, generator=generator, device=generator.device).argsort(-1)
    flat = torch.zeros(count, size * size, device=generator.device)
    return flat.scatter_(1, order[:, :taps], (taps * size) ** -0.5).view(count, size, size)


@filters.register("gauss")
def gauss(count: int, size: int, *, variance: float, generator: torch.Generator) -> Tensor:
    """A Gaussian bump around a random tap, of this `variance` in taps squared; the mean squared norm is 1/K."""
    if not 0 < variance < math.inf:
        raise ConfigError(f"variance={variance}, expected a positive number, in taps squared.")
    middle = torch.randint(size, (count, 2, 1), generator=generator, device=generator.device)
    away = (torch.arange(size, device=generator.device) - middle).square()  # (F, 2, K)
    bumps = torch.exp(-(away[:, 0, :, None] + away[:, 1, None, :]) / (2 * variance))
    return bumps * (size * bumps.square().sum((1, 2)).mean()) ** -0.5


@bases.register("impulse_filters")
@torch.no_grad()
def impulse_filters(
    model: nn.Module, *, kind: Literal["impulse", "random"] = "impulse", generator: torch.Generator
) -> None:
    """Every depth-wise convolution begins with one random tap a channel, no bias; all else stays as it is.

    For models that mix space by convolutions, such as XCiT and ConvNeXt. `kind` "random" draws all taps as PyTorch
    does, without a bias: the start to compare with.
    """
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d) and mixes_space(module)]
    if not convolutions:
        raise UnsuitableSite(
            f"'impulse_filters' starts depth-wise convolutions, and {type(model).__name__} has none. "
            "For attention over tokens use init: impulse."
        )
    for convolution in convolutions:
        made = filters[kind](len(convolution.weight), convolution.kernel_size[0], generator=generator)
        convolution.weight.copy_(made[:, None])
        if convolution.bias is not None:
            convolution.bias.zero_()


def mixes_space(convolution: nn.Conv2d) -> bool:
    """Whether it sees one channel at a time and more than one pixel of it."""
    rows, columns = convolution.kernel_size
    return 1 < convolution.groups == convolution.in_channels and rows == columns > 1
