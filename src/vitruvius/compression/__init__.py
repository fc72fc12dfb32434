"""Compress: average attention maps, masks made from them, and inference that uses them."""

from vitruvius.compression._site_files import guess_sites
from vitruvius.compression.maps import average_maps, save_maps

__all__ = ["average_maps", "guess_sites", "save_maps"]
