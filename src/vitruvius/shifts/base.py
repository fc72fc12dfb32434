"""What a shift is: subsets of labelled images, and what must be known before a model answers them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from vitruvius._errors import ConfigError, DataError, RunError
from vitruvius._files import read_json
from vitruvius._registry import Registry, read_spec
from vitruvius.data.base import ImageSet

RECORD = "corrupt.json"  # what `vitruvius corrupt` writes beside a copy


@dataclass(frozen=True)
class Remark:
    """Something unexpected about a subset, with the names it concerns: `c/fog 1: left out, not pictures: a, b.`"""

    place: str
    what: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}: {self.what}: {shortened(self.names)}."


class Images(ImageSet, Protocol):
    """Labelled images by number, as loaders read them."""

    @property
    def keys(self) -> Tensor:
        """(n,) int64: which image each one is, in whatever order they are listed."""
        ...

    @property
    def remarks(self) -> Sequence[Remark | str]:
        """What was unexpected about them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Subset:
    """One set of images: a corruption at a severity, a variant, or all of them. Opened when its turn comes."""

    name: str  # "fog 3"
    group: str  # "fog"
    open: Callable[[], Images]
    severity: int | None = None
    outside: bool = False  # images of classes that no model was taught: there is no right answer


@dataclass(frozen=True, kw_only=True)
class Shift:
    """What was found of a published set, and what was not."""

    name: str
    parts: tuple[Subset, ...]
    num_classes: int  # that a model must know
    classes: tuple[str, ...] = ()  # their names, where the folders alone say what they are
    columns: tuple[int, ...] | None = None  # the logits that count, where the set has a subset of the classes
    cropped: bool = False  # images are at the crop already: they are resized to the model's size, not cropped again
    benchmark: tuple[str, ...] = ()  # corruptions that mCE is the mean of
    missing: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()  # corruptions that stand in for published photographs: frost of our own copies
    remarks: tuple[str, ...] = ()


shifts: Registry[Callable[..., Shift]] = Registry("shift", homes=["vitruvius.shifts"])


def open_shift(spec: str, **settings: Any) -> Shift:
    """What a folder holds of a published set; nothing is decoded yet.

    spec: `imagenet-c:/data/imagenet-c`, or with settings `imagenet-o:/data/imagenet-o,validation=/data/imagenet/val`.
    settings: of the reader, instead of writing them into `spec`.
    """
    name, colon, rest = spec.partition(":")
    folder, _, written = rest.partition(",")
    if not colon or not folder.strip():
        raise ConfigError(f"{spec!r} does not say where the images are; write e.g. imagenet-c:/data/imagenet-c.")
    _, given = read_spec(f"{name}:{written}", where="--shift")
    reader = shifts.bind({"use": name.strip(), **given, **settings}, where="--shift")
    root = Path(folder).expanduser()
    if not root.is_dir():
        problem = "is a file" if root.is_file() else "does not exist"
        raise DataError(f"the folder {root} of {name} {problem}; name the folder that holds its images.")
    shift: Shift = reader(root)
    record = read_record(root)
    if record is not None and record.get("textures") is None and any(part.group == "frost" for part in shift.parts):
        shift = replace(shift, drawn=("frost",))
    return shift


def read_record(root: Path) -> dict[str, Any] | None:
    """What a copy of `vitruvius corrupt` says of itself; None where the folder is no such copy."""
    file = root / RECORD
    if not file.is_file():
        return None
    try:
        return read_json(file)
    except RunError as error:
        raise DataError(str(error)) from error


def say_once(name: str, parts: int, remarks: Iterable[Remark | str]) -> list[str]:
    """Remarks on the `parts` subsets of the shift `name`, one line for each kind, with the longest list as example."""
    different = list(dict.fromkeys(remarks))  # every process makes the same ones
    kinds: dict[str, list[Remark]] = {}
    for remark in different:
        if isinstance(remark, Remark):
            kinds.setdefault(remark.what, []).append(remark)
    lines = []
    for alike in kinds.values():
        longest = max(alike, key=lambda remark: len(remark.names))
        if len(alike) > 1:
            longest = replace(longest, place=name if len(alike) == parts else f"{name}, {len(alike)} of {parts} parts")
        lines.append(str(longest))
    return [*lines, *(remark for remark in different if isinstance(remark, str))]


def shortened(names: Sequence[str], shown: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
