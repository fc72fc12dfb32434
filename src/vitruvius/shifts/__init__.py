"""Distribution shift: one reader per published data set, each for its published layout."""

from vitruvius._imagenet import imagenet_classes
from vitruvius.shifts._arrays import ArrayImages
from vitruvius.shifts._base import Images, Shift, Subset, open_shift, shifts
from vitruvius.shifts._pictures import Pictures
from vitruvius.shifts._remarks import Remark, say_once

__all__ = [
    "ArrayImages",
    "Images",
    "Pictures",
    "Remark",
    "Shift",
    "Subset",
    "imagenet_classes",
    "open_shift",
    "say_once",
    "shifts",
]
