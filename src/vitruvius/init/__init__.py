"""Initialisation: inits for attention, on the layers' head weights, and base inits for a whole model."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.init.base import Layer as Layer
    from vitruvius.init.base import bases as bases
    from vitruvius.init.base import inits as inits
    from vitruvius.init.filters import impulse_filters as impulse_filters
    from vitruvius.init.impulse import impulse as impulse
    from vitruvius.init.impulse_optimised import impulse_optimised as impulse_optimised
    from vitruvius.init.mimetic import mimetic as mimetic
else:
    __getattr__, __dir__, __all__ = exports(__name__)
