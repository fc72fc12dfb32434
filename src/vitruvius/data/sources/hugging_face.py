"""Hugging Face data sets: with random access, through timm's reader, or streamed.

timm's own reader of streams gives `datasets` an argument that newer versions refuse, does not know the classes, and
never ends in a worker that gets no file of the set. `HubStream` has what timm's readers of streams have in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import get_worker_info

from vitruvius._errors import DataError
from vitruvius._registry import require
from vitruvius.data._config import DataConfig
from vitruvius.data.base import Size, check_num_classes, data_source
from vitruvius.data.loader import pil_mode
from vitruvius.data.sources.folder import FileImages
from vitruvius.data.sources.streams import Stream, limit_of, make_stream

BUFFER = 1000  # images among which training chooses the next one
IMAGE, LABEL = "image", "label"


@data_source("hfds", after_slash="<owner>/<name>", class_map=True, files=True)
def open_hugging_face(config: DataConfig, split: str, size: Size) -> FileImages:
    """A Hugging Face data set with random access, cached under `root`."""
    require("datasets", "hf")
    from timm.data import create_dataset

    try:
        dataset = create_dataset(config.dataset, root=config.root, split=split, class_map=config.class_map)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise DataError(f"cannot open {config.dataset} ({split}): {error}") from error
    classes = check_num_classes(config, config.dataset, len(dataset.reader.class_to_idx) or None)
    return FileImages(dataset, f"{config.dataset}/{split}", classes)


@data_source("hfids", after_slash="<owner>/<name>", stream=True)
def open_streamed_hugging_face(config: DataConfig, split: str, size: Size, *, training: bool, seed: int) -> Stream:
    """A Hugging Face data set that is streamed and never stored."""
    mode = pil_mode(size[0])
    return make_stream(config, split, lambda: HubStream(config, split, mode, training=training, seed=seed))


class HubStream:
    """(PIL image, label) of one split, in the order of its files; for training shuffled, and as often as needed.

    config: its `root` is where `datasets` keeps its cache.
    mode: PIL's mode of the images, RGB or L.
    training: shuffle, and give every worker the same number of images, a multiple of the batch size.
    """

    def __init__(self, config: DataConfig, split: str, mode: str, *, training: bool, seed: int) -> None:
        datasets: Any = require("datasets", "hf")
        builder = datasets.load_dataset_builder(config.dataset.removeprefix("hfids/"), cache_dir=config.root)
        self.split, self.mode, self.training, self.seed = split, mode, training, seed
        self.batch_size = config.batch_size
        self.stream = builder.as_streaming_dataset(split=split)
        known = (builder.info.splits or {}).get(split)
        self.num_samples = int(limit_of(config, training) or (known and known.num_examples) or 0)
        if not self.num_samples:
            key = "train_num_samples" if training else "val_num_samples"
            raise ValueError(f"it does not say how many images {split} holds; say data.{key}.")
        features = self.stream.features or builder.info.features or {}
        names = getattr(features.get(LABEL), "names", None) or []
        self.class_to_idx = {name: number for number, name in enumerate(names)}
        self.epoch = self.dist_rank = 0
        self.dist_num_replicas = self.num_workers = 1
        self.ds: object = None  # timm's readers keep their iterator here; this one begins again every time

    @property
    def max_workers(self) -> int:
        """Workers that can read at the same time: each needs a file of its own."""
        shards = int(self.stream.num_shards)
        return shards // self.dist_num_replicas if shards % self.dist_num_replicas == 0 else shards

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as for this epoch."""
        self.epoch = epoch

    def set_loader_cfg(self, num_workers: int) -> None:
        """Be read by `num_workers` at the same time."""
        self.num_workers = num_workers

    def __len__(self) -> int:
        """Images that one process will see."""
        return self._per_worker() * self.num_workers

    def _per_worker(self) -> int:
        share = math.ceil(self.num_samples / (self.num_workers * self.dist_num_replicas))
        return math.ceil(share / self.batch_size) * self.batch_size if self.training else share

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        distributed: Any = require("datasets.distributed", "hf")
        stream = self.stream
        if self.training:
            stream = stream.shuffle(seed=self.seed, buffer_size=BUFFER)
        stream = distributed.split_dataset_by_node(stream, rank=self.dist_rank, world_size=self.dist_num_replicas)
        stream.set_epoch(self.epoch)
        left = self._per_worker()
        while left > 0:
            before = left
            for sample in stream:
                yield self._pair(sample)
                left -= 1
                if left == 0:
                    return
            if not self.training:
                return
            if left == before:
                worker = get_worker_info()
                number = 0 if worker is None else worker.id
                raise DataError(f"{self.split} of this set holds no images for worker {number}; use fewer workers.")

    def _pair(self, sample: dict[str, Any]) -> tuple[Any, Any]:
        for column in (IMAGE, LABEL):
            if column not in sample:
                raise DataError(f"{self.split} has the columns {', '.join(sample)}; expected {IMAGE} and {LABEL}.")
        image = sample[IMAGE]
        return image if image.mode == self.mode else image.convert(self.mode), sample[LABEL]
