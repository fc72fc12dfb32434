"""A corrupted copy of a folder of images, in ImageNet-C's layout: `corruption/severity/class/file`.

Every file is written whole or not at all, and one that is there is not made again: a copy that was interrupted goes on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitruvius._checks import Progress
from vitruvius._errors import ConfigError, DataError
from vitruvius._files import Lock, MadeFolder, atomic_write_bytes
from vitruvius.corrupted_copies._work import RECORD, WORKSHOP, claim, claim_files, settings_of, share
from vitruvius.corruptions import Corruption

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm")
USUAL_SUFFIXES = {"jpeg": (".jpg", ".jpeg"), "png": (".png",)}
JPEG_QUALITY = 85  # of the published ImageNet-C
CHUNK = 16  # files a worker takes at a time
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


@dataclass(frozen=True)
class FolderCopy:
    """What is copied, and how."""

    source: Path
    out: Path
    corruptions: tuple[Corruption, ...]
    size: int | None  # pixels: the middle square, after the shorter side was made 8/7 of it; None: as they are
    format: Literal["jpeg", "png"]

    def place(self, corruption: Corruption, file: str) -> Path:
        """Where the copy of `class/file` goes.

        `corruption` gives the first two folders: its name and its severity.
        """
        path = Path(file)
        if path.suffix.lower() not in USUAL_SUFFIXES[self.format]:
            path = path.with_suffix(f".{self.format}")
        return self.out / corruption.name / str(corruption.severity) / path


def copy_folder(
    source: str | Path,
    out: str | Path,
    corruptions: Sequence[Corruption],
    *,
    size: int | None = 224,
    format: Literal["jpeg", "png"] = "jpeg",
    only: Sequence[str] | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> int:
    """Write every image of `source/class/` under every corruption; returns how many files the copy has.

    source: the folder that holds a folder of images per class.
    out: the folder to write, outside `source`; one that was begun with the same settings is finished.
    corruptions: each with its severity; they share all other settings.
    size: pixels of the middle square that is kept; default 224, None keeps images as they are.
    format: of the files, `jpeg` (default) or `png`.
    only: `class/file` of the images to copy; default all.
    workers: processes; default 1.
    progress: called with (chunks done, chunks in all).

    As published: the middle 224 × 224 pixels after the shorter side was made 256, then the corruption, then JPEG of
    quality 85. `format="png"` leaves out that last loss.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    if only is None:
        files = class_files(source)
        limit = None
    else:
        files = list(only)
        limit = len(files)
    if out.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{out} lies inside {source}, whose folders are the classes. Choose a folder elsewhere.")
    if size is not None and size < 4:
        raise ConfigError(f"images of {size} pixels are too small to corrupt; 4 or more.")
    job = FolderCopy(source, out, tuple(corruptions), size, format)
    _refuse_doubles(job, files)
    settings = {"layout": "folders", "source": str(source.resolve()), "size": size, "format": format}
    chunks = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]
    settings |= {"limit": limit} | settings_of(corruptions)
    with Lock(out):
        made = MadeFolder(out)
        try:
            claim(out, settings)
            claim_files(out, source, files)
            share(functools.partial(copy_files, job), chunks, workers=workers, progress=progress)
        except BaseException:
            made.take_back(RECORD)
            raise
        finally:
            _remove_if_empty(out / WORKSHOP)
    return len(files) * len(corruptions)


def copy_files(job: FolderCopy, files: Sequence[str]) -> None:
    """The copies of some files that are not there yet; each image is read once.

    `job` says from where, to where and which corruptions; `files` are `class/file`.
    """
    for file in files:
        missing = [corruption for corruption in job.corruptions if not job.place(corruption, file).exists()]
        if not missing:
            continue
        x, ids = read(job, file), torch.tensor([file_id(file)])
        for corruption in missing:
            data = encoded(corruption.apply(x, ids=ids)[0], job.format)
            atomic_write_bytes(job.place(corruption, file), data, tmp_dir=job.out / WORKSHOP)


def class_files(source: Path) -> list[str]:
    """`class/file` of every image, in order; other files are nobody's. `source` is the folder of classes."""
    if not source.is_dir():
        raise DataError(f"{source} is not a folder; expected one that holds a folder of images for every class.")
    files: list[str] = []
    for folder in source.iterdir():
        if folder.is_dir() and not folder.name.startswith("."):
            files += _images_of(folder)
    if not files:
        said = f"no images in the folders of {source}; expected class/image.jpg."
        raise DataError(said + _suggest_deeper(source))
    return sorted(files)


def _images_of(folder: Path) -> list[str]:
    return [f"{folder.name}/{file.name}" for file in folder.iterdir() if _is_image(file)]


def _suggest_deeper(source: Path) -> str:
    for path in source.glob("*/*/*"):
        if _is_image(path):
            return f" Did you mean {path.parent.parent}?"
    return ""


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES and not file.name.startswith(".")


def file_id(file: str) -> int:
    """A number for the dice that belongs to `class/file`, whatever else is in the folder."""
    return int.from_bytes(hashlib.blake2b(file.encode(), digest_size=8).digest(), "little", signed=True)


def read(job: FolderCopy, file: str) -> Tensor:
    """(1, 3, H, W) pixels, cropped as asked. `job` says from which folder, `file` is `class/file`."""
    try:
        with Image.open(job.source / file) as opened:
            image = opened.convert("RGB")
    except UNREADABLE as error:
        raise DataError(
            f"{job.source / file} cannot be read as an image: {error}. Repair it or take it away."
        ) from error
    if job.size is not None:
        image = cropped(image, job.size)
    return torch.from_numpy(np.array(image)).movedim(-1, 0)[None].float() / 255


def cropped(image: Image.Image, size: int) -> Image.Image:
    """The middle square of `size` pixels, after the shorter side was made 256/224 of it (bilinear).

    `image` is of any size and mode.
    """
    factor = round(size * 256 / 224) / min(image.size)
    width, height = (max(round(side * factor), size) for side in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))


def encoded(pixels: Tensor, format: str) -> bytes:
    """One image (3, H, W) as the bytes of a file.

    `pixels` are in [0, 1]; `format` is jpeg or png.
    """
    levels = (pixels * 255).round().byte().movedim(0, -1).numpy()
    file = io.BytesIO()
    if format == "jpeg":
        Image.fromarray(levels).save(file, "JPEG", quality=JPEG_QUALITY, optimize=True)
    else:
        Image.fromarray(levels).save(file, "PNG")
    return file.getvalue()


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _refuse_doubles(job: FolderCopy, files: Sequence[str]) -> None:
    seen: dict[Path, str] = {}
    for file in files:
        place = job.place(job.corruptions[0], file)
        if place in seen:
            raise DataError(f"{seen[place]} and {file} would both become {place.name}; rename one of them.")
        seen[place] = file
