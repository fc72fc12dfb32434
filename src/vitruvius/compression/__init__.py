"""Compress: average attention maps, masks made from them, and inference that uses them."""

from vitruvius.compression.maps import average_maps, save_maps

__all__ = ["average_maps", "save_maps"]
