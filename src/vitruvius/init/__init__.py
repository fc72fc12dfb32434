"""Initialisation: inits for attention, on the layers' head weights, and base inits for a whole model."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.init.base import Layer as Layer
    from vitruvius.init.base import bases as bases
    from vitruvius.init.base import inits as inits
    from vitruvius.init.base_inits import jax as jax
    from vitruvius.init.base_inits import moco as moco
    from vitruvius.init.base_inits import orthogonal as orthogonal
    from vitruvius.init.base_inits import skip as skip
    from vitruvius.init.base_inits import timm as timm
    from vitruvius.init.base_inits import trunc_normal as trunc_normal
    from vitruvius.init.filters import impulse_filters as impulse_filters
    from vitruvius.init.impulse import impulse as impulse
    from vitruvius.init.impulse_optimised import impulse_optimised as impulse_optimised
    from vitruvius.init.mimetic import mimetic as mimetic
else:
    __getattr__, __dir__, __all__ = exports(
        __name__,
        {
            "bases": "base",
            "impulse": "impulse",
            "impulse_filters": "filters",
            "impulse_optimised": "impulse_optimised",
            "inits": "base",
            "jax": "base_inits",
            "mimetic": "mimetic",
            "moco": "base_inits",
            "orthogonal": "base_inits",
            "skip": "base_inits",
            "timm": "base_inits",
            "trunc_normal": "base_inits",
            "Layer": "base",
        },
    )
