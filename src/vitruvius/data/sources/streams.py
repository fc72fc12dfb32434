"""Data that can only be read in order (tfds, webdataset, streamed Hugging Face sets), through timm's readers.

Evaluation reads the whole stream in every process and keeps each image in exactly one; ids are positions in the
stream. Training leaves order and wrap-around to the reader: equal seed and number of workers, equal images.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from vitruvius._checks import as_label
from vitruvius._errors import DataError
from vitruvius._processes import usable_cores
from vitruvius._random import seed_of, seeded
from vitruvius._registry import require
from vitruvius.data._config import DataConfig
from vitruvius.data.base import Size, check_data, check_num_classes, data_source, find_source, to_pixels
from vitruvius.data.loader import BatchWithIds, Loader, Sample, collate, pil_mode
from vitruvius.data.preprocessing import Transform

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A reader of timm: iterates (PIL image, label)."""

    name: str
    reader: Any
    num_classes: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of one process."""

    training: bool
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    epoch: int = 0


def open_stream(config: DataConfig, split: str, size: Size, *, training: bool, seed: int = 0) -> Stream:
    """The stream that a recipe names; for training shuffled by `seed`, as timm's reader does."""
    check_data(config)
    opener: Any = find_source(config.dataset)[0]
    return opener(config, split, size, training=training, seed=seed)


@data_source("tfds", after_slash="<name>", class_map=True, stream=True)
def open_tfds(config: DataConfig, split: str, size: Size, *, training: bool, seed: int) -> Stream:
    """A data set of TensorFlow Datasets, prepared under `root` or downloaded if asked.

    `split` is the data set's, `train[:1000]` too.
    """
    require("tensorflow_datasets", "tfds")
    limit = limit_of(config, training)
    if limit is not None and "[" in split:
        raise DataError(f"{split!r} of {config.dataset} is a part already; name the first {limit} images in it.")
    first = split if limit is None else f"{split}[:{limit}]"
    return _open_reader(config, first, size, training, seed, num_samples=None)


@data_source("wds", after_slash="<name>", root="the folder of the tar files", class_map=True, stream=True)
def open_webdataset(config: DataConfig, split: str, size: Size, *, training: bool, seed: int) -> Stream:
    """Tar files in WebDataset's layout, in the folder or at the URL `root`.

    `split` is a name or a pattern of tar files, as timm's reader takes it.
    """
    require("webdataset", "wds")
    return _open_reader(config, split, size, training, seed, num_samples=limit_of(config, training))


def _open_reader(
    config: DataConfig, split: str, size: Size, training: bool, seed: int, *, num_samples: int | None
) -> Stream:
    from timm.data import create_dataset

    shared = {name: getattr(config, name) for name in ("root", "class_map", "batch_size", "download")}
    own = {"split": split, "is_training": training, "num_samples": num_samples, "seed": seed}
    mode = pil_mode(size[0])
    return make_stream(
        config, split, lambda: create_dataset(config.dataset, input_img_mode=mode, **shared, **own).reader
    )


def make_stream(config: DataConfig, split: str, make: Callable[[], Any]) -> Stream:
    """What `make` makes, a reader of timm's kind, with the number of its classes."""
    try:
        reader = make()
    except (OSError, RuntimeError, ValueError, KeyError, AssertionError) as error:
        place = f" in {config.root}" if config.root else ""
        raise DataError(f"cannot open {config.dataset} ({split}){place}: {error}") from error
    found = len(getattr(reader, "class_to_idx", None) or ()) or None
    classes = check_num_classes(config, config.dataset, found)
    return Stream(name=f"{config.dataset}/{split}", reader=reader, num_classes=classes)


def limit_of(config: DataConfig, training: bool) -> int | None:
    """How many images are asked for at most."""
    return config.train_num_samples if training else config.val_num_samples


class Streamed(IterableDataset[Sample]):
    """Samples of one process, or of one of its workers."""

    def __init__(self, reader: Any, transform: Transform, share: Share) -> None:
        self.reader, self.transform, self.share = reader, transform, share

    def __iter__(self) -> Iterator[Sample]:
        share = self.share
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for position, (image, label) in enumerate(self.reader):
            number = position * step + first
            if share.training:
                number = number * share.world_size + share.rank
            elif number % share.world_size != share.rank:
                continue
            with seeded(seed_of(share.seed, share.epoch, number), restore=worker is None):
                yield Sample(number, as_label(label), self.transform(image))


class StreamLoader(Loader):
    """Batches of a stream; resuming in the middle of an epoch reads the skipped images again."""

    def __init__(
        self, stream: Stream, share: Share, transform: Transform, config: DataConfig, device: torch.device | str
    ) -> None:
        reader = stream.reader
        super().__init__(stream.name, int(reader.num_samples), stream.num_classes, device)
        self.reader, self.share, self.transform, self.config = reader, share, transform, config
        if share.training:
            self.batch_size = config.batch_size
            reader.dist_rank, reader.dist_num_replicas = share.rank, share.world_size
            self.workers = min(config.workers, usable_cores(), getattr(reader, "max_workers", config.workers))
        else:
            self.batch_size = config.eval_batch_size or config.batch_size
            reader.dist_rank, reader.dist_num_replicas = 0, 1
            self.workers = min(config.workers, 1)  # one worker keeps the order
        reader.set_loader_cfg(num_workers=max(1, self.workers))

    def __len__(self) -> int:
        if self.share.training:
            return len(self.reader) // self.batch_size
        return -(-self._mine() // self.batch_size)

    def _mine(self) -> int:
        """Images that this process evaluates."""
        return len(range(self.share.rank, self.num_images, self.share.world_size))

    def every_batch(self) -> Iterator[BatchWithIds]:
        seen = 0
        for batch in itertools.islice(self._loader(), self.start_batch, None):
            seen += len(batch.ids)
            images = to_pixels(batch.images.to(self.device, non_blocking=True))
            yield images, batch.labels.to(self.device), batch.ids
        missing = self._mine() - seen  # readers drop what they cannot decode, which must not go unnoticed
        if self.share.training or self.start_batch > 0 or missing <= 0:
            return
        if self.config.broken == "error":
            raise DataError(f"{self.name} lacks {missing} of its images; skip broken ones with data.broken=skip.")
        logger.warning("%s lacks %d of its images, which could not be read", self.name, missing)

    def _loader(self) -> DataLoader[Any]:
        """New workers for each epoch, so that their seeds are those of the epoch."""
        self.reader.set_epoch(self.epoch)
        self.reader.ds = None  # a reader of this process starts afresh as well
        share = replace(self.share, epoch=self.epoch)
        return DataLoader(
            Streamed(self.reader, self.transform, share),
            batch_size=self.batch_size,
            drop_last=share.training,
            collate_fn=collate,
            num_workers=self.workers,
            pin_memory=self.device.type not in ("cpu", "mps", "meta"),
            generator=torch.Generator().manual_seed(seed_of(share.seed, self.epoch, share.rank)),
        )
