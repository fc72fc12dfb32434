"""Models: timm's, and small ones of our own, that take pixels in [0, 1]."""

from vitruvius.models._adapting import restride
from vitruvius.models._create import create_from_config, create_model, load_model, restore
from vitruvius.models._freezing import freeze
from vitruvius.models._pixel import PixelModel
from vitruvius.models._registry import models
from vitruvius.models._weights import check_fit, load_weights
from vitruvius.models._wiring import Parts, wire
from vitruvius.models.config import AttentionRule, ModelConfig

__all__ = [
    "AttentionRule",
    "ModelConfig",
    "Parts",
    "PixelModel",
    "check_fit",
    "create_from_config",
    "create_model",
    "freeze",
    "load_model",
    "load_weights",
    "models",
    "restore",
    "restride",
    "wire",
]
