"""Compress: average attention maps, from which masks are made."""

from vitruvius.compression.maps import average_maps, save_maps

__all__ = ["average_maps", "save_maps"]
