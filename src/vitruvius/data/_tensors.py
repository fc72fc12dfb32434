"""Data in memory: the embedded digits, fake images, and a loader that slices batches where the tensors are.

N images, C channels, H height, W width
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from PIL import Image
from torch import Tensor

from vitruvius._errors import DataError
from vitruvius.data._augment import erase, flip, shift
from vitruvius.data._config import DataConfig
from vitruvius.data._loader import BatchLoader, BatchWithIds
from vitruvius.data._noise import image_keys
from vitruvius.data._order import AnyOrder
from vitruvius.data._preprocessing import Preprocessing, resize_pixels, to_pixels

_VALIDATION_PER_DIGIT = 36
_FAKE_IMAGES = 256


@dataclass(frozen=True, kw_only=True)
class TensorSet:
    """Images and labels in memory."""

    name: str
    images: Tensor  # (N, C, H, W), uint8 or float32 in [0, 1]
    labels: Tensor  # (N,)
    num_classes: int
    pad: int = 0  # pixels of shift that suit the data, if the recipe does not say
    hflip: float = 0.0
    rows: Tensor | None = None  # id → row, -1 where there is none; None: ids are rows
    broken: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels if self.rows is None else self.rows)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """One image as 8-bit PIL, for augmentations that work on those."""
        pixels = to_pixels(self.images[index]).mul(255).round().byte().movedim(0, -1).numpy()
        return Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels), int(self.labels[index])

    def describe(self, index: int) -> str:
        return f"image {index} of {self.name}"


def digits(split: str, train_split: str, val_split: str) -> TensorSet:
    """scikit-learn's 1,797 hand-written digits, 8×8 grey levels 0–16: 1,437 for training, 360 for validation.

    Of each digit the 36 images whose hashed number is smallest are the validation set, for ever.
    """
    if split not in (train_split, val_split):
        raise DataError(f"digits has no split {split!r}; choose {train_split!r} or {val_split!r}.")
    images, labels, validation = _all_digits()
    chosen = validation if split == val_split else ~validation
    return TensorSet(
        name=f"digits/{split}", images=images[chosen], labels=labels[chosen], num_classes=10, pad=1, hflip=0.0
    )


@lru_cache(maxsize=1)
def _all_digits() -> tuple[Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(array) for array in (load_digits().images, load_digits().target))
    rank = image_keys(torch.arange(len(labels)), torch.zeros(len(labels), dtype=torch.int64), seed=0, epoch=0)
    validation = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        members = (labels == digit).nonzero()[:, 0]
        validation[members[rank[members].argsort()[:_VALIDATION_PER_DIGIT]]] = True
    return images[:, None].float() / 16, labels.long(), validation


def fake(config: DataConfig, split: str, pre_size: tuple[int, int, int]) -> TensorSet:
    """Random images of the model's size, for smoke tests; labels count through the classes."""
    training = split == config.train_split
    number = (config.train_num_samples if training else config.val_num_samples) or _FAKE_IMAGES
    classes = config.num_classes or 10
    generator = torch.Generator().manual_seed(0 if training else 1)
    images = torch.randint(0, 256, (number, *pre_size), generator=generator, dtype=torch.uint8)
    return TensorSet(name=f"fake/{split}", images=images, labels=torch.arange(number) % classes, num_classes=classes)


class TensorLoader(BatchLoader):
    """Batches sliced from tensors on the device; no worker processes."""

    def __init__(
        self, data: TensorSet, order: AnyOrder, pre: Preprocessing, config: DataConfig, device: torch.device | str
    ) -> None:
        super().__init__(data.name, len(order.ids), data.num_classes, device)
        self.order, self.pre, self.config = order, pre, config
        self.images = data.images.to(self.device)
        self.labels = data.labels.to(self.device)
        self.rows = data.rows
        self.broken = list(data.broken)
        self.pad = data.pad if config.pad is None else config.pad
        self.hflip = data.hflip if config.hflip is None else config.hflip

    def __len__(self) -> int:
        return len(self.order)

    def with_ids(self) -> Iterator[BatchWithIds]:
        size = self.order.batch_size
        ids, keys = self.order.epoch(self.epoch)
        rows = (ids if self.rows is None else self.rows[ids]).to(self.device)
        keys = keys.to(self.device)
        for start in range(self.start_batch * size, len(ids), size):
            batch = slice(start, start + size)
            yield self._pixels(rows[batch], keys[batch]), self.labels[rows[batch]], ids[batch]

    def _pixels(self, rows: Tensor, keys: Tensor) -> Tensor:
        images = to_pixels(self.images[rows])
        augmented = self.order.shuffle and not self.config.no_aug
        if augmented:
            images = shift(images, keys, pad=self.pad)
            images = flip(images, keys, hflip=self.hflip, vflip=self.config.vflip)
        images = resize_pixels(images, self.pre)
        if augmented:
            c = self.config
            images = erase(images, keys, probability=c.reprob, mode=c.remode, count=c.recount)
        return images.contiguous()
