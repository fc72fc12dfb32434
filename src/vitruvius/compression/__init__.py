"""Compress: average attention maps, masks made from them, and inference that uses them."""

from vitruvius.compression.maps import average_maps, save_maps
from vitruvius.compression.sites import guess_sites

__all__ = ["average_maps", "guess_sites", "save_maps"]
