"""Depth-wise filters for ConvMixer: how its spatial mixing begins, and stays if frozen.

Zheng et al. 2024, arXiv:2401.12511: convolutions need not be learned when their filters span enough.
Each function makes F filters of K×K taps, (F, K, K), on the generator's device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius._registry import Registry

filters: Registry[Callable[..., Tensor]] = Registry("filter")


@filters.register("random")
def random(count: int, size: int, *, generator: torch.Generator) -> Tensor:
    """Uniform within ±1/K, PyTorch's own start; squared norm one third on average.

    `count` is F, the number of filters; `size` K of each; `generator` draws them, where they are made.
    """
    blank = torch.empty(count, size, size, device=generator.device)
    return blank.uniform_(-1 / size, 1 / size, generator=generator)


@filters.register("softmax")
def softmax(count: int, size: int, *, generator: torch.Generator) -> Tensor:
    """Uniform within ±1/K, but the layer takes the softmax of its taps at every pass.

    `count`, `size` and `generator` are as in `random`.
    """
    return random(count, size, generator=generator)


@filters.register("impulse")
def impulse(count: int, size: int, *, generator: torch.Generator) -> Tensor:
    """One random tap of height √(1/K). `count`, `size` and `generator` are as in `random`."""
    return box(count, size, taps=1, generator=generator)


@filters.register("box")
def box(count: int, size: int, *, taps: int, generator: torch.Generator) -> Tensor:
    """Distinct random taps, all equal, of squared norm 1/K together.

    `taps` is their number, 1 to K²; `count`, `size` and `generator` are as in `random`.
    """
    if not 1 <= taps <= size * size:
        raise ConfigError(f"taps={taps}, expected 1 to {size * size} for a {size}×{size} filter.")
    order = torch.rand(count, size * size, generator=generator, device=generator.device).argsort(-1)
    flat = torch.zeros(count, size * size, device=generator.device)
    return flat.scatter_(1, order[:, :taps], (taps * size) ** -0.5).view(count, size, size)


@filters.register("gauss")
def gauss(count: int, size: int, *, variance: float, generator: torch.Generator) -> Tensor:
    """A Gaussian bump around a random tap, scaled so that the mean squared norm is 1/K.

    `variance` of the bump is in taps squared, above 0; `count`, `size` and `generator` are as in `random`.
    """
    if not 0 < variance < math.inf:
        raise ConfigError(f"variance={variance}, expected a positive number, in taps squared.")
    middle = torch.randint(size, (count, 2, 1), generator=generator, device=generator.device)
    away = (torch.arange(size, device=generator.device) - middle).square()  # (F, 2, K)
    bumps = torch.exp(-(away[:, 0, :, None] + away[:, 1, None, :]) / (2 * variance))
    return bumps * (size * bumps.square().sum((1, 2)).mean()) ** -0.5
