"""The keys of a recipe, section by section, with type, default and what each does; read from what defines them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vitruvius._keys import Key, keys_of, settings_of
from vitruvius._registry import Registry, first_line
from vitruvius.data import DataConfig, Mix
from vitruvius.models import AttentionRule, ModelConfig
from vitruvius.tasks import schedules, tasks
from vitruvius.tracking import trackers
from vitruvius.training import Config, TrainConfig
from vitruvius.training.config import Keep
from vitruvius.training.loop import open_gradual
from vitruvius.training.slurm import launch
from vitruvius.training.sweep import EvaluationPlan, MapsPlan, MaskPlan, SweepConfig

Sections = dict[str, tuple[str, list[Key]]]  # name → one line about it, and its keys

CLASSES = {
    "recipe": Config,
    "model": ModelConfig,
    "attention": AttentionRule,
    "data": DataConfig,
    "data.mix": Mix,
    "train": TrainConfig,
    "train.keep": Keep,
    "sweep": SweepConfig,
    "sweep.evaluate": EvaluationPlan,
    "sweep.maps": MapsPlan,
    "sweep.masks": MaskPlan,
}
FUNCTIONS: dict[str, Callable[..., object]] = {"gradual": open_gradual, "slurm": launch}


def sections() -> Sections:
    """Every section: those with fixed keys, and one for each piece that a recipe may name."""
    found: Sections = {name: (first_line(section), keys_of(section)) for name, section in CLASSES.items()}
    found |= {name: (first_line(function), settings_of(function)) for name, function in FUNCTIONS.items()}
    found |= _pieces("task", tasks)
    found |= _pieces("task.schedule", schedules)
    found |= _pieces("tracking", trackers)
    return found


def find_key(name: str, among: Iterable[str] = ("train", "data", "model", "recipe")) -> str | None:
    """How a key is written on the command line: `epochs` → `train.epochs`; None if no section has it.

    `name` is the key alone; `among` are the sections looked at, in order.
    """
    wanted = name.replace("-", "_")
    for section in among:
        if any(key.name == wanted for key in keys_of(CLASSES[section])):
            return wanted if section == "recipe" else f"{section}.{wanted}"
    return None


def _pieces(section: str, registry: Registry[Any]) -> Sections:
    return {f"{section} {name}": (first_line(registry[name]), settings_of(registry[name])) for name in registry}
