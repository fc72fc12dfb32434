"""Targets: whatever names a model on the command line, and the functions that open it."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.targets.base import Target as Target
    from vitruvius.targets.base import load_model as load_model
    from vitruvius.targets.base import open_target as open_target
    from vitruvius.targets.base import target_kinds as target_kinds
else:
    __getattr__, __dir__, __all__ = exports(__name__)
