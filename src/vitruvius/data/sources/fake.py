"""Random images, for smoke tests and for measuring speed without a disk."""

from __future__ import annotations

import torch

from vitruvius.data._config import DataConfig
from vitruvius.data._tensors import TensorSet
from vitruvius.data.sources._base import Size, data_source

_FAKE_IMAGES = 256  # in a split, unless data.train_num_samples or data.val_num_samples says otherwise


@data_source("fake")
def fake(config: DataConfig, split: str, size: Size) -> TensorSet:
    """Random images of the model's size, for smoke tests; labels count through the classes."""
    training = split == config.train_split
    number = (config.train_num_samples if training else config.val_num_samples) or _FAKE_IMAGES
    classes = config.num_classes or 10
    generator = torch.Generator().manual_seed(0 if training else 1)
    images = torch.randint(0, 256, (number, *size), generator=generator, dtype=torch.uint8)
    return TensorSet(name=f"fake/{split}", images=images, labels=torch.arange(number) % classes, num_classes=classes)
