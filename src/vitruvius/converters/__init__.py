"""Old checkpoints and settings to ours, ours to plain timm: one file per layout, strictly, no pickled code is run."""

from vitruvius.converters._checkpoint import Checkpoint, read_checkpoint
from vitruvius.converters._converted import MASKS, SETTINGS, Converted, convert, converters
from vitruvius.converters.arguments import Recipe, read_arguments, write_recipe
from vitruvius.converters.exporting import save_for_hub, to_timm
from vitruvius.converters.writing import write_run

__all__ = [
    "MASKS",
    "SETTINGS",
    "Checkpoint",
    "Converted",
    "Recipe",
    "convert",
    "converters",
    "read_arguments",
    "read_checkpoint",
    "save_for_hub",
    "to_timm",
    "write_recipe",
    "write_run",
]
