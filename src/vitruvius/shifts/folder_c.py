"""Any folder data in the layout of ImageNet-C, as `vitruvius corrupt` writes it: classes are the folders, in order."""

from __future__ import annotations

import json
import re
from pathlib import Path

from vitruvius._errors import DataError
from vitruvius._files import read_text
from vitruvius.corruptions.base import BENCHMARK, IMAGENET_C, corruption_names
from vitruvius.shifts._base import RECORD, Shift, shifts
from vitruvius.shifts._corrupted import corrupted_parts, find_corruption
from vitruvius.shifts._remarks import listed, some


@shifts.register("folder-c")
def folder_c(root: Path) -> Shift:
    """`<corruption>/<severity>/<class>/` of any data; classes are numbered in natural order of their names.

    `root` is the folder above the corruptions.
    """
    classes = sorted(_classes(root), key=_natural)
    if not classes:
        raise DataError(
            f"{root} holds no folders <corruption>/<severity>/<class>, e.g. fog/3/cat; found {_found(root)}. "
            "Name the folder that holds them; `vitruvius corrupt` writes such a one."
        )
    labels = {one: place for place, one in enumerate(classes)}
    parts, missing, remarks = corrupted_parts(root, _corruptions(root), labels, name="folder-c")
    return Shift(
        name="folder-c",
        parts=parts,
        num_classes=len(classes),
        classes=tuple(classes),
        cropped=_cropped(root),
        benchmark=BENCHMARK,
        missing=missing,
        remarks=remarks,
    )


def _classes(root: Path) -> set[str]:
    """Class folders of all corruptions and severities together."""
    classes: set[str] = set()
    for one in _corruptions(root):
        folder = find_corruption(root, one)
        if folder is not None:
            classes.update(path.name for path in folder.glob("[1-5]/*") if path.is_dir())
    return classes


def _corruptions(root: Path) -> tuple[str, ...]:
    """The published corruptions, and of the other registered ones those that have a folder here."""
    others = [one for one in corruption_names("all") if one not in IMAGENET_C]
    return (*IMAGENET_C, *(one for one in others if find_corruption(root, one) is not None))


def _found(root: Path) -> str:
    """Folders of two levels, or what else there is."""
    deep = sorted(str(path.relative_to(root)) for path in root.glob("*/*") if path.is_dir())
    return some(deep) or listed(root)


def _cropped(root: Path) -> bool:
    """Whether the copy was cropped before it was corrupted, as it says itself; a copy that says nothing was not."""
    record = root / RECORD
    try:
        if not record.is_file():
            return False
        return json.loads(read_text(record)).get("size") is not None
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"{record} is damaged ({error}); it says whether the pictures are cropped already. Make the copy again, or "
            "delete this file: then they are cropped as the model says."
        ) from error


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in names count as numbers: 2 before 10."""
    key = []
    for piece in re.split(r"(\d+)", name):
        if piece.isdigit():
            key.append((int(piece), ""))
        else:
            key.append((-1, piece.lower()))
    return key
