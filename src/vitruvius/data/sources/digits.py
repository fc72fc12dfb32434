"""The embedded digits: scikit-learn's hand-written ones, so that everything can be tried without a download.

UCI optical recognition of hand-written digits (Alpaydin & Kaynak 1998), the test part that scikit-learn ships.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitruvius._errors import DataError
from vitruvius.data._config import DataConfig
from vitruvius.data.base import Size, TensorSet, check_num_classes, data_source, smallest_of_each_class

_VALIDATION_PER_DIGIT = 36


@data_source("digits", root=None)
def digits(config: DataConfig, split: str, size: Size) -> TensorSet:
    """scikit-learn's 1,797 hand-written digits, 8×8 grey levels 0–16: 1,437 for training, 360 for validation.

    Of each digit the 36 images whose hashed number is smallest are the validation set, for ever.
    """
    if split not in (config.train_split, config.val_split):
        raise DataError(f"digits has no split {split!r}; choose {config.train_split!r} or {config.val_split!r}.")
    images, labels, validation = _all_digits()
    chosen = ~validation if split == config.train_split else validation
    return TensorSet(
        name=f"digits/{split}",
        images=images[chosen],
        labels=labels[chosen],
        num_classes=check_num_classes(config, f"digits/{split}", 10),
        pad=1,
    )


@lru_cache(maxsize=1)
def _all_digits() -> tuple[Tensor, Tensor, Tensor]:
    library = importlib.util.find_spec("sklearn")
    assert library is not None
    assert library.origin is not None
    file = Path(library.origin).parent / "datasets" / "data" / "digits.csv.gz"  # to import load_digits takes a second
    table = torch.from_numpy(np.loadtxt(file, delimiter=","))
    images, labels = table[:, :-1].view(-1, 8, 8), table[:, -1]
    return images[:, None].float() / 16, labels.long(), smallest_of_each_class(labels, _VALIDATION_PER_DIGIT)
