"""Old checkpoints and settings to ours, ours to plain timm: one file per layout, strictly, no pickled code is run."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.converters.base import convert as convert
    from vitruvius.converters.base import converters as converters
    from vitruvius.converters.exporting import to_timm as to_timm
else:
    __getattr__, __dir__, __all__ = exports(__name__)
