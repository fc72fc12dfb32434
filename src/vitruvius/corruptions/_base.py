"""What a corruption is: frozen settings, called with (model, x, y) as every threat, giving x' by chance.

Hendrycks & Dietterich 2019, "Benchmarking neural network robustness to common corruptions and perturbations".
B images (B, C, H, W) of pixels in [0, 1], C is 1 (grey) or 3 (colour).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vitruvius._checks import check_pixels
from vitruvius._dice import Dice, image_ids
from vitruvius._errors import ConfigError, DataError
from vitruvius._registry import Registry

Scale = Literal["auto", "imagenet", "cifar"]
SMALL = 64  # pixels: the shorter side up to which `auto` takes the constants of CIFAR-10-C
CACHED = 2**20  # numbers of images corrupted at a time on a CPU, so that what is computed stays in its cache
SEVERITIES = (1, 2, 3, 4, 5)

corruptions: Registry[Callable[..., Corruption]] = Registry("corruption", homes=["vitruvius.corruptions"])


@dataclass(frozen=True, kw_only=True)
class Corruption(ABC):
    """What all corruptions share: a severity, a seed, the table of constants, and 8-bit levels at the end.

    `round8`: the result is cut down to the 256 levels of stored images, as in the published sets; false keeps
    the finer numbers. `scale`: whose constants, ImageNet-C's or CIFAR-10-C's; `auto` goes by the shorter side.
    `severity`: from 1, hardly visible, to 5. `seed`: of everything random, together with the ids of the images.
    """

    name: ClassVar[str]
    gives_levels: ClassVar[bool] = False  # whether what it gives has the 256 levels already
    imagenet: ClassVar[tuple[Any, ...]]  # one entry per severity
    cifar: ClassVar[tuple[Any, ...]]

    severity: int  # 1 … 5
    seed: int = 0
    scale: Scale = "auto"
    round8: bool = True

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ConfigError(f"{self.name}: severity={self.severity!r}, expected a whole number from 1 to 5.")
        if self.scale not in ("auto", "imagenet", "cifar"):
            raise ConfigError(f"{self.name}: scale={self.scale!r}, expected auto, imagenet or cifar.")

    def __call__(
        self, model: nn.Module | None, x: Tensor, y: Tensor | None = None, /, *, ids: Tensor | None = None
    ) -> Tensor:
        """x' of images `x` (B, C, H, W) in [0, 1]; neither `model` nor labels `y` matter.

        `ids` (B,) int64 name the images for the dice; default: their pixels.
        """
        return self.apply(x, ids=ids)

    @torch.no_grad()
    def apply(self, x: Tensor, *, ids: Tensor | None = None) -> Tensor:
        """x' of the same shape, dtype and device. One image with the same id gives the same x' in every batch.

        `x` (B, C, H, W) in [0, 1]; `ids` (B,) int64, by default a hash of the pixels.
        """
        check_images(x)
        if not len(x):
            return x.clone()
        if ids is None:
            ids = image_ids(x)
        ids = ids.to(x.device)
        at_once = len(x)
        if x.device.type == "cpu":
            at_once = max(1, CACHED // x[0].numel())
        moved = torch.empty_like(x)
        for rows in torch.arange(len(x)).split(at_once):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            moved[part] = self._apply(x[part], ids[part])
        return moved

    def _apply(self, x: Tensor, ids: Tensor) -> Tensor:
        moved = self.disturb(x.float(), Dice(ids, self.seed, self.label), *self.constants(x))
        if self.gives_levels:
            return moved
        moved = moved.clamp_(0, 1)
        if self.round8:
            return to_levels(moved).div_(255)
        return moved

    @abstractmethod
    def disturb(self, x: Tensor, dice: Dice, /, *constants: Any) -> Tensor:
        """The corruption itself, float32 in and out, without checks; the caller clips and rounds.

        `x` (B, C, H, W) in [0, 1]; `dice` gives random numbers that belong to the images; `constants` are the published
        ones of this severity.
        """

    def constants(self, x: Tensor) -> tuple[Any, ...]:
        """The published constants of this severity, for images of this size. `x` is (B, C, H, W)."""
        table = self.cifar if self.is_small(x) else self.imagenet
        chosen = table[self.severity - 1]
        if isinstance(chosen, tuple):
            return chosen
        return (chosen,)

    def is_small(self, x: Tensor) -> bool:
        """Whether CIFAR-10-C's constants are meant. `x` is (B, C, H, W)."""
        return self.scale == "cifar" or (self.scale == "auto" and min(x.shape[-2:]) <= SMALL)

    @property
    def label(self) -> str:
        """`fog 3`."""
        return f"{self.name} {self.severity}"

    @property
    def __name__(self) -> str:
        """What reports call it: `glass_blur`, not `glassblur`."""
        return self.name


def to_levels(x: Tensor) -> Tensor:
    """0 … 255, cut and not rounded as the published code does; the 1/1000 keeps whole numbers from rounding noise."""
    return (x * 255).add_(1e-3).floor_()


def check_images(x: Tensor) -> None:
    """Refuse what is not a batch of pixels in [0, 1], grey or colour, at least 4×4. Reads the tensor once."""
    if x.is_floating_point() and (x.ndim != 4 or x.shape[1] not in (1, 3)):
        raise DataError(f"images have shape {tuple(x.shape)}; corruptions need (B, 1 or 3, height, width).")
    if x.ndim == 4 and min(x.shape[-2:]) < 4:
        raise DataError(f"images are {x.shape[-2]}×{x.shape[-1]} pixels; corruptions need at least 4×4.")
    check_pixels(x)
