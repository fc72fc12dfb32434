"""ImageNetV2: a second validation set in three variants (Recht et al. 2019, arXiv:1902.10811).

Its class folders are numbers 0 … 999; sorted as text, 10 would come before 2 and every label would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vitruvius._errors import DataError
from vitruvius._imagenet import NUM_CLASSES, imagenet_labels
from vitruvius.shifts._base import Images, Shift, Subset, shifts
from vitruvius.shifts._pictures import Pictures, known_classes
from vitruvius.shifts._remarks import listed

VARIANTS = {  # name → how folders of it are called
    "matched-frequency": "*matched*frequency*",
    "threshold-0.7": "*threshold*",
    "top-images": "*top*images*",
}


@shifts.register("imagenet-v2")
def imagenet_v2(root: Path) -> Shift:
    """`imagenetv2-<variant>-format-val/<0 … 999>/`, three variants of 10,000 pictures, or the folder of one.

    `root` is the folder above the variants, or that of one of them.
    """
    found = _find_variants(root)
    if not found:
        raise DataError(
            f"{root} holds no variant of imagenet-v2; expected e.g. imagenetv2-matched-frequency-format-val/0, "
            f"found {listed(root)}. Name the folder that holds them, or one variant."
        )
    parts = [Subset(name=name, group=name, open=_opener(path, name)) for name, path in found.items()]
    missing = tuple(name for name in VARIANTS if name not in found)
    return Shift(name="imagenet-v2", parts=tuple(parts), num_classes=NUM_CLASSES, missing=missing)


def _find_variants(root: Path) -> dict[str, Path]:
    """Variant → its folder; a folder of numbers is one variant, which its name may tell."""
    found = {}
    for name, pattern in VARIANTS.items():
        folders = [path for path in sorted(root.glob(pattern)) if path.is_dir()]
        if folders:
            found[name] = folders[0]
    if not found and (root / "0").is_dir():
        found[_variant_of(root)] = root
    return found


def _variant_of(folder: Path) -> str:
    for name in VARIANTS:
        if name[:9] in folder.name:
            return name
    return "imagenet-v2"


def _opener(folder: Path, name: str) -> Callable[[], Images]:
    labels = {str(number): number for number in range(NUM_CLASSES)}
    if not any((folder / one).is_dir() for one in labels):
        labels = imagenet_labels()  # some copies have renamed the folders
    known_classes(folder, labels, name=f"imagenet-v2/{name}")
    return lambda: Pictures(folder, labels, name=f"imagenet-v2/{name}")
