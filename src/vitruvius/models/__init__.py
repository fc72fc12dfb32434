"""Models: timm's, and small ones of our own, that take pixels in [0, 1]."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.models.base import PixelModel as PixelModel
    from vitruvius.models.base import models as models
    from vitruvius.models.base import restride as restride
    from vitruvius.models.create import create_model as create_model
    from vitruvius.models.create import load_model as load_model
    from vitruvius.models.freezing import freeze as freeze
    from vitruvius.models.weights import load_weights as load_weights
else:
    __getattr__, __dir__, __all__ = exports(__name__)
