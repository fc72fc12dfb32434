"""What was found beside the images of a part, or not found; said once where many parts have it in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vitruvius.shifts._found import some


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
    """Remarks on the `parts` parts of a shift, a line for each kind; a plain text stays a line of its own."""
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
    place = name if len(alike) == parts else f"{name}, {len(alike)} of {parts} parts"
    example = "" if all(remark.names == most.names for remark in alike) else f", e.g. in {most.place}"
    return f"{place}: {counted(alike)}{example}: {some(most.names)}."
