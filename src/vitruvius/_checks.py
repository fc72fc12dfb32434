"""What is checked before any work begins, once for all packages: the model's mode, its pixels, its labels, its logits.

B images, K classes. Each check reads a tensor at most once and raises an error that says what to do.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError, DataError


def device_of(model: object) -> torch.device:
    """Where a model's parameters (or else its buffers) lie; the CPU if it has none."""
    if isinstance(model, nn.Module):
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            return tensor.device
    return torch.device("cpu")


def check_model(model: object) -> None:
    """Refuse what is not a model of PyTorch at all."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{model!r} is not a model; expected a torch.nn.Module, as vitruvius.create_model(…) returns."
        )


def check_head(model: object, name: str = "the model") -> None:
    """Refuse a model without a head: it returns features, and the largest of them is not a class."""
    if getattr(getattr(model, "model", model), "num_classes", None) == 0:
        raise ConfigError(
            f"{name} has no head (num_classes = 0): it returns features, not class scores. Train one first "
            "(model.reset_head and model.freeze); maps and analyses need none."
        )


def check_seed(seed: object, where: str = "seed") -> None:
    """Refuse a seed that is not a whole number; `where` is how the user wrote it."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"{where} = {seed!r}, expected a whole number.")


def check_batch(batch: object) -> None:
    """Refuse what a loader yields unless it is (images, labels), perhaps with ids, as tensors."""
    if isinstance(batch, list | tuple) and len(batch) >= 2 and all(isinstance(part, Tensor) for part in batch[:2]):
        return
    parts = [type(part).__name__ for part in batch] if isinstance(batch, list | tuple) else []
    got = f"({', '.join(parts)})" if parts else type(batch).__name__
    raise DataError(f"the loader yields {got}; expected tensors (images, labels), or with ids too.")


def check_eval_mode(model: object) -> None:
    """Refuse a model any part of which is in train mode: dropout and batch statistics are not what is judged."""
    if not isinstance(model, nn.Module):
        if getattr(model, "training", False):
            raise ConfigError("the model is in train mode; call model.eval() first.")
        return
    for name, module in model.named_modules():
        if module.training:
            part = f"{name!r} of the model" if name else "the model"
            raise ConfigError(f"{part} is in train mode; call model.eval() first.")


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """While open, all of `model` is in eval mode; afterwards each module is in the mode it was in before."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def check_pixels(x: Tensor, low: float = 0.0, high: float = 1.0) -> None:
    """Refuse images that are not finite floating-point pixels in [low, high]."""
    if not x.is_floating_point():
        expected = f"floating-point pixels in [{low:g}, {high:g}]; divide 8-bit images by 255."
        raise DataError(f"images have dtype {x.dtype}; expected {expected}")
    if not x.numel():
        return
    least, most = map(float, x.aminmax())
    if math.isnan(least) or math.isnan(most):
        raise DataError("images hold NaN pixels; look at the loader's transforms.")
    if least < low or most > high:
        advice = "Normalisation belongs inside the model (PixelModel), 8-bit images are divided by 255."
        raise DataError(f"pixels reach from {least:.4g} to {most:.4g}; expected [{low:g}, {high:g}]. {advice}")


def check_labels(y: Tensor, num_classes: int | None = None, *, where: str = "the") -> None:
    """Refuse labels (B,) that are not whole numbers from 0, below `num_classes` where that is known."""
    if y.is_floating_point() or y.dtype == torch.bool:
        raise DataError(f"{where} labels have dtype {y.dtype}; expected whole numbers (int64).")
    if not y.numel():
        return
    least, most = map(int, y.aminmax())
    if least < 0:
        raise DataError(f"{where} labels reach down to {least}; expected 0 or more.")
    if num_classes is not None and most >= num_classes:
        raise DataError(f"{where} labels reach up to {most}, but the model has {num_classes} classes.")


def as_label(label: Any) -> int:
    """One label as a whole number; a fraction is refused, never cut."""
    whole = int(label)
    if whole != label:
        raise DataError(f"the label {label} is not a whole number.")
    return whole


def check_count(count: int, flag: str) -> None:
    """Refuse a number of things that leaves nothing to do; `flag` is how the user wrote it: `--images`."""
    if count < 1:
        raise ConfigError(f"{flag} {count} leaves nothing to do; give 1 or more.")


def check_weight(weight: float | None, where: str) -> None:
    """Refuse a weight of something that is negative, infinite or NaN; `where` is how the user wrote it. None passes."""
    if weight is not None and not (math.isfinite(weight) and weight >= 0):
        raise ConfigError(f"{where} = {weight}, expected a finite number, 0 or more.")


def check_takes(model: nn.Module, size: tuple[int, int, int]) -> None:
    """Refuse a `size` of images, channels, height and width, that a model does not take; tried with one of them."""
    try:
        with in_eval_mode(model), torch.no_grad():
            model(torch.zeros(1, *size, device=device_of(model)))
    except (AssertionError, RuntimeError, ValueError) as error:
        channels, height, width = size
        raise ConfigError(
            f"the model does not take {channels} channel(s) of {height} × {width} pixels ({str(error).rstrip('.')}); "
            "leave out data.image_size and data.in_chans, or say model.kwargs={img_size: …, in_chans: …}."
        ) from error


def check_columns(**columns: Tensor) -> list[Tensor]:
    """Columns (n,) of a metric in float64 on the CPU; refused unless of one length, finite, and something in them."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise DataError(f"columns of a metric have one number per image; got {found}.")
    for name, column in columns.items():
        if not len(column):
            raise DataError(f"{name} is empty: there are no images to measure.")
        if bad := int((~torch.isfinite(column)).sum()):
            raise DataError(f"{name} is not finite for {bad} of {len(column)} images; the model may be damaged.")
    return [column.detach().cpu().double() for column in columns.values()]


def check_logits(logits: Tensor, rows: int) -> None:
    """Refuse what is not one finite row of at least two logits per image."""
    if logits.ndim != 2 or len(logits) != rows:
        raise ConfigError(f"the model returned shape {tuple(logits.shape)}; expected logits ({rows}, classes).")
    if logits.shape[1] < 2:
        raise ConfigError("the model has one output; expected a logit for each class, two for a binary problem.")
    logits = logits.detach()
    if not math.isfinite(logits.sum()) and (bad := int((~logits.isfinite()).any(-1).sum())):
        raise DataError(f"the model returned logits that are not finite for {bad} of {rows} images; check its weights.")
