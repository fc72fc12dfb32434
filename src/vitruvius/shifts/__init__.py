"""Distribution shift: readers of published sets, `open_shift("imagenet-c:/data/imagenet-c")`."""

from vitruvius.shifts.base import Shift, open_shift, shifts

__all__ = ["Shift", "open_shift", "shifts"]
