"""Corrupted pictures in folders, `<corruption>/<severity>/<class>/<file>`, as ImageNet-C is published.

Corruptions may lie in the folders noise, blur, weather, digital and extra, as the archives of ImageNet-C unpack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from vitruvius._errors import DataError
from vitruvius.corruptions import SEVERITIES
from vitruvius.shifts._base import Part, Shift
from vitruvius.shifts._classes import NUM_CLASSES, imagenet_labels
from vitruvius.shifts._pictures import Pictures

ARCHIVES = ("noise", "blur", "weather", "digital", "extra")
PUBLISHED = {  # folders that archives unpack to
    "imagenet-a": ("imagenet-a",),
    "imagenet-c": ("imagenet-c", "ImageNet-C"),
    "imagenet-c-bar": ("imagenet-c-bar", "imagenet_c_bar"),
    "imagenet-o": ("imagenet-o",),
    "imagenet-r": ("imagenet-r",),
    "imagenet-sketch": ("sketch", "imagenet-sketch", "images"),
    "cifar-10-c": ("CIFAR-10-C",),
    "cifar-100-c": ("CIFAR-100-C",),
}


def below(root: Path, names: Iterable[str]) -> Path:
    """The folder itself, or the one inside that an archive has made."""
    return next((root / name for name in names if (root / name).is_dir()), root)


def corrupted_imagenet(
    root: Path, name: str, corruptions: Sequence[str], *, benchmark: Sequence[str] | None = None
) -> Shift:
    """A published set of corrupted and cropped ImageNet pictures; its mean is over `benchmark`, by default over all."""
    folder = below(root, PUBLISHED[name])
    parts, missing, remarks = corrupted_parts(folder, corruptions, lambda _: imagenet_labels(), name=name)
    return Shift(
        name=name,
        parts=parts,
        num_classes=NUM_CLASSES,
        cropped=True,
        benchmark=tuple(benchmark or corruptions),
        missing=missing,
        remarks=remarks,
    )


def corrupted_parts(
    root: Path, corruptions: Sequence[str], labels: Callable[[Path], Mapping[str, int]], *, name: str
) -> tuple[tuple[Part, ...], tuple[str, ...], tuple[str, ...]]:
    """(parts, missing, remarks); `labels` numbers the classes of the folder of a severity."""
    places = {one: found for one in corruptions if (found := _find(root, one)) is not None}
    inside = sorted(path.name for path in root.iterdir() if path.is_dir())
    if not places:
        held = ", ".join(inside[:5]) or "no folders"
        raise DataError(
            f"{root} has no corruption of {name}; expected folders such as {corruptions[0]}/1/<class>, found {held}."
        )
    parts, missing = [], []
    for one in corruptions:
        here = [s for s in SEVERITIES if one in places and (places[one] / str(s)).is_dir()]
        missing += [one] if not here else [f"{one} {s}" for s in SEVERITIES if s not in here]
        parts += [_part(places[one] / str(s), one, s, labels, name) for s in here]
    if not parts:
        raise DataError(
            f"the corruptions in {root} have no severities; expected folders 1 to 5 in {places.popitem()[1]}."
        )
    strange = [one for one in inside if one not in (*corruptions, *ARCHIVES)]
    remarks = (f"{name}: left out, no corruption of it: {', '.join(strange)}.",) if strange else ()
    return tuple(parts), tuple(missing), remarks


def _find(root: Path, corruption: str) -> Path | None:
    tried = (root / corruption, *(root / archive / corruption for archive in ARCHIVES))
    return next((path for path in tried if path.is_dir()), None)


def _part(folder: Path, one: str, severity: int, labels: Callable[[Path], Mapping[str, int]], name: str) -> Part:
    return Part(
        name=f"{one} {severity}",
        group=one,
        severity=severity,
        open=lambda: Pictures(folder, labels(folder), name=f"{name}/{one} {severity}"),
    )
