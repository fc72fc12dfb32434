"""Old checkpoints and settings to ours, ours to plain timm: one file per layout, strictly, no pickled code is run."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.converters._checkpoint import read_checkpoint as read_checkpoint
    from vitruvius.converters._converted import MASKS as MASKS
    from vitruvius.converters._converted import SETTINGS as SETTINGS
    from vitruvius.converters._converted import convert as convert
    from vitruvius.converters._converted import converters as converters
    from vitruvius.converters.arguments import read_arguments as read_arguments
    from vitruvius.converters.arguments import write_recipe as write_recipe
    from vitruvius.converters.exporting import save_for_hub as save_for_hub
    from vitruvius.converters.exporting import to_timm as to_timm
    from vitruvius.converters.writing import write_run as write_run
else:
    __getattr__, __dir__, __all__ = exports(
        __name__,
        {
            "MASKS": "_converted",
            "SETTINGS": "_converted",
            "convert": "_converted",
            "converters": "_converted",
            "read_arguments": "arguments",
            "read_checkpoint": "_checkpoint",
            "save_for_hub": "exporting",
            "to_timm": "exporting",
            "write_recipe": "arguments",
            "write_run": "writing",
        },
    )
