"""What a command works on: the one place that opens whatever names a model, with the data that goes with it."""

from vitruvius.targets._base import (
    Target,
    TargetConfig,
    TargetKind,
    check_head,
    check_numbering,
    folder_for,
    local_run,
    open_target,
    target_kinds,
)
from vitruvius.targets.published import load_model
from vitruvius.targets.zoo import find_checkpoint, hash_file, read_card

__all__ = [
    "Target",
    "TargetConfig",
    "TargetKind",
    "check_head",
    "check_numbering",
    "find_checkpoint",
    "folder_for",
    "hash_file",
    "load_model",
    "local_run",
    "open_target",
    "read_card",
    "target_kinds",
]
