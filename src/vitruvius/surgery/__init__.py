"""Where attention sits in timm's models: the one door to their insides."""

from vitruvius._registry import load_room
from vitruvius.surgery._sites import Where, abridge, select
from vitruvius.surgery._socket import Socket, inner, sockets
from vitruvius.surgery.recording import record
from vitruvius.surgery.rewiring import head_weights, restore, rewire, survey

__all__ = [
    "Socket",
    "Where",
    "abridge",
    "head_weights",
    "inner",
    "record",
    "restore",
    "rewire",
    "select",
    "sockets",
    "survey",
]

load_room(__name__, __path__)
