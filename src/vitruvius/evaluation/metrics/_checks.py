"""What every metric asks of its columns: one dimension, the same length, finite, and something in them."""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius._errors import DataError


def checked(**columns: Tensor) -> list[Tensor]:
    """The columns (n,) in float64 on the CPU, or an error that names the bad one."""
    _check_shapes({name: tuple(column.shape) for name, column in columns.items()})
    for name, column in columns.items():
        _check_numbers(name, column)
    return [column.detach().cpu().double() for column in columns.values()]


def _check_shapes(shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse columns that are not (n,), all with the same n."""
    first = next(iter(shapes.values()))
    if len(first) != 1 or any(shape != first for shape in shapes.values()):
        said = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise DataError(f"columns of a metric have one number per image; got {said}.")


def _check_numbers(name: str, column: Tensor) -> None:
    """Refuse a column that is empty or not finite."""
    if not len(column):
        raise DataError(f"{name} is empty: there are no images to measure.")
    if not column.is_floating_point():
        return
    bad = int((~torch.isfinite(column)).sum())
    if bad:
        raise DataError(f"{name} is not finite for {bad} of {len(column)} images; the model may be damaged.")
