"""Distribution shift: readers of published sets, `open_shift("imagenet-c:/data/imagenet-c")`."""

from vitruvius.shifts.base import Shift, Subset, open_shift, shifts
from vitruvius.shifts.layouts import ArrayImages, Pictures

__all__ = ["ArrayImages", "Pictures", "Shift", "Subset", "open_shift", "shifts"]
