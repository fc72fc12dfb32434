"""Images for an analysis: from any loader, a given number of them, checked, each with its id, this process's share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from vitruvius._checks import Progress, check_pixels
from vitruvius._dice import image_ids
from vitruvius._errors import DataError
from vitruvius._processes import Process


class Count:
    """Images done so far, passed on to whoever watches."""

    def __init__(self, progress: Progress | None, total: int | None) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def add(self, images: int) -> None:
        self.done += images
        if self.progress is not None:
            self.progress(self.done, self.total)


def batches_of(loader: Iterable[Any], like: torch.device, limit: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """(images, ids) until `limit` images have come; a loader may yield images, (images, labels) or also ids."""
    source = loader
    if hasattr(loader, "with_ids"):
        source = loader.with_ids()
    left = math.inf
    if limit is not None:
        left = limit
    if left == 0:
        return
    for batch in source:
        x, ids = _images_and_ids(batch)
        keep = int(min(left, len(x)))
        if not keep:
            continue
        x = x[:keep].to(like)
        _check_images(x)
        left -= keep
        yield x, ids[:keep].cpu()
        if left == 0:
            return


def _images_and_ids(batch: Any) -> tuple[Tensor, Tensor]:
    """Of a batch that is images, (images, labels) or (images, labels, ids); ids are a hash where there are none."""
    if isinstance(batch, Tensor):
        return batch, image_ids(batch)
    if not isinstance(batch, list | tuple) or not batch or not isinstance(batch[0], Tensor):
        raise DataError(
            f"the loader yields {type(batch).__name__}; expected images, (images, labels), or with ids too."
        )
    x, *rest = batch
    _check_shape(x)
    if len(rest) > 1:
        return x, rest[1]
    return x, image_ids(x)


def share_of(number: int, process: Process) -> int:
    """This process's part of a number of images that are dealt out like cards."""
    return len(range(process.rank, number, process.world_size))


def _check_images(x: Tensor) -> None:
    _check_shape(x)
    check_pixels(x)


def _check_shape(x: Tensor) -> None:
    if x.dim() != 4:
        raise DataError(f"a batch has shape {tuple(x.shape)}; expected images (B, channels, rows, columns).")
