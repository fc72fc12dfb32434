"""The room of sections: one file each; a file dropped in here is on the page."""

from vitruvius._registry import load_room

load_room(__name__, __path__)
