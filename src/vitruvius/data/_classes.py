"""Subsets of classes by name: the 100 ImageNet classes of the light recipe's ablations, or a list of the user's.

Debenedetti, Sehwag & Mittal 2023, arXiv:2209.07399. Classes are numbered in the order of the list.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from vitruvius._errors import DataError

PACKAGED = {"imagenet-100": "imagenet_100.txt"}


def class_names(name: str) -> list[str]:
    """The classes of a packaged subset, or of a text file with one class name a line."""
    if name in PACKAGED:
        text = files("vitruvius.data").joinpath(PACKAGED[name]).read_text(encoding="utf-8")
    elif Path(name).expanduser().is_file():
        text = Path(name).expanduser().read_text(encoding="utf-8")
    else:
        known = ", ".join(PACKAGED)
        raise DataError(f"data.classes={name!r} is neither {known} nor a text file with one class name a line.")
    names = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not names or len(set(names)) < len(names):
        raise DataError(f"data.classes={name!r} lists {len(names)} classes, {len(set(names))} of them different.")
    return names
