"""Strength, use and beauty for vision transformers.

Six words: *Heads* is everything that one softmax receives; a *stage* is a module Heads → Heads, a *kernel*
Heads → Tensor; some stages and one kernel are a *core*; a *socket* is timm's attention calling a core;
a *site* is one socket in one model.
"""

from typing import TYPE_CHECKING, Any

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius._version import __version__ as __version__
    from vitruvius.analysis import analyse as analyse
    from vitruvius.compression import average_maps as average_maps
    from vitruvius.evaluation import evaluate as evaluate
    from vitruvius.look import look as look
    from vitruvius.models import create_model as create_model
    from vitruvius.surgery import record as record
    from vitruvius.surgery import restore as restore
    from vitruvius.surgery import rewire as rewire
    from vitruvius.surgery import survey as survey
    from vitruvius.surgery.initialising import initialise as initialise
    from vitruvius.targets import load_model as load_model
    from vitruvius.training import train as train
else:
    _get, __dir__, __all__ = exports(__name__)

    def __getattr__(name: str) -> Any:
        american = {"analyze": "analyse", "initialize": "initialise"}
        return _get(american.get(name, name))
