"""Images for an analysis: from any loader, a given number of them, checked, each with its id, this process's share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from vitruvius._checks import Progress, check_pixels
from vitruvius._errors import DataError
from vitruvius._processes import Process
from vitruvius.attacks import image_ids


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
    if limit == 0:
        return
    left = limit
    source = loader.with_ids() if hasattr(loader, "with_ids") else loader
    for batch in source:
        x, *rest = (batch,) if isinstance(batch, Tensor) else batch
        ids = rest[1] if len(rest) > 1 else image_ids(x)
        keep = len(x) if left is None else min(left, len(x))
        if not keep:
            continue
        x, ids = x[:keep].to(like), ids[:keep].cpu()
        _check_images(x)
        left = None if left is None else left - keep
        yield x, ids
        if left == 0:
            return


def share_of(number: int, process: Process) -> int:
    """This process's part of a number of images that are dealt out like cards."""
    return len(range(process.rank, number, process.world_size))


def _check_images(x: Tensor) -> None:
    if x.dim() != 4:
        raise DataError(f"a batch has shape {tuple(x.shape)}; expected images (B, channels, rows, columns).")
    check_pixels(x)
