"""Random images, for smoke tests and for measuring speed without a disk.

Training and validation images differ, and are the same in every run.
"""

from __future__ import annotations

import torch

from vitruvius.data._config import DataConfig
from vitruvius.data.base import Size, TensorSet, data_source

_FAKE_IMAGES = 256  # in a split, unless data.train_num_samples or data.val_num_samples says otherwise


@data_source("fake", root=None)
def fake(config: DataConfig, split: str, size: Size) -> TensorSet:
    """Random images of the model's size, for smoke tests; labels count through the classes.

    `data.num_classes` (default 10) and `data.train_num_samples`, `data.val_num_samples` (default 256) say how many
    there are; `data.root` is not looked at.
    """
    training = split == config.train_split
    number = (config.train_num_samples if training else config.val_num_samples) or _FAKE_IMAGES
    classes = config.num_classes or 10
    generator = torch.Generator().manual_seed(0 if training else 1)
    images = torch.randint(0, 256, (number, *size), generator=generator, dtype=torch.uint8)  # (N, C, H, W)
    labels = torch.arange(number) % classes
    return TensorSet(name=f"fake/{split}", images=images, labels=labels, num_classes=classes)
