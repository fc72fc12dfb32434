"""Training: a recipe becomes a run folder."""

from vitruvius._errors import Diverged, Overfitted, Preempted
from vitruvius._files import fetch
from vitruvius.training._run.folder import Run, kept_weights, versions
from vitruvius.training.callbacks import Callback
from vitruvius.training.config import Config, Recipe, TrainConfig, as_config, read_recipe
from vitruvius.training.loop import open_gradual, train

__all__ = [
    "Callback",
    "Config",
    "Diverged",
    "Overfitted",
    "Preempted",
    "Recipe",
    "Run",
    "TrainConfig",
    "as_config",
    "fetch",
    "kept_weights",
    "open_gradual",
    "read_recipe",
    "train",
    "versions",
]
