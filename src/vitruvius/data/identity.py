"""What a set of images is, in a few hashes: enough to notice that it has changed between two halves of a piece of work.

Files go by their names, sizes and labels and by the bytes of a sample of them; images in memory by all their bytes.
Where the files lie and when they were written does not count.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vitruvius._files import bytes_of
from vitruvius.data.base import UNREADABLE, AnySet

SAMPLE = 64  # images whose contents are hashed where not all are
LOOKED_AT = 50_000  # files whose sizes are asked for
WHOLE = 2**28  # bytes of images in memory that are hashed whole

Identity = dict[str, str]  # aspect → hash or number


def identify(images: AnySet, ids: Tensor | None = None, *, looked_at: int = LOOKED_AT) -> Identity:
    """Number, names, sizes, labels and contents of a set of images, as far as it has them.

    A set may have `labels` (N,), known without reading the images; the `paths` of its files; all its `pixels` (N, …).

    ids: numbers of the images that are used; default all.
    looked_at: files whose sizes are asked for; of more, that many spread over the set.
    """
    numbers = range(len(images)) if ids is None else ids.tolist()
    identity = {"images": str(len(numbers)), "which": _hash(np.asarray(numbers, dtype=np.int64))}
    labels = getattr(images, "labels", None)
    if labels is not None:
        identity["labels"] = _hash(np.asarray(labels)[numbers].astype(np.int64))
    paths = getattr(images, "paths", None)
    if paths is None:
        return {**identity, "contents": _contents(images, numbers)}
    files = [paths[number] for number in numbers]
    identity["names"] = hash_text(*("/".join(file.rsplit(os.sep, 2)[-2:]) for file in files))  # class/file
    identity["sizes"] = hash_text(*(_size(file) for file in _spread(files, looked_at)))
    identity["contents"] = hash_text(*(_hash_file(file) for file in _spread(files, SAMPLE)))
    return identity


def identity_of(loader: Any) -> Identity:
    """The same of all images that a loader gives out, in all processes together.

    Of a stream only the number is known; of a loader of another make, nothing.
    """
    sources: Sequence[tuple[AnySet, Tensor]] = getattr(loader, "sources", ())
    if not sources:
        number = getattr(loader, "num_images", None)
        return {} if number is None else {"images": str(number)}
    parts = [identify(images, ids) for images, ids in sources]
    identity = {aspect: " + ".join(part.get(aspect, "none") for part in parts) for aspect in parts[0]}
    return {**identity, "preprocessing": str(loader.preprocessing)}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two identities, of the aspects that both have: `images were 1437, are 1436`."""
    both = [aspect for aspect in before if aspect in now]
    return [f"{aspect} were {before[aspect]}, are {now[aspect]}" for aspect in both if now[aspect] != before[aspect]]


def digest_of(identity: Mapping[str, str]) -> str:
    """One hash for a whole identity."""
    return hash_text(*(f"{aspect} {value}" for aspect, value in sorted(identity.items())))


def hash_tensors(*tensors: Tensor) -> str:
    """A short hash of some tensors: types, shapes and every number."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def hash_text(*texts: str) -> str:
    """A short hash of some texts, in their order."""
    return hashlib.blake2b("\n".join(texts).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _spread(items: Sequence[Any], wanted: int) -> Sequence[Any]:
    """`wanted` of the items, evenly spread; all if there are no more."""
    if len(items) <= wanted:
        return items
    return [items[place * len(items) // wanted] for place in range(wanted)]


def _size(file: str) -> str:
    try:
        return str(os.stat(file).st_size)  # noqa: PTH116 (many)
    except OSError:
        return "None"


def _hash_file(path: str) -> str:
    try:
        if not os.path.isfile(path):  # noqa: PTH113 (many); a pipe would be waited for
            return "unreadable"
        with open(path, "rb") as file:  # noqa: PTH123
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    except OSError:
        return "unreadable"


def _contents(images: Any, numbers: Sequence[int]) -> str:
    """All bytes of images in memory or in a mapped file, as far as they are not too many; else a sample, decoded."""
    pixels = getattr(images, "pixels", None)
    if pixels is None:
        return hash_text(*(_hash_image(images, number) for number in _spread(numbers, SAMPLE)))
    pixels = np.asarray(pixels)
    size = pixels[:1].nbytes * len(numbers)
    rows = np.asarray(numbers if size <= WHOLE else _spread(numbers, WHOLE * len(numbers) // size))
    return _hash(*(pixels[some] for some in np.array_split(rows, max(1, len(rows) // 1024))))


def _hash_image(images: Any, number: int) -> str:
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
