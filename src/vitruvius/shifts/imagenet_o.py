"""ImageNet-O: pictures of classes outside ImageNet, for detection (Hendrycks et al. 2021, arXiv:1907.07174).

They lie in folders of the 200 classes they are mistaken for, and are told from validation pictures of those classes.
"""

from __future__ import annotations

from pathlib import Path

from vitruvius._errors import DataError
from vitruvius._imagenet import NUM_CLASSES, imagenet_labels, subset_columns
from vitruvius.shifts._base import Shift, Subset, shifts
from vitruvius.shifts._pictures import UNKNOWN, Pictures, known_classes, pictures_subset, unpacked

INSIDE = "imagenet of the same classes"


@shifts.register("imagenet-o")
def imagenet_o(root: Path, *, validation: str | None = None) -> Shift:
    """`<wnid>/`, 2,000 pictures; `validation` is the folder `<wnid>/` of ImageNet that they are told from.

    `root` is the folder above the classes. Without `validation` (the default) nothing is detected.
    """
    name, labels = "imagenet-o", imagenet_labels("o")
    parts = [pictures_subset(unpacked(root, ("imagenet-o",)), labels, name=name, outside=True)]
    missing: tuple[str, ...] = ()
    if validation is None:
        missing = ("validation pictures of its classes, without which nothing is detected: add validation=…",)
    else:
        folder = Path(validation).expanduser()
        if not folder.is_dir():
            raise DataError(
                f"imagenet-o: validation={validation} is not a folder; name the one with ImageNet's classes."
            )
        known_classes(folder, labels, name=INSIDE)
        parts.append(Subset(name=INSIDE, group=INSIDE, open=lambda: _Inside(folder)))
    return Shift(name=name, parts=tuple(parts), num_classes=NUM_CLASSES, columns=subset_columns("o"), missing=missing)


class _Inside(Pictures):
    """Validation pictures of the 200 classes; the other 800 may lie beside them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, imagenet_labels("o"), name=INSIDE)
        every = imagenet_labels()
        if {path.name for path in folder.iterdir() if path.is_dir()} <= set(every):
            self.remarks = [one for one in self.remarks if one.what != UNKNOWN]
