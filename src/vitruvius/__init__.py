"""Strength, use and beauty for vision transformers.

Six words: *Heads* is everything that one softmax receives; a *stage* is a module Heads → Heads, a *kernel*
Heads → Tensor; some stages and one kernel are a *core*; a *socket* is timm's attention calling a core;
a *site* is one socket in one model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitruvius._version import __version__

if TYPE_CHECKING:
    from vitruvius.analysis import analyse
    from vitruvius.compression import average_maps
    from vitruvius.evaluation import evaluate
    from vitruvius.models import create_model
    from vitruvius.surgery import record, restore, rewire, survey
    from vitruvius.surgery.initialising import initialise
    from vitruvius.targets import load_model
    from vitruvius.training import train

_HOMES = {
    "analyse": "vitruvius.analysis",
    "average_maps": "vitruvius.compression",
    "create_model": "vitruvius.models",
    "evaluate": "vitruvius.evaluation",
    "initialise": "vitruvius.surgery.initialising",
    "load_model": "vitruvius.targets",
    "record": "vitruvius.surgery",
    "restore": "vitruvius.surgery",
    "rewire": "vitruvius.surgery",
    "survey": "vitruvius.surgery",
    "train": "vitruvius.training",
}

_ALIASES = {"analyze": "analyse", "initialize": "initialise"}  # American spellings

__all__ = [
    "__version__",
    "analyse",
    "average_maps",
    "create_model",
    "evaluate",
    "initialise",
    "load_model",
    "record",
    "restore",
    "rewire",
    "survey",
    "train",
]


def __getattr__(name: str) -> Any:
    """Rooms open when they are first used, so `import vitruvius` is quick."""
    name = _ALIASES.get(name, name)
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vitruvius' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
