"""A corrupted copy of small images in memory, in CIFAR-10-C's layout: `corruption.npy` and `labels.npy`.

N images: each file holds (5 N, height, width, channels) uint8, severity after severity. A severity is written whole or
not at all, and one that is there is not made again: a copy that was interrupted goes on.
"""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitruvius._checks import Progress
from vitruvius._errors import ConfigError, DataError
from vitruvius._files import Lock, MadeFolder, atomic_write_bytes
from vitruvius.corrupted_copies._work import RECORD, WORKSHOP, claim, settings_of, share
from vitruvius.corruptions.base import SEVERITIES, Corruption

BATCH = 256  # images at a time
Array = np.ndarray[Any, Any]


def copy_arrays(
    images: Array,
    labels: Array,
    out: str | Path,
    corruptions: Sequence[Corruption],
    *,
    ids: Array | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> int:
    """Write images under corruptions, each at all 5 severities; returns how many files the copy has.

    images: (N, H, W, C) uint8, C 1 or 3.
    labels: (N,) whole numbers from 0.
    out: the folder to write; one that was begun with the same images and settings is finished.
    corruptions: each at its five severities; they share all other settings.
    ids: (N,) places in a larger set that these images were chosen from; default 0, 1, …. So the copy equals what the
        same corruptions do on the fly.
    workers: processes; default 1.
    progress: called with (severities done, severities in all).
    """
    check_arrays(images, labels)
    if ids is None:
        ids = np.arange(len(images))
    out = Path(out).expanduser()
    grid = by_name(corruptions)
    digest = hashlib.sha256(np.ascontiguousarray(images).data).hexdigest()
    settings = {"layout": "arrays", "images": list(images.shape), "sha256": digest, "labels": _digest(labels)}
    settings |= {"ids": _digest(ids)} | settings_of(corruptions)
    with Lock(out):
        made = MadeFolder(out)
        try:
            claim(out, settings)
            _copy(images, labels, ids, out, corruptions, workers=workers, progress=progress)
        except BaseException:
            made.take_back(RECORD)
            raise
        for name, parts in grid.items():
            _join(out, name, parts)
        _clear(out / WORKSHOP)
    return len(grid)


def _digest(numbers: Array) -> str:
    """A hash of labels or ids, whatever whole numbers they are kept in."""
    return hashlib.sha256(np.ascontiguousarray(numbers, dtype=np.int64).data).hexdigest()


def _copy(
    images: Array,
    labels: Array,
    ids: Array,
    out: Path,
    corruptions: Sequence[Corruption],
    *,
    workers: int,
    progress: Progress | None,
) -> None:
    """Write the labels, and every severity that is not there yet."""
    small = np.min_scalar_type(int(labels.max()))
    _save(out / "labels.npy", np.tile(labels.astype(small), len(SEVERITIES)))
    missing = [
        one for one in corruptions if not _whole(out / f"{one.name}.npy", images) and not _part(out, one).exists()
    ]
    if missing:
        _save(out / WORKSHOP / "clean.npy", images)
        share(functools.partial(copy_severity, out, ids), missing, workers=workers, progress=progress)


def by_name(corruptions: Sequence[Corruption]) -> dict[str, list[Corruption]]:
    """The five severities of each corruption, in order; CIFAR-10-C's files hold all five and say nowhere which.

    `corruptions` come in any order, each at all five severities.
    """
    grid: dict[str, list[Corruption]] = {}
    for one in sorted(corruptions, key=lambda one: one.severity):
        grid.setdefault(one.name, []).append(one)
    for name, parts in grid.items():
        if [one.severity for one in parts] != list(SEVERITIES):
            asked = ", ".join(str(one.severity) for one in parts)
            raise ConfigError(
                f"{name} at severities {asked}: a file in CIFAR-10-C's layout holds 1, 2, 3, 4, 5, each once. "
                "Omit --severities."
            )
    return grid


def copy_severity(out: Path, ids: Array, corruption: Corruption) -> None:
    """All images under one corruption at one severity.

    `out` is the folder of the copy; `ids` (N,) name the images for the dice; `corruption` says which one, at which
    severity.
    """
    clean = np.load(out / WORKSHOP / "clean.npy", mmap_mode="r")
    result = np.empty_like(clean)
    for start in range(0, len(clean), BATCH):
        batch = torch.from_numpy(np.array(clean[start : start + BATCH])).movedim(-1, 1).float() / 255
        moved = corruption.apply(batch, ids=torch.from_numpy(ids[start : start + len(batch)]))
        result[start : start + BATCH] = (moved * 255).round().byte().movedim(1, -1).numpy()
    _save(_part(out, corruption), result)


def check_arrays(images: Array, labels: Array) -> None:
    """Refuse what no copy can be made of.

    `images` must be (N, H, W, 1 or 3) uint8, `labels` (N,) whole numbers from 0.
    """
    _check_image_array(images)
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise DataError(f"labels are {labels.dtype} {labels.shape}; expected a class for each of {len(images)} images.")


def _check_image_array(images: Array) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3) or not len(images):
        raise DataError(f"images are {images.dtype} {images.shape}; expected uint8 (N, height, width, 1 or 3).")


def _whole(file: Path, images: Array) -> bool:
    """Whether a finished file is there; one of another size is an error."""
    if not file.exists():
        return False
    try:
        shape = np.load(file, mmap_mode="r").shape
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{file} cannot be read ({error}). Delete it; the same command makes it again.") from error
    if shape != (len(SEVERITIES) * len(images), *images.shape[1:]):
        raise DataError(
            f"{file} holds {shape}, not five times {images.shape}. Delete it; the same command makes it again."
        )
    return True


def _join(out: Path, name: str, parts: Sequence[Corruption]) -> None:
    if not (out / f"{name}.npy").exists():
        _save(out / f"{name}.npy", np.concatenate([np.load(_part(out, one), mmap_mode="r") for one in parts]))


def _part(out: Path, one: Corruption) -> Path:
    return out / WORKSHOP / f"{one.name}-{one.severity}.npy"


def _save(path: Path, array: Array) -> None:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    atomic_write_bytes(path, file.getvalue())


def _clear(folder: Path) -> None:
    if folder.is_dir():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
