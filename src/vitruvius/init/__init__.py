"""Initialisation: one file per init, on the layers' head weights; base inits for everything else."""

from vitruvius._registry import load_room
from vitruvius.init._base import Base, BaseSpec, Init, InitSpec, Layer, bases, inits

__all__ = ["Base", "BaseSpec", "Init", "InitSpec", "Layer", "bases", "inits"]

load_room(__name__, __path__)
