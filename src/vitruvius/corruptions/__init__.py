"""Corruptions, the average case: the 15 + 4 of ImageNet-C, for images of any size, (model, x, y) → x'."""

from vitruvius.corruptions.base import IMAGENET_C, Corruption, corrupt, corruption_grid, corruption_names, corruptions

__all__ = ["IMAGENET_C", "Corruption", "corrupt", "corruption_grid", "corruption_names", "corruptions"]
