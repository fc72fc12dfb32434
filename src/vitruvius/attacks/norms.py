"""The three threat balls, Linf, L2 and L1: each can draw a point, step along a gradient, measure and project.

Deltas have shape (B, C, H, W) or any (B, ...). Uniform points: Calafiore et al. 1998; L1 projection: Duchi et al. 2008.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius._random import Dice


class Norm(ABC):
    """A ball of radius eps around an image."""

    name: ClassVar[str]

    @classmethod
    def parse(cls, text: str) -> Norm:
        """From the `text` of a recipe or a command line: `norm=l2`."""
        return as_norm(text)

    @abstractmethod
    def length(self, delta: Tensor) -> Tensor:
        """(B,) norms of `delta` (B, ...), in pixels."""

    @abstractmethod
    def random(self, x: Tensor, eps: float | Tensor, dice: Dice, step: int | Tensor = 0) -> Tensor:
        """A delta of x's shape, uniform in the ball.

        `x` are images (B, ...); `eps` is the radius; `dice` gives the numbers; `step` tells draws of one search apart,
        one for all images or (B,).
        """

    @abstractmethod
    def steepest(self, grad: Tensor) -> Tensor:
        """The direction of unit norm in which the loss rises fastest; 0 where the gradient is 0."""

    @abstractmethod
    def project(self, delta: Tensor, eps: float | Tensor) -> Tensor:
        """The nearest delta in the ball."""

    def usable(self, grad: Tensor, point: Tensor, low: float, high: float) -> Tensor:
        """The part of a gradient that a step may follow; only sparse steps must know where the image ends."""
        return grad

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class LinfNorm(Norm):
    """Every pixel moves by at most eps."""

    name: ClassVar[str] = "linf"

    def length(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).abs().amax(1)

    def random(self, x: Tensor, eps: float | Tensor, dice: Dice, step: int | Tensor = 0) -> Tensor:
        return dice.uniform("linf", x.shape[1:], step).to(x.dtype).mul_(2).sub_(1).mul_(eps)

    def steepest(self, grad: Tensor) -> Tensor:
        return grad.sign()

    def project(self, delta: Tensor, eps: float | Tensor) -> Tensor:
        return delta.clamp(-eps, eps)  # type: ignore[arg-type]  # both numbers, or both tensors


@dataclass(frozen=True, repr=False)
class L2Norm(Norm):
    """The Euclidean length of the change is at most eps.

    `floor` and `slack` guard the divisions; the released light recipe has 1e-10 and 1e-7.
    """

    name: ClassVar[str] = "l2"
    floor: float = 1e-12  # steepest = grad / (length + floor)
    slack: float = 1e-12  # project = delta * eps / (length + slack)

    def length(self, delta: Tensor) -> Tensor:
        return torch.linalg.vector_norm(delta.flatten(1), dim=1)

    def random(self, x: Tensor, eps: float | Tensor, dice: Dice, step: int | Tensor = 0) -> Tensor:
        radius = dice.uniform("l2/radius", (), step).to(x.dtype) ** (1 / x[0].numel())
        normal = dice.normal("l2", x.shape[1:], step).to(x.dtype)
        return eps * per_image(radius, x) * self.steepest(normal)

    def steepest(self, grad: Tensor) -> Tensor:
        return grad / per_image(self.length(grad) + self.floor, grad)

    def project(self, delta: Tensor, eps: float | Tensor) -> Tensor:
        length = self.length(delta)
        return delta * per_image(torch.where(length > eps, (length + self.slack).reciprocal() * eps, 1.0), delta)


@dataclass(frozen=True, repr=False)
class L1Norm(Norm):
    """The absolute changes sum to at most eps.

    The exactly steepest direction moves one pixel; spreading it over the top `share` of the pixels is what
    works (sparse L1 descent, Tramèr & Boneh 2019).
    """

    name: ClassVar[str] = "l1"
    share: float = 0.01

    def length(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).abs().sum(1)

    def random(self, x: Tensor, eps: float | Tensor, dice: Dice, step: int | Tensor = 0) -> Tensor:
        shape = (x[0].numel() + 1,)
        uniform = dice.uniform("l1", shape, step).to(x.dtype)
        gaps = -(1 - uniform).log()  # exponential; the last gap is the unused radius
        sizes = (gaps / gaps.sum(1, keepdim=True))[:, :-1].view_as(x)
        return eps * sizes * dice.signs("l1/signs", x.shape[1:], step).to(x.dtype)

    def steepest(self, grad: Tensor) -> Tensor:
        sizes = grad.flatten(1).abs()
        count = max(1, round(self.share * sizes.shape[1]))
        threshold = sizes.topk(count, dim=1).values[:, -1]
        signs = torch.where(grad.abs() >= per_image(threshold, grad), grad.sign(), 0.0)
        return signs / per_image(self.length(signs).clamp(min=1), grad)

    def usable(self, grad: Tensor, point: Tensor, low: float, high: float) -> Tensor:
        """0 where a pixel is at its end already, so that others get the step."""
        stuck = ((point <= low) & (grad < 0)) | ((point >= high) & (grad > 0))
        return torch.where(stuck, 0.0, grad)

    def project(self, delta: Tensor, eps: float | Tensor) -> Tensor:
        sizes = delta.flatten(1).abs()
        ordered = sizes.sort(dim=1, descending=True).values
        excess = ordered.cumsum(1) - eps  # what the k largest are too long by
        count = torch.arange(1, sizes.shape[1] + 1, device=delta.device)
        last = (ordered * count > excess).sum(1, keepdim=True).clamp(min=1)
        threshold = (excess.gather(1, last - 1) / last).clamp(min=0)
        shrunk = (sizes - threshold).clamp(min=0)
        fit = (shrunk.sum(1, keepdim=True).clamp(min=1e-30).reciprocal() * eps).clamp(max=1)  # 1, except for rounding
        return delta.sign() * (shrunk * fit).view_as(delta)


LINF = LinfNorm()
L2 = L2Norm()
L1 = L1Norm()
NORMS: dict[str, Norm] = {norm.name: norm for norm in (LINF, L2, L1)}


def as_norm(norm: Norm | str) -> Norm:
    """A norm from its name: linf, l2 or l1; a `norm` itself stays."""
    if isinstance(norm, Norm):
        return norm
    if not isinstance(norm, str):
        raise ConfigError(f"norm={norm!r}; expected a name: norm='linf', 'l2' or 'l1'.")
    if norm.lower() not in NORMS:
        raise UnknownName(f"no norm named {norm!r}{suggest(norm, NORMS)} Known: {', '.join(NORMS)}.")
    return NORMS[norm.lower()]


def per_image(values: Tensor, x: Tensor) -> Tensor:
    """(B,) values shaped to multiply images (B, ...)."""
    return values.view(-1, *[1] * (x.ndim - 1))


def in_order(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values (B, D), 0 or more, from the least to the largest, and where each stood.

    On a CPU as whole numbers with these places in their lower halves, which NumPy sorts in a tenth of the time.
    """
    if values.device.type != "cpu" or values.dtype != torch.float32:
        return values.sort(dim=1)
    keys = (values.view(torch.int32).long() << 32) | torch.arange(values.shape[1])
    keys.numpy().sort(axis=1)
    return (keys >> 32).int().view(torch.float32), keys & (2**32 - 1)
