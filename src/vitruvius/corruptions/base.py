"""What a corruption is, and how corruptions are named: `fog:severity=3`, `corrupt:name=fog,severity=3`, `corruptions`.

A corruption has frozen settings and is called with (model, x, y) as every threat. The published set is a constant; new
corruptions, plugins' too, are in the group `all`, after the published ones.

Hendrycks & Dietterich 2019, "Benchmarking neural network robustness to common corruptions and perturbations".
B images (B, C, H, W) of pixels in [0, 1], C is 1 (grey) or 3 (colour).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from vitruvius._checks import check_pixels
from vitruvius._config import bind
from vitruvius._errors import ConfigError, DataError, suggest
from vitruvius._processes import keep_memory
from vitruvius._random import Dice, image_ids
from vitruvius._registry import Registry

BENCHMARK = (  # those that mCE is the mean of, in ImageNet-C's order: noise, blurs, weather, what is done to files
    "gaussian_noise", "shot_noise", "impulse_noise",
    "defocus_blur", "glass_blur", "motion_blur", "zoom_blur",
    "snow", "frost", "fog", "brightness",
    "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")  # published beside them, for validation
IMAGENET_C = (*BENCHMARK, *EXTRA)

Group = Literal["benchmark", "extra", "all"]
GROUPS = get_args(Group)
Scale = Literal["auto", "imagenet", "cifar"]
SMALL = 64  # pixels: the shorter side up to which `auto` takes the constants of CIFAR-10-C
CACHED = 2**19  # numbers of images corrupted at a time on a CPU, so that what is computed stays in its cache
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
        """`apply`, called like an attack; neither `model` nor labels `y` matter."""
        return self.apply(x, ids=ids)

    @torch.no_grad()
    def apply(self, x: Tensor, *, ids: Tensor | None = None) -> Tensor:
        """x' of the same shape, dtype and device as `x` (B, C, H, W) in [0, 1].

        One image with the same id gives the same x' in every batch; `ids` (B,) int64, by default a hash of the pixels.
        """
        check_images(x)
        if not len(x):
            return x.clone()
        ids = (image_ids(x) if ids is None else ids).to(x.device)
        at_once = len(x)
        if x.device.type == "cpu":
            keep_memory()
            at_once = max(1, CACHED // x[0].numel())
        parts = zip(x.split(at_once), ids.split(at_once), strict=True)
        return torch.cat([self._apply(*part) for part in parts]).to(x.dtype)

    def _apply(self, x: Tensor, ids: Tensor) -> Tensor:
        dice = Dice(ids, self.seed, f"{self.name} {self.severity}")
        moved = self.disturb(x.float(), dice, *self.constants(x))
        if self.gives_levels:
            return moved
        moved = moved.clamp_(0, 1)
        return to_levels(moved).div_(255) if self.round8 else moved

    @abstractmethod
    def disturb(self, x: Tensor, dice: Dice, /, *constants: Any) -> Tensor:
        """The corruption itself, float32 in and out, without checks; the caller clips and rounds.

        `dice` gives random numbers that belong to the images; `constants` are the published ones of this severity.
        """

    def constants(self, x: Tensor) -> tuple[Any, ...]:
        """The published constants of this severity, for images of this size."""
        table = self.cifar if self.is_small(x) else self.imagenet
        chosen = table[self.severity - 1]
        return chosen if isinstance(chosen, tuple) else (chosen,)

    def is_small(self, x: Tensor) -> bool:
        """Whether CIFAR-10-C's constants are meant."""
        return self.scale == "cifar" or (self.scale == "auto" and min(x.shape[-2:]) <= SMALL)

    @property
    def __name__(self) -> str:
        """What reports call it."""
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


def corruption_names(group: str) -> tuple[str, ...]:
    """The corruptions of a group: `benchmark` (the published 15), `extra` (4), or `all` that are registered.

    Published corruptions come first, in ImageNet-C's order, others by name.
    """
    if group not in GROUPS:
        known = ", ".join(GROUPS)
        raise ConfigError(f"no group of corruptions named {group!r}{suggest(group, GROUPS)} Groups: {known}.")
    if group == "all":
        return (*IMAGENET_C, *(name for name in corruptions if name not in IMAGENET_C))
    return BENCHMARK if group == "benchmark" else EXTRA


def corruption_grid(
    *,
    group: Group = "benchmark",
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    scale: Scale = "auto",
    round8: bool = True,
) -> list[Corruption]:
    """Every corruption of a group at every severity, corruption by corruption.

    group: `benchmark` (ImageNet-C's 15), `extra` (4) or `all` that are registered.
    seed, scale, round8: as for each corruption.
    """
    return [
        corruptions[name](severity=severity, seed=seed, scale=scale, round8=round8)
        for name in corruption_names(group)
        for severity in severities
    ]


def corrupt(x: Tensor, corruption: str | Mapping[str, Any] | Corruption, *, ids: Tensor | None = None) -> Tensor:
    """Corrupted images, e.g. `corrupt(x, "fog:severity=3")`.

    x: (B, C, H, W) pixels in [0, 1].
    corruption: its name with settings, or the object itself.
    ids: (B,) int64, which image each one is; random numbers belong to them. Default: a hash of the pixels.
    """
    made: Corruption = corruptions.make(corruption, where="corrupt")
    return made.apply(x, ids=ids)


def is_corruption(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a threat's `name` and `settings` mean corruptions; `gaussian_noise` with an eps is an attack."""
    if name in ("corrupt", "corruptions") or "severity" in settings:
        return True
    return name in corruptions and "eps" not in settings


def parse_corruptions(name: str, settings: Mapping[str, Any], *, where: str = "") -> list[Corruption]:
    """One corruption by its name or as `corrupt:name=…`, a grid of them as `corruptions`.

    settings: those of the corruption, or of `corruption_grid`.
    where: begins the sentence of an error, e.g. `--threat`.
    """
    if name == "corruptions":
        return corruption_grid(**bind(name, corruption_grid, settings, where=where))
    settings = dict(settings)
    if name == "corrupt":
        if "name" not in settings:
            known = ", ".join(corruption_names("all"))
            raise ConfigError(f"{where}: corrupt needs a name, e.g. corrupt:name=fog,severity=3. Known: {known}.")
        name = str(settings.pop("name"))
    return [corruptions.make({"use": name, **settings}, where=where)]


DRAWN = (
    "frost is drawn, not cut from the photographs of the published sets, and an ImageNet classifier does 10 to 20 "
    "points worse on it: compare its figures, and means that hold them, with drawn frost only. textures=FOLDER "
    "(corrupt: --textures FOLDER) takes photographs."
)  # what stands beside every figure of drawn frost


def is_drawn(description: str) -> bool:
    """Whether a threat's description in a ledger, such as `frost(severity=3)`, means drawn frost."""
    return description.startswith("frost(") and "textures=" not in description
