"""State files: written whole, with a checksum, and the one before is kept; a damaged one is passed over."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vitruvius._errors import CheckpointError
from vitruvius._files import PREVIOUS, STATE, atomic_write_bytes
from vitruvius._files import seal as to_bytes
from vitruvius._files import unseal as from_bytes

logger = logging.getLogger(__name__)

CALM = "state.calm.pt"

__all__ = ["CALM", "PREVIOUS", "STATE", "exists", "from_bytes", "load", "save", "to_bytes"]


def save(folder: Path, state: dict[str, Any]) -> None:
    """A new state.pt; what was state.pt becomes state.previous.pt. Killed anywhere, one of them is whole."""
    fresh = folder / ".state.pt.new.tmp"  # swept when a run goes on
    atomic_write_bytes(fresh, to_bytes(state))
    if (folder / STATE).exists():
        (folder / STATE).replace(folder / PREVIOUS)
    fresh.replace(folder / STATE)


def load(folder: Path) -> dict[str, Any] | None:
    """The newest whole state, or None where there is none at all; both damaged is an error."""
    damaged: list[str] = []
    for file in (folder / STATE, folder / PREVIOUS):
        if not file.exists():
            continue
        try:
            state = from_bytes(file.read_bytes())
        except Exception as error:  # whatever a broken file makes of the reader
            damaged.append(f"{file.name} is damaged: {(str(error) or type(error).__name__).splitlines()[0]}")
            continue
        if damaged:
            logger.warning("%s; going on from %s.", damaged[0], file.name)
            (folder / STATE).unlink()  # or the next save would put it in the place of the good one
        return state
    if damaged:
        raise CheckpointError(f"{folder}: {'; '.join(damaged)}. Delete {folder} to begin this run anew.")
    return None


def exists(folder: Path) -> bool:
    """Whether a run has been saved."""
    return (folder / STATE).exists() or (folder / PREVIOUS).exists()
