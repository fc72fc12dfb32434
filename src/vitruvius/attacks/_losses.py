"""What attacks maximise: (logits, y) → one number per image, larger is worse for the model.

Difference of logits ratio (DLR): Croce & Hein 2020, arXiv:2003.01690, equations 6 and 7. B images, K classes.
With fewer than 3 classes (4 when targeted) the ratio has no denominator and the plain margin takes its place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch.nn.functional as F
from torch import Tensor

from vitruvius._errors import UnknownName, suggest

T = TypeVar("T")


class Loss(ABC):
    """An untargeted loss."""

    name: ClassVar[str]

    @classmethod
    def parse(cls, text: str) -> Loss:
        """From the `text` of a recipe or a command line: `loss=dlr`."""
        return as_loss(text)

    @abstractmethod
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """(B, K) logits and (B,) labels, or (B, K) soft ones, to (B,) losses.

        `y` has the soft labels of mixup only where the loss compares with probabilities; else their largest counts.
        """

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class CrossEntropy(Loss):
    """−log softmax at the label."""

    name: ClassVar[str] = "ce"

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, hard_labels(y), reduction="none")


@dataclass(frozen=True, repr=False)
class Margin(Loss):
    """Largest other logit minus the label's; positive exactly when the model is wrong."""

    name: ClassVar[str] = "margin"

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        y = hard_labels(y)
        others = logits.scatter(1, y[:, None], -float("inf"))
        return others.amax(1) - at(logits, y)


@dataclass(frozen=True, repr=False)
class DLRLoss(Loss):
    """The margin over the spread between first and third logit, so that scaling the logits changes nothing."""

    name: ClassVar[str] = "dlr"

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        margin = MARGIN(logits, y)
        if logits.shape[1] < 3:
            return margin
        top = logits.topk(3, dim=1).values
        return margin / (top[:, 0] - top[:, 2] + 1e-12)


@dataclass(frozen=True, repr=False)
class KullbackLeibler(Loss):
    """KL(y ‖ softmax): `y` holds probabilities (B, K), the inner objective of TRADES."""

    name: ClassVar[str] = "kl"

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.kl_div(logits.log_softmax(1), y, reduction="none").sum(1)


class TargetedLoss(ABC):
    """A loss that pulls from the label toward a target."""

    name: ClassVar[str]

    @classmethod
    def parse(cls, text: str) -> TargetedLoss:
        """From the `text` of a recipe or a command line: `loss=dlr`."""
        return as_targeted_loss(text)

    @abstractmethod
    def __call__(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        """(B, K) logits, (B,) labels and (B,) targets to (B,) losses."""

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class TargetedMargin(TargetedLoss):
    """The target's logit minus the label's."""

    name: ClassVar[str] = "margin"

    def __call__(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        return at(logits, target) - at(logits, y)


@dataclass(frozen=True, repr=False)
class TargetedDLR(TargetedLoss):
    """The targeted margin over the spread between the first and the mean of third and fourth logit."""

    name: ClassVar[str] = "dlr"

    def __call__(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        margin = TARGETED_MARGIN(logits, y, target)
        if logits.shape[1] < 4:
            return margin
        top = logits.topk(4, dim=1).values
        return margin / (top[:, 0] - 0.5 * (top[:, 2] + top[:, 3]) + 1e-12)


CE = CrossEntropy()
DLR = DLRLoss()
MARGIN = Margin()
KL = KullbackLeibler()
TARGETED_DLR = TargetedDLR()
TARGETED_MARGIN = TargetedMargin()
LOSSES: dict[str, Loss] = {loss.name: loss for loss in (CE, DLR, MARGIN, KL)}
TARGETED_LOSSES: dict[str, TargetedLoss] = {loss.name: loss for loss in (TARGETED_DLR, TARGETED_MARGIN)}


def as_loss(loss: Loss | str) -> Loss:
    """A loss from its name: ce, dlr, margin or kl."""
    if isinstance(loss, Loss):
        return loss
    return _named(loss, LOSSES)


def as_targeted_loss(loss: TargetedLoss | str) -> TargetedLoss:
    """A targeted loss from its name: dlr or margin."""
    if isinstance(loss, TargetedLoss):
        return loss
    return _named(loss, TARGETED_LOSSES)


def hard_labels(y: Tensor) -> Tensor:
    """(B,) labels; mixed or smoothed ones (B, K) count as their largest. `y` is (B,) or (B, K)."""
    if y.ndim == 2:
        return y.argmax(1)
    return y


def at(logits: Tensor, classes: Tensor) -> Tensor:
    """(B,) logits of one class per image."""
    return logits.gather(1, classes[:, None]).squeeze(1)


def _named(name: str, losses: dict[str, T]) -> T:
    try:
        return losses[name]
    except KeyError:
        known = ", ".join(losses)
        raise UnknownName(f"no attack loss named {name!r}{suggest(name, losses)} Known: {known}.") from None
