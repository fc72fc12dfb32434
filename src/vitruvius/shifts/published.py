"""The published sets, one reader each: its layout, its classes, what is special about it."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from vitruvius._errors import DataError
from vitruvius._format import natural_key
from vitruvius._imagenet import NUM_CLASSES, imagenet_classes, imagenet_labels, subset_columns
from vitruvius.corruptions.base import BENCHMARK, IMAGENET_C, corruption_names
from vitruvius.shifts.base import Shift, read_record, shifts, shortened
from vitruvius.shifts.layouts import (
    arrays,
    corrupted_pictures,
    corruption_folder,
    listed,
    pictures,
    subfolders,
    unpacked,
)

C_BAR = (
    *("blue_noise_sample", "brownish_noise", "caustic_refraction", "checkerboard_cutout", "cocentric_sine_waves"),
    *("inverse_sparkles", "perlin_noise", "plasma_noise", "single_frequency_greyscale", "sparkles"),
)
V2 = {  # variant → how folders of it are called
    "matched-frequency": "*matched*frequency*",
    "threshold-0.7": "*threshold*",
    "top-images": "*top*images*",
}
INSIDE = "imagenet of the same classes"


@shifts.register("imagenet-c")
def imagenet_c(root: Path) -> Shift:
    """`<corruption>/<severity>/<wnid>/`, also inside noise, blur, weather, digital and extra.

    15 corruptions and 4 extra ones at 5 severities (Hendrycks & Dietterich 2019, arXiv:1903.12261).
    """
    folder = unpacked(root, "imagenet-c", "ImageNet-C")
    shift = corrupted_pictures(folder, "imagenet-c", IMAGENET_C, imagenet_labels())
    return replace(shift, cropped=True, benchmark=BENCHMARK)


@shifts.register("imagenet-c-bar")
def imagenet_c_bar(root: Path) -> Shift:
    """`<corruption>/<severity>/<wnid>/`, ten corruptions of its own.

    Mintun et al. 2021, arXiv:2102.11273.
    """
    folder = unpacked(root, "imagenet-c-bar", "imagenet_c_bar")
    shift = corrupted_pictures(folder, "imagenet-c-bar", C_BAR, imagenet_labels())
    return replace(shift, cropped=True, benchmark=C_BAR)


@shifts.register("folder-c")
def folder_c(root: Path) -> Shift:
    """`<corruption>/<severity>/<class>/` of any data; classes are numbered in natural order of their names.

    As `vitruvius corrupt` writes it.
    """
    others = [one for one in corruption_names("all") if one not in IMAGENET_C and corruption_folder(root, one)]
    corruptions = (*IMAGENET_C, *others)
    folders = [folder for one in corruptions if (folder := corruption_folder(root, one)) is not None]
    classes = {path.name for folder in folders for path in folder.glob("[1-5]/*") if path.is_dir()}
    if not classes:
        deep = sorted(str(path.relative_to(root)) for path in root.glob("*/*") if path.is_dir())
        raise DataError(
            f"{root} holds no folders <corruption>/<severity>/<class>, e.g. fog/3/cat; found "
            f"{shortened(deep) or listed(root)}. Name the folder that holds them, as `vitruvius corrupt` writes it."
        )
    ordered = sorted(classes, key=natural_key)
    labels = {one: number for number, one in enumerate(ordered)}
    shift = corrupted_pictures(root, "folder-c", corruptions, labels, classes=ordered)
    cropped = (read_record(root) or {}).get("size") is not None  # before it was corrupted, as the copy says itself
    return replace(shift, cropped=cropped, benchmark=BENCHMARK)


@shifts.register("imagenet-a")
def imagenet_a(root: Path) -> Shift:
    """`<wnid>/`, 7,500 pictures that fool ResNets; only the logits of its 200 classes count.

    Hendrycks et al. 2021, arXiv:1907.07174.
    """
    return _natural(unpacked(root, "imagenet-a"), "imagenet-a", subset="a")


@shifts.register("imagenet-r")
def imagenet_r(root: Path) -> Shift:
    """`<wnid>/`, 30,000 renditions (art, cartoons, toys …); only the logits of its 200 classes count.

    Hendrycks et al. 2021, arXiv:2006.16241.
    """
    return _natural(unpacked(root, "imagenet-r"), "imagenet-r", subset="r")


@shifts.register("imagenet-sketch")
def imagenet_sketch(root: Path) -> Shift:
    """`sketch/<wnid>/` or `<wnid>/`, 50,889 drawings of all 1,000 classes.

    Wang et al. 2019, arXiv:1905.13549.
    """
    return _natural(unpacked(root, "sketch", "imagenet-sketch", "images"), "imagenet-sketch")


@shifts.register("imagenet-o")
def imagenet_o(root: Path, *, validation: str | None = None) -> Shift:
    """`<wnid>/`, 2,000 pictures; `validation` is the folder `<wnid>/` of ImageNet that they are told from.

    Pictures of classes outside ImageNet, in folders of the 200 classes they are mistaken for; they are told from
    validation pictures of those classes (Hendrycks et al. 2021, arXiv:1907.07174). Without `validation` nothing is
    detected.
    """
    labels = imagenet_labels("o")
    outside = pictures(unpacked(root, "imagenet-o"), labels, name="imagenet-o", group="imagenet-o", outside=True)
    shift = Shift(name="imagenet-o", parts=(outside,), num_classes=NUM_CLASSES, columns=subset_columns("o"))
    if validation is None:
        absent = "validation pictures of its classes, without which nothing is detected: add validation=…"
        return replace(shift, missing=(absent,))
    folder = Path(validation).expanduser()
    if not folder.is_dir():
        raise DataError(f"imagenet-o: validation={validation} is not a folder; name the one with ImageNet's classes.")
    inside = pictures(folder, labels, name=INSIDE, group=INSIDE, ignored=imagenet_classes())
    return replace(shift, parts=(outside, inside))


@shifts.register("imagenet-v2")
def imagenet_v2(root: Path) -> Shift:
    """`imagenetv2-<variant>-format-val/<0 … 999>/`, three variants of 10,000 pictures, or the folder of one.

    Recht et al. 2019, arXiv:1902.10811. Class folders are numbers; sorted as text, 10 would come before 2 and every
    label would be wrong.
    """
    first_last = subfolders(root)[::-1]  # of several that fit a pattern the first counts
    variants = {name: root / one for name, pattern in V2.items() for one in first_last if fnmatch(one, pattern)}
    if not variants and (root / "0").is_dir():
        name = next((name for name, pattern in V2.items() if fnmatch(root.name, pattern)), "imagenet-v2")
        variants = {name: root}
    if not variants:
        raise DataError(
            f"{root} holds no variant of imagenet-v2; expected e.g. imagenetv2-matched-frequency-format-val/0, "
            f"found {listed(root)}. Name the folder that holds them, or one variant."
        )
    parts = []
    for name, folder in variants.items():
        labels = {str(number): number for number in range(NUM_CLASSES)}
        if not any((folder / one).is_dir() for one in labels):
            labels = imagenet_labels()  # some copies have renamed the folders
        parts.append(pictures(folder, labels, name=f"imagenet-v2/{name}", group=name))
    missing = tuple(name for name in V2 if name not in variants)
    return Shift(name="imagenet-v2", parts=tuple(parts), num_classes=NUM_CLASSES, missing=missing)


@shifts.register("cifar-10-c")
def cifar_10_c(root: Path) -> Shift:
    """`<corruption>.npy` with five times 10,000 images, and labels.npy.

    The corruptions of ImageNet-C for 32 × 32 images (Hendrycks & Dietterich 2019, arXiv:1903.12261).
    """
    return arrays(unpacked(root, "CIFAR-10-C"), "cifar-10-c", 10)


@shifts.register("cifar-100-c")
def cifar_100_c(root: Path) -> Shift:
    """`<corruption>.npy` with five times 10,000 images, and labels.npy."""
    return arrays(unpacked(root, "CIFAR-100-C"), "cifar-100-c", 100)


def _natural(folder: Path, name: str, subset: str = "") -> Shift:
    """One subset of all ImageNet classes, or of the 200 of ImageNet-A, -O or -R, whose logits alone count."""
    part = pictures(folder, imagenet_labels(subset), name=name, group=name)
    columns = subset_columns(subset) if subset else None
    return Shift(name=name, parts=(part,), num_classes=NUM_CLASSES, columns=columns)
