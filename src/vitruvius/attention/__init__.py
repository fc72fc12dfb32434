"""What attends: one file per variant, pure tensor algebra."""

from vitruvius._registry import load_room
from vitruvius.attention._core import Core, Kernel, Part, Stage, attentions, build_core, part

__all__ = ["Core", "Kernel", "Part", "Stage", "attentions", "build_core", "part"]

load_room(__name__, __path__)
