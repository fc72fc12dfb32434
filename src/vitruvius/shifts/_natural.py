"""Natural shifts: pictures of ImageNet classes in one folder a class, of all classes or of a subset."""

from __future__ import annotations

from pathlib import Path

from vitruvius.shifts._base import Images, Part, Shift
from vitruvius.shifts._classes import NUM_CLASSES, imagenet_labels, subset_columns
from vitruvius.shifts._corrupted import PUBLISHED, below
from vitruvius.shifts._pictures import Pictures


def natural_shift(root: Path, *, name: str, subset: str = "") -> Shift:
    """One part, of all ImageNet classes or of those of a subset (a, o or r)."""
    part = Part(name=name, group=name, open=lambda: open_pictures(root, name=name, subset=subset))
    columns = subset_columns(subset) if subset else None
    return Shift(name=name, parts=(part,), num_classes=NUM_CLASSES, columns=columns)


def open_pictures(root: Path, *, name: str, subset: str) -> Images:
    return Pictures(below(root, PUBLISHED[name]), imagenet_labels(subset), name=name)
