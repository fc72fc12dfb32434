"""Any folder data in the layout of ImageNet-C, as `vitruvius corrupt` writes it: classes are the folders, in order."""

from __future__ import annotations

import json
import re
from pathlib import Path

from vitruvius._errors import DataError
from vitruvius._files import read_text
from vitruvius.corruptions import ALL, BENCHMARK
from vitruvius.shifts._base import Shift, shifts
from vitruvius.shifts._corrupted import ARCHIVES, corrupted_parts
from vitruvius.shifts._remarks import listed, some


@shifts.register("folder-c")
def folder_c(root: Path) -> Shift:
    """`<corruption>/<severity>/<class>/` of any data; classes are numbered in natural order of their names."""
    classes = sorted(_classes(root), key=_natural)
    if not classes:
        raise DataError(
            f"{root} holds no folders <corruption>/<severity>/<class>, e.g. fog/3/cat; found {_found(root)}. "
            "Name the folder that holds them; `vitruvius corrupt` writes such a one."
        )
    labels = {one: place for place, one in enumerate(classes)}
    parts, missing, remarks = corrupted_parts(root, ALL, labels, name="folder-c")
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
    tops = [root, *(root / archive for archive in ARCHIVES)]
    folders = [path for top in tops for one in ALL for path in (top / one).glob("[1-5]/*") if path.is_dir()]
    return {path.name for path in folders}


def _found(root: Path) -> str:
    """Folders of two levels, or what else there is."""
    deep = sorted(str(path.relative_to(root)) for path in root.glob("*/*") if path.is_dir())
    return some(deep) or listed(root)


def _cropped(root: Path) -> bool:
    """Whether the copy was cropped before it was corrupted, as it says itself; a copy that says nothing was not."""
    record = root / "corrupt.json"
    try:
        told = json.loads(read_text(record)) if record.is_file() else {}
        return told.get("size") is not None
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"{record} is damaged ({error}); it says whether the pictures are cropped already. Make the copy again, or "
            "delete this file: then they are cropped as the model says."
        ) from error


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in names count as numbers: 2 before 10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece.lower()) for piece in re.split(r"(\d+)", name)]
