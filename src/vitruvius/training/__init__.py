"""Training: a recipe becomes a run folder."""

from vitruvius._errors import Diverged, Overfitted, Preempted
from vitruvius._files import fetch
from vitruvius.training._loop import Callback
from vitruvius.training._run.folder import Run, kept_weights, versions
from vitruvius.training._train import train
from vitruvius.training.config import Config, Recipe, TrainConfig, as_config, read_recipe

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
    "read_recipe",
    "train",
    "versions",
]
