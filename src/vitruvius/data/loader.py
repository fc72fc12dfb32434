"""Loaders: batches of pixels in [0, 1] from any batch of any epoch on: from memory, decoded by workers, or mixed.

N images, B batch, S splits, C channels, H height, W width
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitruvius._checks import check_labels
from vitruvius._errors import DataError
from vitruvius._processes import usable_cores
from vitruvius._random import preserve_rng, seed_of, seeded
from vitruvius.data._config import DataConfig
from vitruvius.data.augmentation.erasing import erase, flip, shift
from vitruvius.data.augmentation.operations import grey
from vitruvius.data.base import UNREADABLE, AnySet, ImageSet, TensorSet, to_pixels
from vitruvius.data.order import Order
from vitruvius.data.preprocessing import Preprocessing, Transform, resize_pixels

logger = logging.getLogger(__name__)

MOST_BATCHES = 16  # in a chunk
MEMORY_SHARE = 64  # a chunk of pixels takes at most this fraction of the device's memory

Batch = tuple[Tensor, Tensor]  # images float32 (B, C, H, W) in [0, 1], labels int64 (B,)
BatchWithIds = tuple[Tensor, Tensor, Tensor]  # and ids int64 (B,) on the CPU: positions in the split
Augmentation = Callable[[Tensor, Tensor], Tensor]  # (uint8 images (B, C, H, W), keys (B,) on the CPU) → pixels


class Loader(ABC):
    """Batches of one split, for one process.

    Iterating gives images (B, C, H, W) float32 in [0, 1] and labels (B,). `num_images` are those of the whole split,
    over all processes; `broken` names images that could not be decoded and were skipped, so far.
    """

    def __init__(self, name: str, num_images: int, num_classes: int, device: torch.device | str) -> None:
        self.name, self.num_images, self.num_classes = name, num_images, num_classes
        self.device = torch.device(device)
        self.broken: list[str] = []
        self.epoch = self.start_batch = 0
        self.preprocessing: object = None
        self.sources: tuple[tuple[AnySet, Tensor], ...] = ()  # sets and the ids that are used, for `identity_of`

    def came_from(self, preprocessing: object, *sources: tuple[AnySet, Tensor]) -> Self:
        """Note what the loader was made of: how images are prepared, and the sets with the ids that are used."""
        self.preprocessing, self.sources = preprocessing, sources
        return self

    def __iter__(self) -> Iterator[Batch]:
        for images, labels, _ in self.with_ids():
            yield images, labels

    @abstractmethod
    def __len__(self) -> int:
        """Batches in an epoch."""

    @abstractmethod
    def every_batch(self) -> Iterator[BatchWithIds]:
        """As `with_ids`, but a batch of which nothing could be read is there, and empty: its number counts."""

    def with_ids(self) -> Iterator[BatchWithIds]:
        """Batches together with the ids of their images; one of which nothing could be read is left out."""
        return (batch for batch in self.every_batch() if len(batch[0]))

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Choose the order and the random numbers of an epoch; iteration then begins at `start_batch`."""
        self.epoch, self.start_batch = epoch, start_batch


class TensorLoader(Loader):
    """Batches sliced from tensors on the device; no worker processes.

    `augmentation` of uint8 images takes the place of padding, flipping and erasing.
    """

    def __init__(
        self,
        data: TensorSet,
        order: Order,
        pre: Preprocessing,
        config: DataConfig,
        device: torch.device | str,
        augmentation: Augmentation | None = None,
    ) -> None:
        super().__init__(data.name, len(order.ids), data.num_classes, device)
        self.order, self.pre, self.config, self.augmentation = order, pre, config, augmentation
        images = data.images if augmentation is None else to_bytes(data.images, pre.size[0])
        self.images = images.to(self.device)
        self.labels = data.labels.to(self.device)
        self.rows = torch.arange(len(data)) if data.rows is None else data.rows  # of each id
        self.broken = list(data.broken)
        self.pad = data.pad if config.pad is None else config.pad
        self.hflip = data.hflip if config.hflip is None else config.hflip
        self.splits = 1 if augmentation is None else max(1, config.aug_splits)
        self.ahead = Ahead(self.device)

    def __len__(self) -> int:
        return len(self.order)

    def every_batch(self) -> Iterator[BatchWithIds]:
        return self._plain() if self.augmentation is None else self._augmented()

    def _plain(self) -> Iterator[BatchWithIds]:
        size = self.order.batch_size
        ids, keys = self.order.epoch(self.epoch)
        rows, keys = self.rows[ids].to(self.device), keys.to(self.device)  # once: every copy waits for the device
        for start in range(self.start_batch * size, len(ids), size):
            batch = slice(start, start + size)
            yield self._pixels(rows[batch], keys[batch]), self.labels[rows[batch]], ids[batch]

    def _pixels(self, rows: Tensor, keys: Tensor) -> Tensor:
        c = self.config
        images = to_pixels(self.images[rows])
        augmented = self.order.shuffle and not c.no_aug
        if augmented:
            images = shift(images, keys, pad=self.pad)
            images = flip(images, keys, hflip=self.hflip, vflip=c.vflip)
        images = resize_pixels(images, self.pre)
        if augmented:
            images = erase(images, keys, probability=c.reprob, mode=c.remode, count=c.recount)
        return images.contiguous()

    def _augmented(self) -> Iterator[BatchWithIds]:
        """Chunks of batches are augmented together, where the device allows it while the chunk before is in use."""
        size = self.order.batch_size
        chunk = size * self._batches_in_chunk()
        ids, keys = self.order.epoch(self.epoch)
        rows = self.rows[ids].to(self.device)
        begin = self.start_batch * size
        starts = list(range(begin - begin % chunk, len(ids), chunk))  # also when resumed
        for first, following in itertools.zip_longest(starts, starts[1:]):
            pixels = self.ahead.take((self.epoch, first), partial(self._augment, ids, keys, first, chunk))
            if following is None:
                self.ahead.prepare(
                    (self.epoch + 1, 0), lambda: self._augment(*self.order.epoch(self.epoch + 1), 0, chunk)
                )
            else:
                self.ahead.prepare((self.epoch, following), partial(self._augment, ids, keys, following, chunk))
            for start in range(max(begin, first), min(first + chunk, len(ids)), size):
                batch = slice(start, min(start + size, len(ids)))
                part = pixels[(start - first) * self.splits : (batch.stop - first) * self.splits]
                yield part, self.labels[rows[batch]].repeat(self.splits), ids[batch].repeat(self.splits)

    def _batches_in_chunk(self) -> int:
        if self.splits > 1:  # a batch's versions stand one below the other
            return 1
        channels, height, width = self.pre.size
        return batches_in_chunk(self.device, 4 * channels * height * width * self.order.batch_size)

    def _augment(self, ids: Tensor, keys: Tensor, start: int, number: int) -> Tensor:
        """Pixels of `number` images from `start` on, in the order of an epoch."""
        assert self.augmentation is not None
        part = slice(start, start + number)
        return self.augmentation(self.images[self.rows[ids[part]].to(self.device)], keys[part]).contiguous()


def batches_in_chunk(device: torch.device, batch_bytes: int) -> int:
    """How many batches of float32 pixels are augmented together: one on a CPU, whose caches are small."""
    if not has_streams(device):
        return 1
    memory = torch.get_device_module(device).get_device_properties(device).total_memory
    return max(1, min(MOST_BATCHES, memory // MEMORY_SHARE // max(1, batch_bytes)))


def has_streams(device: torch.device) -> bool:
    """Whether work on the device can go on beside other work there."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "stream")


class Ahead:
    """Makes one chunk before it is asked for, beside the work of the current stream; on a CPU, when it is asked for.

    A policy such as RandAugment is some two thousand small operations for a batch, however many images it holds. Where
    an accelerator computes, the host needs longer to start them than a small model needs to train on the batch. So a
    chunk of batches is augmented in one go, on a stream of its own, while the chunk before it is in use. Numbers are
    drawn by each image's key, so the result does not depend on how batches are grouped.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = has_streams(device)
        self.stream: torch.Stream | None = None
        self.ready: tuple[Hashable, Tensor] | None = None

    def prepare(self, name: Hashable, make: Callable[[], Tensor]) -> None:
        """Begin the chunk `name`, which `make` computes; nothing happens on a CPU, or if it has begun already."""
        if not self.streams or (self.ready is not None and self.ready[0] == name):
            return
        module = torch.get_device_module(self.device)
        if self.stream is None:
            self.stream = module.Stream(self.device)
            self.stream.wait_stream(torch.accelerator.current_stream(self.device))  # the images are there
        with module.stream(self.stream):
            self.ready = name, make()

    def take(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The chunk `name`, prepared or computed now by `make`."""
        if not self.streams:
            return make()
        self.prepare(name, make)
        assert self.ready is not None
        assert self.stream is not None
        (_, pixels), self.ready = self.ready, None
        current = torch.accelerator.current_stream(self.device)
        current.wait_stream(self.stream)
        pixels.record_stream(current)
        return pixels


def to_bytes(images: Tensor, channels: int) -> Tensor:
    """uint8 (N, channels, H, W), as Pillow converts them: grey to colour by repeating, colour to grey by weights."""
    if images.dtype != torch.uint8:
        images = images.mul(255).round().byte()
    if images.shape[1] == channels:
        return images
    if channels == 1:
        return grey(images[:, :3].float()).byte()
    return images[:, :1].expand(-1, channels, -1, -1).contiguous()


class Sample(NamedTuple):
    """One image, or the reason why there is none."""

    id: int
    label: int
    image: Tensor | None
    reason: str = ""


class Collated(NamedTuple):
    """The readable images of a batch, and (index, reason) of the others."""

    images: Tensor  # uint8 (B, C, H, W), or (S·B, C, H, W); empty where none could be read
    labels: Tensor
    ids: Tensor
    broken: list[tuple[int, str]]


class Samples(Dataset[Sample]):
    """(index, key) → Sample: decoded and transformed to uint8, with random numbers of the image's own key."""

    def __init__(self, images: ImageSet, transform: Transform, mode: str) -> None:
        self.images, self.transform, self.mode = images, transform, mode

    def __getitem__(self, item: tuple[int, int]) -> Sample:
        index, key = item
        try:
            image, label = self.images.read(index)
            if image.mode != self.mode:  # a copy costs time
                image = image.convert(self.mode)
        except UNREADABLE as error:
            return Sample(index, -1, None, f"{type(error).__name__}: {error}")
        with seeded(key, restore=False):
            return Sample(index, label, self.transform(image))

    def __getitems__(self, items: list[tuple[int, int]]) -> list[Sample]:
        """A batch; the random numbers of others go on as if nothing had been drawn."""
        with preserve_rng():
            return [self[item] for item in items]


def collate(samples: list[Sample]) -> Collated:
    """Stack what could be read; keep ids and labels with their images.

    Views (S, C, H, W) of B images become (S·B, C, H, W) split by split: all clean images first, labels repeated.
    """
    readable = [sample for sample in samples if sample.image is not None]
    broken = [(sample.id, sample.reason) for sample in samples if sample.image is None]
    labels = torch.tensor([sample.label for sample in readable], dtype=torch.int64)
    ids = torch.tensor([sample.id for sample in readable], dtype=torch.int64)
    images = [sample.image for sample in readable if sample.image is not None]
    if not images:
        return Collated(torch.empty(0), labels, ids, broken)
    if images[0].dim() == 3:
        return Collated(torch.stack(images), labels, ids, broken)
    splits = len(images[0])
    return Collated(torch.stack(images, dim=1).flatten(0, 1), labels.repeat(splits), ids.repeat(splits), broken)


def pil_mode(channels: int) -> str:
    """PIL's name for images with this many channels."""
    modes = {1: "L", 3: "RGB", 4: "RGBA"}
    if channels not in modes:
        raise DataError(f"images have 1, 3 or 4 channels, the model asks for {channels}.")
    return modes[channels]


class ImageLoader(Loader):
    """Batches decoded by worker processes, which hand over uint8; broken images are skipped with a list, or an error.

    `raw` gives out those uint8 images.
    """

    def __init__(
        self,
        images: ImageSet,
        order: Order,
        transform: Transform,
        config: DataConfig,
        *,
        channels: int,
        device: torch.device | str,
        raw: bool = False,
    ) -> None:
        super().__init__(images.name, len(order.ids), images.num_classes, device)
        self.images, self.order, self.config, self.raw = images, order, config, raw
        self._batches: list[list[tuple[int, int]]] = []  # of (index, key): what is left of this epoch
        # one batch would be waited for all the same
        workers = min(config.workers, usable_cores(), len(order)) if len(order) > 1 else 0
        self._loader = DataLoader(
            Samples(images, transform, pil_mode(channels)),
            batch_sampler=self._batches,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.device.type not in ("cpu", "mps", "meta"),
            generator=torch.Generator(),  # so that starting workers draws nothing from the global one
        )

    def __len__(self) -> int:
        return len(self.order)

    def every_batch(self) -> Iterator[BatchWithIds]:
        ids, keys = self.order.epoch(self.epoch)
        items, size = list(zip(ids.tolist(), keys.tolist(), strict=True)), self.order.batch_size
        self._batches[:] = [items[start : start + size] for start in range(self.start_batch * size, len(items), size)]
        already = len(self.broken)
        for batch in self._loader:
            for index, reason in batch.broken:
                image = self.images.describe(index)
                if self.config.broken == "error":
                    advice = "Repair or remove it, or skip such images with data.broken=skip."
                    raise DataError(f"{image} cannot be decoded ({reason}). {advice}")
                if image not in self.broken:
                    self.broken.append(image)
            check_labels(batch.labels, where=f"{self.name}: the")
            images = batch.images.to(self.device, non_blocking=True)
            yield images if self.raw else to_pixels(images), batch.labels.to(self.device), batch.ids
        if new := self.broken[already:]:
            logger.warning("skipped %d broken image(s) of %s: %s", len(new), self.name, ", ".join(new))


class MixedLoader(Loader):
    """Batches of two loaders put together and shuffled; ids of the second set begin where those of the first end."""

    def __init__(self, first: Loader, second: Loader, *, offset: int, seed: int, splits: int = 1) -> None:
        images = first.num_images + second.num_images
        super().__init__(f"{first.name} + {second.name}", images, first.num_classes, first.device)
        self.parts, self.offset, self.seed, self.splits = (first, second), offset, seed, splits

    def __len__(self) -> int:
        return len(self.parts[0])

    def every_batch(self) -> Iterator[BatchWithIds]:
        first, second = self.parts
        for part in self.parts:
            part.set_epoch(self.epoch, self.start_batch)
        pairs = zip(first.every_batch(), second.every_batch(), strict=True)
        for number, (batch, (images, labels, ids)) in enumerate(pairs, self.start_batch):
            self.broken = [*first.broken, *second.broken]
            present = [one for one in (batch, (images, labels, ids + self.offset)) if len(one[0])]
            yield self._joined(present, number) if present else batch

    def _joined(self, batches: list[BatchWithIds], number: int) -> BatchWithIds:
        """All splits (S, B) are shuffled alike, so that an image keeps its place in each of them."""
        count = sum(len(ids) for _, _, ids in batches) // self.splits
        generator = torch.Generator().manual_seed(seed_of(self.seed, self.epoch, number))
        place = torch.randperm(count, generator=generator)

        def shuffled(tensors: list[Tensor]) -> Tensor:
            together = torch.cat([t.unflatten(0, (self.splits, -1)) for t in tensors], dim=1)
            return together[:, place.to(together.device)].flatten(0, 1)

        images, labels, ids = (shuffled([batch[i] for batch in batches]) for i in range(3))
        return images, labels, ids
