"""What a set of images is, in a few hashes: enough to notice that it has changed between two halves of a piece of work.

Files go by their names, sizes and labels and by the bytes of a sample of them; images in memory by all their bytes.
Where the files lie does not count, and modification times alone do not either: they are noted, to be mentioned.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitruvius._files import bytes_of
from vitruvius.data._image_loader import UNREADABLE, ImageSet
from vitruvius.data._tensors import TensorSet

SAMPLE = 64  # images whose contents are hashed where not all are
LOOKED_AT = 50_000  # files whose sizes and times are asked for
WHOLE = 2**28  # bytes of images in memory that are hashed whole
TIMES = "times"  # the aspect that does not count by itself

Identity = dict[str, str]  # aspect → hash or number


def identify(images: TensorSet | ImageSet, ids: Tensor | None = None, *, looked_at: int = LOOKED_AT) -> Identity:
    """Number, names, sizes, labels, contents and times of a set of images, as far as it has them.

    images: the set.
    ids: numbers of the images that are used; default all.
    looked_at: files whose sizes and times are asked for; of more, that many spread over the set.
    """
    if ids is None:
        ids = torch.arange(len(images))
    numbers = ids.tolist()
    found = {"images": str(len(numbers)), "which": _hash(ids.numpy())}
    labels = _labels(images)
    if labels is not None:
        found["labels"] = _hash(np.asarray(labels)[numbers].astype(np.int64))
    files = _files(images)
    if files is not None:
        return found | _of_files([files[number] for number in numbers], looked_at)
    return {**found, "contents": _contents(images, numbers)}


def identity_of(loader: Any) -> Identity:
    """The same of all images that a loader of this room gives out, in all processes together.

    Of a stream only the number is known; of a loader of another make, nothing.

    `loader` is asked before any image is read.
    """
    sources: Sequence[tuple[TensorSet | ImageSet, Tensor]] = getattr(loader, "sources", ())
    if not sources:
        number = getattr(loader, "num_images", None)
        if number is None:
            return {}
        return {"images": str(number)}
    parts = [identify(images, ids) for images, ids in sources]
    found = {aspect: " + ".join(part.get(aspect, "none") for part in parts) for aspect in parts[0]}
    return {**found, "preprocessing": str(loader.preprocessing)}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two identities, apart from times: `images were 1437, are 1436`; aspects of both count.

    `before` and `now` are values by aspect, as `identify` makes them.
    """
    said = []
    for aspect in before:
        if aspect != TIMES and aspect in now and now[aspect] != before[aspect]:
            said.append(f"{aspect} were {before[aspect]}, are {now[aspect]}")
    return said


def touched(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether files have other times, though all else is as it was. `before` and `now` are identities."""
    times = before.get(TIMES)
    return times is not None and now.get(TIMES, times) != times and not changes(before, now)


def digest_of(identity: Mapping[str, str]) -> str:
    """One hash for all that counts of an `identity`: everything but times."""
    return hash_text(*(f"{aspect} {value}" for aspect, value in sorted(identity.items()) if aspect != TIMES))


def hash_tensors(*tensors: Tensor) -> str:
    """A short hash of some tensors: types, shapes and every number."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def hash_text(*texts: str) -> str:
    """A short hash of some `texts`, in their order."""
    return hashlib.blake2b("\n".join(texts).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def spread(number: int, wanted: int) -> list[int]:
    """`wanted` of `number` places, evenly; all if there are no more."""
    if number <= wanted:
        return list(range(number))
    return [place * number // wanted for place in range(wanted)]


def hash_file(path: str | os.PathLike[str]) -> str:
    """A short hash of the bytes of the file at `path`; a word where it cannot be read."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (many)
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    except OSError:
        return "unreadable"


def _of_files(files: Sequence[str], looked_at: int) -> Identity:
    names = ["/".join(file.rsplit(os.sep, 2)[-2:]) for file in files]  # class/file, wherever they lie
    sizes = []
    times = []
    for place in spread(len(files), looked_at):
        about = _stat(files[place])
        sizes.append(str(about and about.st_size))
        times.append(str(about and about.st_mtime_ns))
    contents = [hash_file(files[place]) for place in spread(len(files), SAMPLE)]
    found = {"names": names, "sizes": sizes, "contents": contents, TIMES: times}
    return {aspect: hash_text(*texts) for aspect, texts in found.items()}


def _stat(file: str) -> os.stat_result | None:
    try:
        return os.stat(file)  # noqa: PTH116 (many)
    except OSError:
        return None


def _files(images: Any) -> list[str] | None:
    """The file of every image, where each has one."""
    samples = getattr(getattr(images, "reader", None), "samples", None)  # timm's reader of folders
    if isinstance(samples, list) and samples:
        return [str(path) for path, _ in samples]
    if isinstance(getattr(images, "files", None), list):
        return [images.describe(number) for number in range(len(images))]
    return None


def _labels(images: Any) -> Any:
    """The labels of all images, where they are known without reading the images."""
    if isinstance(images, TensorSet) and images.rows is not None:
        return images.labels[images.rows.clamp_min(0)]
    if getattr(images, "labels", None) is not None:
        return images.labels
    samples = getattr(getattr(images, "reader", None), "samples", None) or getattr(images, "files", None)
    if isinstance(samples, list):
        return [label for _, label in samples]
    return None


def _contents(images: Any, numbers: Sequence[int]) -> str:
    pixels = _array(images)
    if pixels is None:
        return hash_text(*(_look(images, numbers[place]) for place in spread(len(numbers), SAMPLE)))
    size = pixels[:1].nbytes * len(numbers)
    rows = np.asarray(numbers)
    if size > WHOLE:
        rows = rows[spread(len(rows), WHOLE * len(rows) // size)]
    return _hash(*(pixels[some] for some in np.array_split(rows, max(1, len(rows) // 1024))))


def _array(images: Any) -> Any:
    """All images as one array (N, …), where they are one in memory or in a mapped file."""
    if isinstance(images, TensorSet):
        if images.rows is None:
            return images.images.numpy()
        return None
    for held in (getattr(images, "images", None), getattr(images, "pixels", None)):
        if isinstance(held, np.ndarray | Tensor) and len(held) == len(images):
            return np.asarray(held)
    return None


def _look(images: Any, number: int) -> str:
    """A hash of one decoded image and its label."""
    try:
        image, label = images.read(number)
    except UNREADABLE:
        return "unreadable"
    return f"{image.mode} {image.size} {label} {_hash(np.asarray(image))}"


def _hash(*arrays: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        plain = np.ascontiguousarray(array)
        digest.update(f"{plain.dtype} {plain.shape}".encode())
        digest.update(plain.data)
    return digest.hexdigest()
