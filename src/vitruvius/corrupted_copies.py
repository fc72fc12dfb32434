"""Corrupted copies of data, written once: a folder in ImageNet-C's layout, a data set by name in CIFAR-10-C's.

`corruption/severity/class/file`, or `corruption.npy` (5 N, height, width, channels) and `labels.npy`. Every file is
written whole or not at all, and one that is there is not made again: a copy that was interrupted is continued. On the
fly, `vitruvius evaluate --threat fog:severity=3` needs none of this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitruvius._checks import check_count
from vitruvius._config import build, override
from vitruvius._errors import ConfigError, DataError, RunError
from vitruvius._files import Lock, atomic_write_bytes, claim_folder, discard, save_array, sweep
from vitruvius._processes import usable_cores
from vitruvius._progress import Progress, no_progress
from vitruvius._random import id_of
from vitruvius.corruptions.base import GROUPS, SEVERITIES, Corruption, Scale, corruption_names, corruptions
from vitruvius.data import DataConfig
from vitruvius.data.base import chosen_ids, open_data
from vitruvius.data.identity import digest_of, identify

RECORD = "corrupt.json"  # the settings of a copy and a hash of its images
USUAL_SUFFIXES = {"jpeg": (".jpg", ".jpeg"), "png": (".png",)}
OPTIONS: dict[str, dict[str, Any]] = {"jpeg": {"quality": 85, "optimize": True}, "png": {}}  # as ImageNet-C's
CHUNK = 16  # files that a worker takes at a time
BATCH = 256  # images of an array at a time

Format = Literal["jpeg", "png"]
Array = np.ndarray[Any, Any]
T = TypeVar("T")
Run = Callable[[Callable[[Any], object], Sequence[Any]], None]  # `share` among some workers


def write_corrupted(
    data: str,
    overrides: Sequence[str] = (),
    *,
    out: str | Path,
    names: Sequence[str] = ("benchmark",),
    severities: Sequence[int] = SEVERITIES,
    size: int | None = 224,
    format: Format = "jpeg",
    seed: int = 0,
    scale: Scale = "auto",
    textures: str | None = None,
    images: int | None = None,
    workers: int | None = None,
    progress: Progress = no_progress,
) -> int:
    """Write a corrupted copy of a folder or of a data set by name; returns how many files it has.

    A folder is copied as ImageNet-C was published: the middle 224 × 224 pixels after the shorter side was made 256,
    then the corruption, then JPEG of quality 85; `format="png"` leaves out that last loss.

    data: a folder with one folder per class, or the name of a data set (`digits`), whose settings are `overrides`.
    out: the folder to write; one that was begun with the same settings is finished.
    names: corruptions, or groups of them: benchmark, extra, all.
    size: of a folder: pixels of the middle square that is kept; None keeps images as they are.
    textures: a folder with photographs of frost, instead of drawn frost.
    images: how many, the fixed random choice of `data.val_num_samples`; default all.
    workers: processes; default one per core.
    """
    for count, flag in ((images, "--images"), (workers, "--workers")):
        if count is not None:
            check_count(count, flag)
    wanted = [name for group in names for name in (corruption_names(group) if group in GROUPS else [group])]
    every = corruption_names("all")  # ImageNet-C's order; a name that is not among them is refused below
    settings: dict[str, Any] = {"seed": seed, "scale": scale}
    photographs = {"frost": {"textures": textures}} if textures else {}
    grid: list[Corruption] = [
        corruptions.make({"use": name, "severity": severity, **settings, **photographs.get(name, {})})
        for name in [*(name for name in every if name in wanted), *(name for name in wanted if name not in every)]
        for severity in severities
    ]
    run = functools.partial(share, workers=workers or usable_cores(), progress=progress)
    out, source = Path(out).expanduser(), Path(data).expanduser()
    if not source.is_dir():
        return _copy_arrays(*_read_data(data, overrides, images), out, grid, run)
    if overrides:
        raise ConfigError(f"{overrides[0]!r} is for data sets by name; {data} is a folder.")
    return _copy_folder(source, out, grid, size, format, images, run)


def _copy_folder(
    source: Path, out: Path, grid: list[Corruption], size: int | None, format: Format, limit: int | None, run: Run
) -> int:
    data = open_data(DataConfig(dataset="folder", root=str(source), train_split=".", val_split="."), ".", (3, 1, 1))
    ids = chosen_ids(data, limit)
    files = [Path(data.describe(index)) for index in ids.tolist()]
    if out.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{out} lies inside {source}, whose folders are the classes. Choose a folder elsewhere.")
    targets: dict[Path, Path] = {}
    for file in files:
        other = targets.setdefault(_target(out, grid[0], file, format), file)
        if other != file:
            raise DataError(f"{other} and {file} would both become one file; rename one of them.")
    settings = {
        "layout": "folders",
        "source": str(source.resolve()),
        "size": size,
        "format": format,
        "limit": len(ids) if len(ids) < len(data) else None,
        "images": digest_of(identify(data, ids)),
    }
    chunks = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]
    with _claimed(out, settings, grid):
        run(functools.partial(_copy_files, out, grid, size, format), chunks)
    return len(files) * len(grid)


def _copy_files(out: Path, grid: Sequence[Corruption], size: int | None, format: Format, files: Sequence[Path]) -> None:
    """The copies of some files that are not there yet; each image is read once."""
    for file in files:
        missing = [one for one in grid if not _target(out, one, file, format).exists()]
        if missing:
            x, ids = read_image(file, size), torch.tensor([file_id(file)])
        for one in missing:
            image, encoded = Image.fromarray(_to_bytes(one.apply(x, ids=ids))[0]), io.BytesIO()
            image.save(encoded, format, **OPTIONS[format])
            atomic_write_bytes(_target(out, one, file, format), encoded.getvalue())


def _target(out: Path, corruption: Corruption, file: Path, format: Format) -> Path:
    name = file.name if file.suffix.lower() in USUAL_SUFFIXES[format] else f"{file.stem}.{format}"
    return out / corruption.name / str(corruption.severity) / file.parent.name / name


def file_id(file: Path) -> int:
    """A number for the dice that belongs to `class/file`, whatever else is in the folder."""
    return id_of(f"{file.parent.name}/{file.name}")


def read_image(file: Path, size: int | None) -> Tensor:
    """(1, 3, H, W) pixels; of a `size` the middle square, after the shorter side was made 256/224 of it."""
    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be read as an image: {error}. Repair it or take it away.") from error
    if size is not None:
        factor = round(size * 256 / 224) / min(image.size)
        width, height = (max(round(side * factor), size) for side in image.size)
        left, top = round((width - size) / 2), round((height - size) / 2)
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        image = resized.crop((left, top, left + size, top + size))
    return _to_pixels(torch.from_numpy(np.array(image))[None])


def _read_data(name: str, overrides: Sequence[str], images: int | None) -> tuple[Array, Array, Array]:
    """Images (N, H, W, C) uint8, labels (N,) and ids (N,) of the validation images of a data set."""
    if Path(name).suffix or name.startswith((".", "/", "~")):
        raise DataError(f"no folder {name}; expected one that holds a folder of images for every class.")
    settings = [setting.removeprefix("data.") for setting in overrides]
    config = build(DataConfig, override({"dataset": name}, settings), source=name)
    side = config.image_size or 32
    data = open_data(config, config.val_split, (config.in_chans or 3, side, side))
    ids = chosen_ids(data, images or config.val_num_samples)
    pictures, labels = zip(*(data.read(index) for index in ids.tolist()), strict=True)
    if len({picture.size for picture in pictures}) != 1:
        raise DataError(f"{name} has images of several sizes; a copy in one file needs one. Corrupt it on the fly.")
    pixels = np.stack([np.atleast_3d(np.asarray(picture)) for picture in pictures])
    return pixels, np.array(labels), ids.numpy()


def _copy_arrays(images: Array, labels: Array, ids: Array, out: Path, grid: list[Corruption], run: Run) -> int:
    by_name: dict[str, list[Corruption]] = {}
    for one in sorted(grid, key=lambda one: one.severity):
        by_name.setdefault(one.name, []).append(one)
    if any(tuple(one.severity for one in five) != SEVERITIES for five in by_name.values()):
        raise ConfigError("a file in CIFAR-10-C's layout holds severities 1, 2, 3, 4, 5, each once. Omit --severities.")
    digest = hashlib.sha256(images.tobytes() + labels.tobytes() + ids.tobytes()).hexdigest()
    with _claimed(out, {"layout": "arrays", "images": list(images.shape), "sha256": digest}, grid):
        small = np.min_scalar_type(int(labels.max()))
        save_array(out / "labels.npy", np.tile(labels.astype(small), len(SEVERITIES)))
        missing = [five for name, five in by_name.items() if not (out / f"{name}.npy").exists()]
        run(functools.partial(_copy_array, images, ids, out), missing)
    return len(by_name)


def _copy_array(images: Array, ids: Array, out: Path, severities: Sequence[Corruption]) -> None:
    """All images under one corruption, severity after severity, as one file."""
    parts = list(zip(torch.from_numpy(images).split(BATCH), torch.from_numpy(ids).split(BATCH), strict=True))
    made = [_to_bytes(one.apply(_to_pixels(x), ids=of_part)) for one in severities for x, of_part in parts]
    save_array(out / f"{severities[0].name}.npy", np.concatenate(made))


def _to_pixels(images: Tensor) -> Tensor:
    """(B, H, W, C) uint8 → (B, C, H, W) in [0, 1]."""
    return images.movedim(-1, 1).float() / 255


def _to_bytes(pixels: Tensor) -> Array:
    """The way back."""
    return (pixels * 255).round().byte().movedim(1, -1).numpy()


@contextlib.contextmanager
def _claimed(out: Path, settings: dict[str, Any], grid: Sequence[Corruption]) -> Iterator[None]:
    """A folder for the copy, locked: new, or begun with the same settings.

    Names and severities may be added later; the other settings of corruptions are settings of the copy.
    """
    shared = {field.name: getattr(one, field.name) for one in grid for field in dataclasses.fields(one)}
    settings |= {name: value for name, value in shared.items() if name != "severity"}
    with Lock(out):
        try:
            claim_folder(out, RECORD, settings, "corrupted copies")
            for folder in out.glob("*/*/*/"):
                sweep(folder)
            yield
        except BaseException:
            discard(out, RECORD)
            raise


def share(work: Callable[[T], object], items: Sequence[T], workers: int, progress: Progress = no_progress) -> None:
    """`work(item)` for every item, in `workers` processes; the first error ends all, what is written stays."""
    if workers == 1:
        for done, item in enumerate(items, 1):
            work(item)
            progress(done, len(items))
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for done, future in enumerate(as_completed([pool.submit(work, item) for item in items]), 1):
                future.result()
                progress(done, len(items))
        except BrokenProcessPool as error:
            raise RunError(
                f"a worker process was killed, perhaps for lack of memory ({workers} worked). What is written stays; "
                "the same command with fewer --workers continues."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
