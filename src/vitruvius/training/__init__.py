"""Train: a recipe becomes a run folder."""

from vitruvius._errors import Diverged
from vitruvius.training._run import Run
from vitruvius.training._train import Callback, train
from vitruvius.training.config import Config, TrainConfig, read_recipe

__all__ = ["Callback", "Config", "Diverged", "Run", "TrainConfig", "read_recipe", "train"]
