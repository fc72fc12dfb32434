"""Corrupted copies of data, written once in the published layouts: ImageNet-C's folders, CIFAR-10-C's arrays.

On the fly, `vitruvius evaluate --threat fog:severity=3` needs none of this.
"""

from vitruvius.corrupted_copies.arrays import copy_arrays
from vitruvius.corrupted_copies.command import CopyOptions, copy_data
from vitruvius.corrupted_copies.folders import copy_folder

__all__ = ["CopyOptions", "copy_arrays", "copy_data", "copy_folder"]
