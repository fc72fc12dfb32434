"""Compress: average attention maps, masks made from them, and inference that uses them."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.compression.cost import account as account
    from vitruvius.compression.export import export as export
    from vitruvius.compression.files import load_maps as load_maps
    from vitruvius.compression.files import load_masks as load_masks
    from vitruvius.compression.files import save_maps as save_maps
    from vitruvius.compression.files import save_masks as save_masks
    from vitruvius.compression.gradual import GradualMask as GradualMask
    from vitruvius.compression.maps import average_maps as average_maps
    from vitruvius.compression.masks import make_masks as make_masks
    from vitruvius.compression.sparse import use_sparse as use_sparse
else:
    __getattr__, __dir__, __all__ = exports(__name__)
