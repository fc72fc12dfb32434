"""Old checkpoints to ours, and ours to plain timm: one file per layout, strictly, without running pickled code."""

from vitruvius._registry import load_room
from vitruvius.converters._checkpoint import Checkpoint, read_checkpoint
from vitruvius.converters._converted import Converted, convert, converters
from vitruvius.converters.exporting import save_for_hub, to_timm
from vitruvius.converters.writing import write_run

__all__ = [
    "Checkpoint",
    "Converted",
    "convert",
    "converters",
    "read_checkpoint",
    "save_for_hub",
    "to_timm",
    "write_run",
]

load_room(__name__, __path__)
