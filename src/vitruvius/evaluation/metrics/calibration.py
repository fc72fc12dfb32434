"""Calibration: does a model that is 80 % sure answer 80 % of such images rightly? Errors over bins of confidence.

ECE and MCE (Naeini et al. 2015; Guo et al. 2017, arXiv:1706.04599), RMS error over bins of equal mass (Hendrycks et al.
2019, arXiv:1812.04606). n images, b bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius._checks import check_columns
from vitruvius._errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Images by confidence; bins without images are left out."""

    low: Tensor  # (b,) confidence at which a bin begins
    high: Tensor  # (b,)
    count: Tensor  # (b,) images
    confidence: Tensor  # (b,) mean
    accuracy: Tensor  # (b,) share of right answers
    total: int  # images that weights refer to

    @property
    def gap(self) -> Tensor:
        """(b,) mean confidence minus accuracy: positive where the model is too sure."""
        return self.confidence - self.accuracy

    @property
    def weight(self) -> Tensor:
        """(b,) share of the images."""
        return self.count / self.total


@dataclass(frozen=True, kw_only=True)
class EqualWidth:
    """Bins of equal width in [0, 1], closed above."""

    number: int = 15

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ConfigError(f"{self.number} bins; expected at least one.")

    def __call__(self, confidence: Tensor, correct: Tensor) -> Bins:
        """Bins of images by `confidence` (n,) in [0, 1]; `correct` (n,) is 1 where the answer was right."""
        confidence, correct = check_columns(confidence=confidence, correct=correct)
        if float(confidence.min()) < 0 or float(confidence.max()) > 1:
            raise DataError(
                f"confidences reach from {confidence.min():g} to {confidence.max():g}; expected shares in [0, 1]."
            )
        edges = torch.linspace(0, 1, self.number + 1, dtype=torch.float64)
        place = torch.bucketize(confidence, edges[1:-1])  # (n,) 0 … number − 1
        count = torch.bincount(place, minlength=self.number).double()
        means = [torch.bincount(place, c, self.number) / count.clamp(min=1) for c in (confidence, correct)]
        full = count > 0
        low, high = edges[:-1][full], edges[1:][full]
        return Bins(
            low=low, high=high, count=count[full], confidence=means[0][full], accuracy=means[1][full], total=len(place)
        )


@dataclass(frozen=True, kw_only=True)
class EqualMass:
    """Adaptive bins: images in order of confidence, `size` in each bin, or as many as make `number` bins.

    With a size, the last bin takes the remainder, as in the released code of the papers.
    """

    size: int | None = None  # images
    number: int | None = None  # bins; 15 where no size is given

    def __post_init__(self) -> None:
        if self.size is not None and self.number is not None:
            raise ConfigError("bins of equal mass have a size or a number, not both.")
        if min(self.size or 1, self.number or 1) < 1:
            raise ConfigError("bins of equal mass have a size or a number of at least one.")

    def __call__(self, confidence: Tensor, correct: Tensor) -> Bins:
        """Bins of images by `confidence` (n,) in [0, 1]; `correct` (n,) is 1 where the answer was right."""
        confidence, correct = check_columns(confidence=confidence, correct=correct)
        order = confidence.argsort(stable=True)
        parts = torch.split(order, self._sizes(len(order)))
        ends = [confidence[part] for part in parts]
        return Bins(
            low=torch.stack([c[0] for c in ends]),
            high=torch.stack([c[-1] for c in ends]),
            count=torch.tensor([float(len(part)) for part in parts], dtype=torch.float64),
            confidence=torch.stack([c.mean() for c in ends]),
            accuracy=torch.stack([correct[part].mean() for part in parts]),
            total=len(order),
        )

    def _sizes(self, n: int) -> list[int]:
        if self.size is not None:
            number = n // self.size
            if not number:
                raise DataError(f"{n} images do not fill one bin of {self.size}; use smaller bins or more images.")
            return [self.size] * (number - 1) + [n - self.size * (number - 1)]
        number = self.number or 15
        if n < number:
            raise DataError(f"{n} images do not fill {number} bins; use fewer bins or more images.")
        return [(place + 1) * n // number - place * n // number for place in range(number)]


def as_released(bins: Bins) -> Bins:
    """Without the last, most confident bin, whose weight is lost: what the released code of the papers sums over."""
    columns = {name: getattr(bins, name)[:-1] for name in ("low", "high", "count", "confidence", "accuracy")}
    return Bins(**columns, total=bins.total)


def rms_error(bins: Bins) -> float:
    """√ Σ weight · gap². `bins` have a weight, a confidence and an accuracy each."""
    return float((bins.weight * bins.gap.square()).sum().sqrt())


def expected_error(bins: Bins) -> float:
    """ECE: Σ weight · |gap|. `bins` have a weight, a confidence and an accuracy each."""
    return float((bins.weight * bins.gap.abs()).sum())


def largest_error(bins: Bins) -> float:
    """MCE: the largest |gap| of the `bins`; 0 without bins."""
    return float(bins.gap.abs().max()) if len(bins.gap) else 0.0


def soft_f1(confidence: Tensor, correct: Tensor) -> float:
    """How well doubt finds the wrong answers: 2 Σ (1 − c)(1 − y) / Σ ((1 − c) + (1 − y)).

    `confidence` c (n,) in [0, 1]; `correct` y (n,), 1 where the answer was right.
    """
    doubt, wrong = (1 - column for column in check_columns(confidence=confidence, correct=correct))
    total = float((doubt + wrong).sum())
    return 2 * float((doubt * wrong).sum()) / total if total else 1.0


def aurra(confidence: Tensor, correct: Tensor) -> float:
    """Area under the curve of accuracy over response rate (Hendrycks et al. 2021, arXiv:1907.07174).

    The mean over k = 1 … n of the accuracy on the k most confident images: a model that may decline to answer on its
    least confident images answers the others.
    """
    confidence, correct = check_columns(confidence=confidence, correct=correct)
    right = correct[confidence.argsort(descending=True, stable=True)].cumsum(0)  # (n,)
    return float((right / torch.arange(1, len(right) + 1, dtype=torch.float64)).mean())
