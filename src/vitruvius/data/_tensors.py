"""Data in memory, and a loader that slices batches where the tensors are.

N images, C channels, H height, W width
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from PIL import Image
from torch import Tensor

from vitruvius._checks import check_labels
from vitruvius.data._config import DataConfig
from vitruvius.data._loader import BatchLoader, BatchWithIds
from vitruvius.data._order import AnyOrder
from vitruvius.data._preprocessing import Preprocessing, resize_pixels, to_pixels
from vitruvius.data.augmentation._ahead import Ahead, batches_in_chunk
from vitruvius.data.augmentation.colour import grey
from vitruvius.data.augmentation.erasing import erase, flip, shift

Augmentation = Callable[[Tensor, Tensor], Tensor]  # (uint8 images (B, C, H, W), keys (B,) on the CPU) → pixels


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
    decoded: bool = False  # whether these are images of another source, decoded once and otherwise as they are

    def __post_init__(self) -> None:
        check_labels(self.labels, where=f"{self.name}: the")

    def __len__(self) -> int:
        if self.rows is not None:
            return len(self.rows)
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """One image as 8-bit PIL, for augmentations that work on those. `index` counts from 0."""
        pixels = to_pixels(self.images[index]).mul(255).round().byte().movedim(0, -1).numpy()
        if pixels.shape[-1] == 1:
            pixels = pixels.squeeze(-1)
        return Image.fromarray(pixels), int(self.labels[index])

    def describe(self, index: int) -> str:
        """Which image this `index` is, for messages."""
        return f"image {index} of {self.name}"


class TensorLoader(BatchLoader):
    """Batches sliced from tensors on the device; no worker processes."""

    def __init__(
        self,
        data: TensorSet,
        order: AnyOrder,
        pre: Preprocessing,
        config: DataConfig,
        device: torch.device | str,
        augmentation: Augmentation | None = None,
    ) -> None:
        """`augmentation` takes the place of padding, flipping and erasing."""
        super().__init__(data.name, len(order.ids), data.num_classes, device)
        self.order, self.pre, self.config = order, pre, config
        images = data.images
        if augmentation is not None:
            images = to_bytes(images, pre.size[0])
        self.images = images.to(self.device)
        self.labels = data.labels.to(self.device)
        self.rows = data.rows
        self.broken = list(data.broken)
        self.pad = data.pad if config.pad is None else config.pad
        self.hflip = data.hflip if config.hflip is None else config.hflip
        self.augmentation = augmentation
        self.splits = 1
        if augmentation is not None:
            self.splits = max(1, config.aug_splits)
        self.ahead = Ahead(self.device)

    def __len__(self) -> int:
        return len(self.order)

    def with_ids(self) -> Iterator[BatchWithIds]:
        if self.augmentation is not None:
            return self._augmented()
        return self._plain()

    def _plain(self) -> Iterator[BatchWithIds]:
        size = self.order.batch_size
        ids, keys = self.order.epoch(self.epoch)
        rows = self._rows(ids).to(self.device)
        keys = keys.to(self.device)  # once: every copy from the host waits for the device
        for start in range(self.start_batch * size, len(ids), size):
            batch = slice(start, start + size)
            yield self._pixels(rows[batch], keys[batch]), self.labels[rows[batch]], ids[batch]

    def _augmented(self) -> Iterator[BatchWithIds]:
        size = self.order.batch_size
        chunk = size * self._batches_in_chunk()
        ids, keys = self.order.epoch(self.epoch)
        rows = self._rows(ids).to(self.device)
        begin = self.start_batch * size
        names = [(self.epoch, start) for start in range(begin - begin % chunk, len(ids), chunk)]  # also when resumed
        for number, (epoch, first) in enumerate(names):
            pixels = self.ahead.take((epoch, first), partial(self._augment, ids, keys, first, chunk))
            if number + 1 < len(names):
                following = names[number + 1]
                self.ahead.prepare(following, partial(self._augment, ids, keys, following[1], chunk))
            else:
                self.ahead.prepare((epoch + 1, 0), partial(self._begin, epoch + 1, chunk))
            for start in range(max(begin, first), min(first + chunk, len(ids)), size):
                batch = slice(start, min(start + size, len(ids)))
                part = pixels[(start - first) * self.splits : (batch.stop - first) * self.splits]
                yield part, self.labels[rows[batch]].repeat(self.splits), ids[batch].repeat(self.splits)

    def _batches_in_chunk(self) -> int:
        if self.splits > 1:  # a batch's versions stand one below the other
            return 1
        channels, height, width = self.pre.size
        return batches_in_chunk(self.device, 4 * channels * height * width * self.order.batch_size)

    def _begin(self, epoch: int, number: int) -> Tensor:
        """Pixels of the first images of an epoch."""
        return self._augment(*self.order.epoch(epoch), 0, number)

    def _augment(self, ids: Tensor, keys: Tensor, start: int, number: int) -> Tensor:
        """Pixels of `number` images from `start` on, in the order of an epoch."""
        assert self.augmentation is not None
        part = slice(start, start + number)
        images = self.images[self._rows(ids[part]).to(self.device)]
        return self.augmentation(images, keys[part]).contiguous()

    def _rows(self, ids: Tensor) -> Tensor:
        if self.rows is None:
            return ids
        return self.rows[ids]

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


def to_bytes(images: Tensor, channels: int) -> Tensor:
    """uint8 (N, channels, H, W), as Pillow converts them: grey to colour by repeating, colour to grey by weights."""
    if images.dtype != torch.uint8:
        images = images.mul(255).round().byte()
    if images.shape[1] == channels:
        return images
    if channels == 1:
        return grey(images[:, :3].float()).byte()
    return images[:, :1].expand(-1, channels, -1, -1).contiguous()
