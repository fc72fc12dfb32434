"""Average attention maps: the mean over images of the weights that every site really gives, streamed in float64.

B batch, H heads, N queries, M keys. Every window of an image counts as one image.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import check_eval_mode, check_model, check_pixels, device_of
from vitruvius._errors import DataError, RunError
from vitruvius._files import exists, load_tensors, save_tensors
from vitruvius._processes import Process
from vitruvius._progress import Progress, no_progress
from vitruvius._secrets import redact
from vitruvius.data.identity import digest_of, identity_of
from vitruvius.evaluation.base import fingerprint, numbered, settings_fingerprint
from vitruvius.heads import Heads
from vitruvius.surgery import record
from vitruvius.surgery.recording import map_of

SAVE_EVERY = 60.0  # seconds between two saved states


@torch.no_grad()
def average_maps(
    model: nn.Module,
    loader: Iterable[Any],
    where: str = "*",
    *,
    process: Process | None = None,
    partial: str | Path | None = None,
    progress: Progress = no_progress,
) -> dict[str, Tensor]:
    """The mean map (H, N, M) of every matching site, each image seen once; memory does not grow with the data.

    What is averaged is `Core.map`; a core without a map is refused by name.

    model: in eval mode.
    loader: batches of images in [0, 1], (images, labels) or with ids too.
    where: a pattern of site names, `blocks.*.attn`; default all sites.
    process: of several processes, this one; each brings its share of the images.
    partial: a file that keeps the sums, so that a loader of `vitruvius.data` goes on where the last call stopped; it
        is removed at the end.
    progress: told after every batch how many images are done, and how many there are.
    """
    check_model(model)
    check_eval_mode(model)
    process = process or Process(device=device_of(model))
    number = getattr(loader, "num_images", None)
    total = None if number is None else process.share_of(number)
    sums = _Sums(partial, process, model, loader)

    def note(name: str, heads: Heads) -> None:
        sums.add(name, map_of(model, name, heads).double())  # (B, H, N, M)

    sums.resume(loader)
    with record(model, where, on_heads=note):
        for x, _, _ in numbered(loader, process):
            check_pixels(x)
            model(x.to(process.device))
            sums.finish_batch(len(x))
            progress(sums.images, total)
    return sums.means()


class _Sums:
    """Sums of maps by site, and how many they are of; saved now and then."""

    def __init__(self, file: str | Path | None, process: Process, model: nn.Module, loader: Any) -> None:
        self.process = process
        self.file = None if file is None else Path(f"{file}.{process.rank}-of-{process.world_size}")
        self.subject: dict[str, str] = {} if file is None else redact(_subject(model, loader))
        self.totals: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.batches = self.images = 0
        self._saved = time.monotonic()

    def add(self, name: str, maps: Tensor) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + maps.sum(0)
        self.counts[name] = self.counts.get(name, 0) + len(maps)

    def finish_batch(self, images: int) -> None:
        self.batches, self.images = self.batches + 1, self.images + images
        if self.file is None or time.monotonic() - self._saved < SAVE_EVERY:
            return
        counts = {f"count:{name}": torch.tensor(count) for name, count in self.counts.items()}
        done = {"batches": str(self.batches), "images": str(self.images)}
        save_tensors(self.file, {**self.totals, **counts}, {**self.subject, **done})
        self._saved = time.monotonic()

    def resume(self, loader: Any) -> None:
        """Take up saved sums, if they are of the same model and images, and send the loader behind them."""
        if self.file is None or not exists(self.file):
            return
        tensors, notes = load_tensors(self.file)
        for key, value in self.subject.items():
            if notes.get(key) != value:
                raise RunError(
                    f"{self.file} holds sums of another {key} ({notes.get(key)}, now {value}). Delete it to start "
                    "again, or choose another --out."
                )
        self.batches, self.images = int(notes["batches"]), int(notes["images"])
        self.totals = {n: t.to(self.process.device) for n, t in tensors.items() if not n.startswith("count:")}
        self.counts = {name: int(tensors[f"count:{name}"]) for name in self.totals}
        loader.set_epoch(0, self.batches)

    def means(self) -> dict[str, Tensor]:
        """Over all processes; every process gets them, and the saved state goes."""
        shares = self.process.gather(self.images)
        if not sum(shares):
            raise DataError("the loader yielded no images; there is nothing to average.")
        if not min(shares):
            raise DataError(f"{shares.count(0)} of {len(shares)} processes got no images; use fewer processes.")
        means = {}
        for name, total in self.totals.items():
            count = self.process.total(torch.tensor(float(self.counts[name]), dtype=torch.float64, device=total.device))
            means[name] = (self.process.total(total) / count).float()
        if self.file is not None:
            self.file.unlink(missing_ok=True)
        return means


def _subject(model: nn.Module, loader: Any) -> dict[str, str]:
    if not hasattr(loader, "set_epoch"):
        raise DataError("maps can only be resumed with a loader of vitruvius.data, which can start at a batch.")
    return {
        "model": fingerprint(model),
        "settings of the model": settings_fingerprint(model),
        "data": str(loader.name),
        "number of images": str(loader.num_images),
        "content of the images": digest_of(identity_of(loader)),
    }
