"""Surgery: finds, replaces and records the attention inside timm's models."""

from vitruvius._registry import load_package
from vitruvius.surgery._sites import Where, abridge, select
from vitruvius.surgery._socket import (
    Socket,
    fused_head_weights,
    inner,
    merge_heads,
    separate_head_weights,
    sockets,
    split_heads,
)
from vitruvius.surgery.recording import record
from vitruvius.surgery.rewiring import head_weights, restore, rewire, survey

__all__ = [
    "Socket",
    "Where",
    "abridge",
    "fused_head_weights",
    "head_weights",
    "inner",
    "merge_heads",
    "record",
    "restore",
    "rewire",
    "select",
    "separate_head_weights",
    "sockets",
    "split_heads",
    "survey",
]

load_package(__name__, __path__)
