"""Corruptions, the average case: the 15 + 4 of ImageNet-C, for images of any size, (model, x, y) → x'."""

from vitruvius.corruptions.base import Corruption, corrupt, corruption_names, corruptions

__all__ = ["Corruption", "corrupt", "corruption_names", "corruptions"]
