"""What was found beside the images of a subset, or not found; said once where many subsets have it in common."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Remark:
    """`imagenet-c/fog 1: 2 of 1000 classes have no pictures: n01440764, n01443537.`"""

    place: str  # "imagenet-c/fog 1"
    what: str  # "of 1000 classes have no pictures"
    names: tuple[str, ...]
    number: int | None = None  # what `what` begins with, where it counts something

    def __str__(self) -> str:
        return f"{self.place}: {counted([self])}: {some(self.names)}."


def say_once(name: str, parts: int, remarks: Iterable[Remark | str]) -> list[str]:
    """Remarks on the `parts` subsets of a shift, a line for each kind; a plain text stays a line of its own.

    `name` is that of the shift; `remarks` come in the order in which they were found.
    """
    kinds: dict[str, list[Remark]] = {}
    texts: list[str] = []
    for remark in dict.fromkeys(remarks):  # every process has made the same
        if isinstance(remark, str):
            texts.append(remark)
        else:
            kinds.setdefault(remark.what, []).append(remark)
    return [*(_together(name, parts, alike) for alike in kinds.values()), *texts]


def counted(alike: Sequence[Remark]) -> str:
    """`what`, after the number or the range of numbers."""
    numbers = sorted({remark.number for remark in alike if remark.number is not None})
    span = " to ".join(str(number) for number in dict.fromkeys([*numbers[:1], *numbers[-1:]]))
    return f"{span} {alike[0].what}".strip()


def _together(name: str, parts: int, alike: Sequence[Remark]) -> str:
    most = max(alike, key=lambda remark: len(remark.names))
    if len(alike) == 1:
        return str(most)
    place = name
    if len(alike) != parts:
        place = f"{name}, {len(alike)} of {parts} parts"
    example = ""
    if any(remark.names != most.names for remark in alike):
        example = f", e.g. in {most.place}"
    return f"{place}: {counted(alike)}{example}: {some(most.names)}."


def subfolders(folder: Path) -> list[str]:
    """Names of the folders inside, in order; none where there is no such folder."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def listed(folder: Path) -> str:
    """Some of what lies inside: folders if there are any, else files."""
    return some(subfolders(folder) or sorted(path.name for path in folder.iterdir()), 5) or "nothing"


def some(names: Sequence[str], shown: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
