"""Where images come from: one file per data source, registered by name; a plugin adds its own with `data_source`."""

from vitruvius._registry import load_room

load_room(__name__, __path__)
