"""Natural shifts: pictures of ImageNet classes in one folder a class, of all classes or of a subset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vitruvius._imagenet import NUM_CLASSES, imagenet_labels, subset_columns
from vitruvius.shifts._base import Part, Shift
from vitruvius.shifts._corrupted import PUBLISHED, below
from vitruvius.shifts._pictures import Pictures, known_classes


def natural_shift(root: Path, *, name: str, subset: str = "") -> Shift:
    """One part, of all ImageNet classes or of those of a subset (a, o or r)."""
    part = pictures_part(below(root, PUBLISHED[name]), imagenet_labels(subset), name=name)
    columns = subset_columns(subset) if subset else None
    return Shift(name=name, parts=(part,), num_classes=NUM_CLASSES, columns=columns)


def pictures_part(folder: Path, labels: Mapping[str, int], *, name: str, outside: bool = False) -> Part:
    """A folder of class folders, looked into now and listed when its turn comes."""
    known_classes(folder, labels, name=name)
    return Part(name=name, group=name, outside=outside, open=lambda: Pictures(folder, labels, name=name))
