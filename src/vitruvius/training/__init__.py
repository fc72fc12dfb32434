"""Training: a recipe becomes a run folder."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius._files import fetch as fetch
    from vitruvius.training.config import Config as Config
    from vitruvius.training.config import TrainConfig as TrainConfig
    from vitruvius.training.config import read_recipe as read_recipe
    from vitruvius.training.loop import train as train
    from vitruvius.training.sweep import Sweep as Sweep
else:
    __getattr__, __dir__, __all__ = exports(__name__)
