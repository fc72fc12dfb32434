"""What every metric asks of its columns: one dimension, the same length, finite, and something in them."""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius._errors import DataError


def checked(**columns: Tensor) -> list[Tensor]:
    """The columns (n,) in float64 on the CPU, or an error that names the bad one."""
    lengths = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(lengths.values())) > 1 or any(len(shape) != 1 for shape in lengths.values()):
        said = ", ".join(f"{name} {shape}" for name, shape in lengths.items())
        raise DataError(f"columns of a metric have one number an image; got {said}.")
    for name, column in columns.items():
        if not len(column):
            raise DataError(f"{name} is empty: there are no images to measure.")
        if column.is_floating_point() and not torch.isfinite(column).all():
            bad = int((~torch.isfinite(column)).sum())
            raise DataError(f"{name} is not finite for {bad} of {len(column)} images; the model may be damaged.")
    return [column.detach().cpu().double() for column in columns.values()]
