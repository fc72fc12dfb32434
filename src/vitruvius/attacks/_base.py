"""What an attack is: frozen settings, called with (model, x, y), giving x' in the ball and in the image.

B images (B, C, H, W) of pixels in [0, 1], K classes. An attack leaves the train or eval mode as it finds it.
"""

from __future__ import annotations

import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from vitruvius._dice import Dice, image_ids
from vitruvius._errors import ConfigError, DataError
from vitruvius._registry import Registry
from vitruvius.attacks._models import CheckedModel, frozen
from vitruvius.attacks._norms import LINF, Norm, as_norm

Model: TypeAlias = Callable[[Tensor], Tensor]


class Threat(Protocol):
    """Anything that disturbs images: (model, x, y) → x'.

    One that also takes `ids=` (B,) int64 gives an image the same x' in every batch, if the ids are the same.
    """

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, /) -> Tensor: ...


attacks: Registry[Callable[..., Threat]] = Registry("attack")


def disturb(threat: Threat, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    """Call a threat, telling it the ids of the images if it wants to know them."""
    if "ids" in inspect.signature(threat).parameters:
        return threat(model, x, y, ids=ids)  # type: ignore[call-arg]
    return threat(model, x, y)


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """What our own attacks share: a ball, a seed, and checks before the search."""

    norms: ClassVar[tuple[str, ...]] = ("linf", "l2", "l1")

    eps: float  # in pixels, images in [0, 1]
    norm: Norm = LINF
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", as_norm(self.norm))
        if self.norm.name not in self.norms:
            name = type(self).__name__
            raise ConfigError(f"{name} works in {' and '.join(self.norms)}, not in {self.norm}.")
        check_eps(self.eps, self.norm)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, /, *, ids: Tensor | None = None) -> Tensor:
        """Check, then search. `ids` (B,) int64 name the images for the dice; default: a hash of their pixels."""
        check_inputs(x, y, *self.image_range())
        with torch.inference_mode(False), torch.no_grad(), frozen(model):
            x = x.clone() if x.is_inference() else x.detach()
            y = y.clone() if y.is_inference() else y
            dice = Dice(image_ids(x) if ids is None else ids.to(x.device), self.seed, self.tag())
            return self.search(CheckedModel(self.prepare(model, x), y), x, y, dice)

    @abstractmethod
    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        """The attack itself, without checks; called under no_grad with the parameters frozen."""

    def prepare(self, model: nn.Module, x: Tensor) -> nn.Module:
        """The model as it is searched, or a faster view of it that answers the same."""
        return model

    def polish(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor) -> Tensor:
        """Search again where a faster search has failed; `start` is the worst point known. Shorter where it can be."""
        return self.search(model, x, y, dice)

    def tag(self) -> str:
        """Whose dice these are."""
        return type(self).__name__

    def image_range(self) -> tuple[float, float]:
        """Least and largest pixel."""
        return 0.0, 1.0


def check_eps(eps: float, norm: Norm) -> None:
    """Refuse a negative radius; warn of one that looks like it was meant in 1/255."""
    if math.isnan(eps) or eps < 0:
        raise ConfigError(f"eps={eps} is no radius; give a number that is 0 or more, such as 4 / 255.")
    if norm == LINF and 1 < eps < math.inf:
        warnings.warn(
            f"eps={eps:g} in linf allows every image, since pixels are in [0, 1]; did you mean {eps:g}/255?",
            stacklevel=4,
        )


def check_inputs(x: Tensor, y: Tensor, low: float = 0.0, high: float = 1.0) -> None:
    """Refuse images and labels that no attack can mean. Reads the tensors once."""
    if not x.is_floating_point():
        raise DataError(f"images have dtype {x.dtype}; attacks need floating-point pixels in [{low:g}, {high:g}].")
    if x.ndim < 2 or len(x) != len(y) or y.ndim not in (1, 2):
        raise DataError(f"images {tuple(x.shape)} and labels {tuple(y.shape)} do not pair; expected (B, ...) and (B,).")
    if y.ndim == 1 and (y.is_floating_point() or y.dtype == torch.bool):
        raise DataError(f"labels have dtype {y.dtype}; expected whole numbers (int64), or probabilities (B, K).")
    if not len(x):
        return
    least, most, label = torch.stack([x.amin().double(), x.amax().double(), y.amin().double()]).tolist()
    if math.isnan(least) or math.isnan(most):
        raise DataError("images hold NaN pixels; look at the loader's transforms.")
    if least < low or most > high:
        raise DataError(
            f"pixels reach from {least:.4g} to {most:.4g}; expected [{low:g}, {high:g}]. "
            "Normalisation belongs inside the model (PixelModel), 8-bit images are divided by 255."
        )
    if label < 0:
        raise DataError(f"labels reach down to {label:g}; expected 0 or more.")
