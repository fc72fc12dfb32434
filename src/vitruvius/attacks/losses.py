"""What attacks maximise: (logits, y) → one number per image, larger is worse for the model.

Difference of logits ratio (DLR): Croce & Hein 2020, arXiv:2003.01690, equations 6 and 7. B images, K classes.
With fewer than 3 classes (4 when targeted) the ratio has no denominator and the plain margin takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch.nn.functional as F
from torch import Tensor

from vitruvius._errors import UnknownName, suggest

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits (B, K), label (B,), target (B,) → loss (B,)


@dataclass(frozen=True, repr=False)
class Loss:
    """An untargeted loss, known by its name: ce, dlr, margin or kl."""

    known: ClassVar[dict[str, Loss]] = {}

    name: str
    function: Callable[..., Tensor] = field(compare=False)

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """(B, K) logits and (B,) labels to (B,) losses.

        `y` may be soft labels (B, K), of mixup: kl compares with probabilities, for the others the largest counts.
        """
        return self.function(logits, y)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the `text` of a recipe or a command line: `loss=dlr`."""
        if text not in cls.known:
            names = ", ".join(cls.known)
            raise UnknownName(f"no attack loss named {text!r}{suggest(text, cls.known)} Known: {names}.")
        return cls.known[text]  # type: ignore[return-value]

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class TargetedLoss(Loss):
    """A loss that pulls from the label toward a target: dlr or margin."""

    known: ClassVar[dict[str, Loss]] = {}

    def __call__(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        """(B, K) logits, (B,) labels and (B,) targets to (B,) losses."""
        return self.function(logits, y, target)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """−log softmax at the label."""
    return F.cross_entropy(logits, hard_labels(y), reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """Largest other logit minus the label's; positive exactly when the model is wrong."""
    y = hard_labels(y)
    others = logits.scatter(1, y[:, None], -float("inf"))
    return others.amax(1) - at(logits, y)


def logits_ratio(logits: Tensor, y: Tensor) -> Tensor:
    """The margin over the spread between first and third logit, so that scaling the logits changes nothing."""
    if logits.shape[1] < 3:
        return margin(logits, y)
    top = logits.topk(3, dim=1).values
    return margin(logits, y) / (top[:, 0] - top[:, 2] + 1e-12)


def divergence(logits: Tensor, y: Tensor) -> Tensor:
    """KL(y ‖ softmax): `y` holds probabilities (B, K), the inner objective of TRADES."""
    return F.kl_div(logits.log_softmax(1), y, reduction="none").sum(1)


def targeted_margin(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """The target's logit minus the label's."""
    return at(logits, target) - at(logits, y)


def targeted_logits_ratio(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """The targeted margin over the spread between the first and the mean of third and fourth logit."""
    if logits.shape[1] < 4:
        return targeted_margin(logits, y, target)
    top = logits.topk(4, dim=1).values
    return targeted_margin(logits, y, target) / (top[:, 0] - 0.5 * (top[:, 2] + top[:, 3]) + 1e-12)


CE = Loss("ce", cross_entropy)
DLR = Loss("dlr", logits_ratio)
MARGIN = Loss("margin", margin)
KL = Loss("kl", divergence)
TARGETED_DLR = TargetedLoss("dlr", targeted_logits_ratio)
TARGETED_MARGIN = TargetedLoss("margin", targeted_margin)
Loss.known.update({loss.name: loss for loss in (CE, DLR, MARGIN, KL)})
TargetedLoss.known.update({loss.name: loss for loss in (TARGETED_DLR, TARGETED_MARGIN)})


def hard_labels(y: Tensor) -> Tensor:
    """(B,) labels; mixed or smoothed ones (B, K) count as their largest."""
    return y.argmax(1) if y.ndim == 2 else y


def at(logits: Tensor, classes: Tensor) -> Tensor:
    """(B,) logits of one class per image."""
    return logits.gather(1, classes[:, None]).squeeze(1)


def likeliest_classes(logits: Tensor, y: Tensor, count: int) -> Tensor:
    """(B, T) wrong classes by falling logit; T = count, or all K − 1 where there are fewer."""
    wrong = logits.scatter(1, y[:, None], -float("inf"))
    return wrong.argsort(dim=1, descending=True)[:, : min(count, logits.shape[1] - 1)]
