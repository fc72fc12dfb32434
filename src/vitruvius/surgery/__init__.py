"""Surgery: finds, replaces and records the attention inside timm's models."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports
from vitruvius._registry import load_package

if TYPE_CHECKING:
    from vitruvius.surgery.folding import fold as fold
    from vitruvius.surgery.initialising import initialise as initialise
    from vitruvius.surgery.positions import use_sincos_positions as use_sincos_positions
    from vitruvius.surgery.recording import record as record
    from vitruvius.surgery.rewiring import attention_of as attention_of
    from vitruvius.surgery.rewiring import head_weights as head_weights
    from vitruvius.surgery.rewiring import restore as restore
    from vitruvius.surgery.rewiring import rewire as rewire
    from vitruvius.surgery.sites import survey as survey
else:
    __getattr__, __dir__, __all__ = exports(__name__)

load_package(__name__, __path__)
