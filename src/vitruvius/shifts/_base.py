"""What a shift is: subsets of labelled images, and what must be known before a model answers them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from PIL import Image
from torch import Tensor

from vitruvius._errors import ConfigError, DataError
from vitruvius._files import read_text
from vitruvius._registry import Registry, read_spec
from vitruvius.shifts._remarks import Remark

RECORD = "corrupt.json"  # what `vitruvius corrupt` writes beside a copy


class Images(Protocol):
    """Labelled images by number.

    `read` decodes the image of an `index` from 0 and gives it with its label; `describe` says where it lies.
    """

    name: str
    num_classes: int
    keys: Tensor  # (n,) int64: which image each one is, in whatever order they are listed

    @property
    def remarks(self) -> Sequence[Remark | str]:
        """What was found beside them, or not found."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]: ...

    def describe(self, index: int) -> str: ...


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


Reader = Callable[..., Shift]
shifts: Registry[Reader] = Registry("shift", homes=["vitruvius.shifts"])


def open_shift(spec: str, **settings: Any) -> Shift:
    """What a folder holds of a published set; nothing is decoded yet.

    spec: `imagenet-c:/data/imagenet-c`, or with settings `imagenet-o:/data/imagenet-o,validation=/data/imagenet/val`.
    settings: of the reader, instead of writing them into `spec`.
    """
    name, colon, rest = spec.partition(":")
    place, _, told = rest.partition(",")
    if not colon or not place.strip():
        raise ConfigError(f"{spec!r} does not say where the images are; write e.g. imagenet-c:/data/imagenet-c.")
    _, given = read_spec(f"{name}:{told}", where="--shift")
    reader = shifts.bind({"use": name.strip(), **given, **settings}, where="--shift")
    root = Path(place).expanduser()
    if root.is_file():
        raise DataError(f"the folder {root} of {name} is a file; name the folder that holds its images.")
    if not root.is_dir():
        raise DataError(f"the folder {root} of {name} does not exist; name the folder that holds its images.")
    shift: Shift = reader(root)
    return replace(shift, drawn=_drawn(root, shift))


def _drawn(root: Path, shift: Shift) -> tuple[str, ...]:
    """Frost, where the folder is a copy of `vitruvius corrupt` that was made without photographs."""
    record = root / RECORD
    if not record.is_file() or all(part.group != "frost" for part in shift.parts):
        return ()
    try:
        settings = json.loads(read_text(record))
        photographs = settings.get("textures")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{record} is damaged ({error}); make the copy again, or delete this file.") from error
    if photographs is None:
        return ("frost",)
    return ()
