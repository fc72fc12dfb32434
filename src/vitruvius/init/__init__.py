"""Initialisation: one file per init, on the layers' head weights; base inits for everything else."""

from vitruvius.init._base import Base, BaseSpec, Init, InitSpec, Layer, bases, inits

__all__ = ["Base", "BaseSpec", "Init", "InitSpec", "Layer", "bases", "inits"]
