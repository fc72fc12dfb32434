"""Corrupted pictures in folders, `<corruption>/<severity>/<class>/<file>`, as ImageNet-C is published.

Corruptions may lie in the folders noise, blur, weather, digital and extra, as the archives of ImageNet-C unpack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vitruvius._errors import DataError
from vitruvius._imagenet import NUM_CLASSES, imagenet_labels
from vitruvius.corruptions.base import SEVERITIES
from vitruvius.shifts._base import Shift, Subset
from vitruvius.shifts._pictures import Pictures, known_classes, unpacked
from vitruvius.shifts._remarks import listed, some, subfolders

ARCHIVES = ("noise", "blur", "weather", "digital", "extra")


def corrupted_imagenet(
    root: Path,
    name: str,
    corruptions: Sequence[str],
    *,
    archive: Sequence[str],
    benchmark: Sequence[str] | None = None,
) -> Shift:
    """A published set of corrupted and cropped ImageNet pictures.

    root: the folder that the user names.
    name: of the shift, for reports.
    corruptions: that the set has, in the order of reports.
    archive: folders that its archive unpacks to; the first that lies in `root` is read, else `root` itself.
    benchmark: corruptions that mCE is the mean of; default all.
    """
    folder = unpacked(root, archive)
    parts, missing, remarks = corrupted_parts(folder, corruptions, imagenet_labels(), name=name)
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
    root: Path, corruptions: Sequence[str], labels: Mapping[str, int], *, name: str
) -> tuple[tuple[Subset, ...], tuple[str, ...], tuple[str, ...]]:
    """(subsets, missing, remarks); every folder is looked into before any is used, and an empty one is missing."""
    places = _find_all(root, corruptions, name)
    subsets: list[Subset] = []
    missing: list[str] = []
    for one in corruptions:
        present = [s for s in SEVERITIES if one in places and subfolders(places[one] / str(s))]
        subsets += [_subset(places[one] / str(s), one, s, labels, name) for s in present]
        if present:
            missing += [f"{one} {s}" for s in SEVERITIES if s not in present]
        else:
            missing.append(one)
    if not subsets:
        one, place = places.popitem()
        raise DataError(
            f"the corruptions in {root} have no severities; expected class folders in {place / '1'} to "
            f"{place / '5'}, found {listed(place)} in {one}. Unpack {name} again, or rename its folders."
        )
    return tuple(subsets), tuple(missing), tuple(_remarks(root, corruptions, places, name))


def _find_all(root: Path, corruptions: Sequence[str], name: str) -> dict[str, Path]:
    """Corruption → its folder, for those that have one; that none has is an error."""
    places = {}
    for one in corruptions:
        folder = find_corruption(root, one)
        if folder is not None:
            places[one] = folder
    if not places:
        raise DataError(
            f"{root} has no corruption of {name}; expected folders such as {corruptions[0]}/1/<class>, "
            f"found {listed(root)}. Name the folder that holds them."
        )
    return places


def find_corruption(root: Path, corruption: str) -> Path | None:
    """The folder of a corruption, in `root` or in the folder of one of ImageNet-C's archives."""
    for path in (root / corruption, *(root / archive / corruption for archive in ARCHIVES)):
        if path.is_dir():
            return path
    return None


def _subset(folder: Path, one: str, severity: int, labels: Mapping[str, int], name: str) -> Subset:
    called = f"{name}/{one} {severity}"
    known_classes(folder, labels, name=called)
    return Subset(
        name=f"{one} {severity}", group=one, severity=severity, open=lambda: Pictures(folder, labels, name=called)
    )


def _remarks(root: Path, corruptions: Sequence[str], places: Mapping[str, Path], name: str) -> list[str]:
    """Folders that are neither corruptions nor severities."""
    remarks = []
    unknown = [one for one in subfolders(root) if one not in (*corruptions, *ARCHIVES)]
    if unknown:
        remarks.append(f"{name}: left out, not a corruption of it: {', '.join(unknown)}.")
    other = _other_levels(places)
    if other:
        remarks.append(f"{name}: left out, not a severity from 1 to 5: {some(other)}.")
    return remarks


def _other_levels(places: Mapping[str, Path]) -> list[str]:
    """`fog/6` and the like: folders inside corruptions that are not severities."""
    severities = {str(severity) for severity in SEVERITIES}
    other = []
    for corruption, place in places.items():
        other += [f"{corruption}/{level}" for level in subfolders(place) if level not in severities]
    return other
