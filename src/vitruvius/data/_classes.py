"""Lists of classes by name: all of ImageNet's, the 100 of the light recipe's ablations, or a list of the user's.

Debenedetti, Sehwag & Mittal 2023, arXiv:2209.07399. Classes are numbered in the order of the list.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from vitruvius._errors import DataError
from vitruvius._imagenet import imagenet_labels

PACKAGED = {"imagenet-100": "imagenet_100.txt"}
IMAGENET = "imagenet-1k"  # class map of folders named by WordNet ids


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


def read_class_map(name: str, root: Path) -> dict[str, int]:
    """Class name → number: ImageNet's, or by the lines of a text file, which may lie in `root`."""
    if name == IMAGENET:
        return imagenet_labels()
    for path in (Path(name), root / name):
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            return {line.strip(): number for number, line in enumerate(lines) if line.strip()}
    raise DataError(
        f"class map {name} is neither {IMAGENET} nor a file, nor one in {root}; expected a text file, one class name "
        "a line."
    )
