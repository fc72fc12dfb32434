"""What is refused before an attack: images that are no pixels, labels that are no classes, models that say NaN."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError, DataError
from vitruvius.attacks._models import Around
from vitruvius.attacks._norms import LINF, Norm


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


def check_logits(logits: Tensor, y: Tensor, rows: int) -> None:
    """Refuse logits that are not (rows, K) numbers with a class for each label. Reads the tensors once."""
    if logits.ndim != 2 or len(logits) != rows:
        raise ConfigError(f"the model returned shape {tuple(logits.shape)}; expected logits ({rows}, classes).")
    if logits.shape[1] < 2:
        raise ConfigError("the model has one output; attacks need a logit for each class, two for a binary problem.")
    if not len(y):
        return
    broken, label = torch.stack([logits.detach().isnan().sum().double(), y.amax().double()]).tolist()
    if broken:
        raise DataError(f"the model returned {broken:.0f} NaN logits for {rows} images; check its weights.")
    if y.ndim == 1 and label >= logits.shape[1]:
        raise DataError(f"labels reach up to {label:.0f}, but the model has {logits.shape[1]} classes.")


def check_mode(model: nn.Module) -> None:
    """Refuse a model in train mode: its dropout and batch statistics are not what is being judged."""
    if model.training:
        raise ConfigError("the model is in train mode; call model.eval() first.")


class Watched(Around):
    """A model whose first answer is checked, so that no extra pass is spent on it."""

    def __init__(self, model: Callable[[Tensor], Tensor], y: Tensor) -> None:
        self.inner, self.y = model, y
        self.seen = False

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.inner(x)
        if not self.seen:
            check_logits(logits, self.y, len(x))
            self.seen = True
        return logits
