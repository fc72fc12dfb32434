"""State files: written whole, with a checksum, and the one before is kept; a damaged one is passed over.

The checksum (sha256 of everything before it) is the comment of the zip file that torch.save makes, so that torch.load
reads the file as it is.
"""

from __future__ import annotations

import hashlib
import io
import logging
from pathlib import Path
from typing import Any

import torch

from vitruvius._errors import CheckpointError
from vitruvius._files import PREVIOUS, STATE, atomic_write_bytes

logger = logging.getLogger(__name__)

CALM = "state.calm.pt"
_DIGITS = 64  # of sha256, in hexadecimal
_LENGTH = _DIGITS.to_bytes(2, "little")  # ends the zip file's last record: how long the comment is


def add_checksum(state: dict[str, Any]) -> bytes:
    """A state as torch.save writes it, with a checksum at its end."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    assert data[-2:] == b"\0\0", "torch.save ends its file with a comment of its own"
    body = data[:-2] + _LENGTH
    return body + hashlib.sha256(body).hexdigest().encode()


def verify_checksum(data: bytes) -> dict[str, Any]:
    """The state in such a file; ValueError says what is wrong with it."""
    body = data[:-_DIGITS]
    if body[-2:] != _LENGTH:
        raise ValueError(f"its {len(data)} bytes do not end with a checksum")
    if hashlib.sha256(body).hexdigest().encode() != data[-_DIGITS:]:
        raise ValueError("it does not match its checksum")
    state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state


def save(folder: Path, state: dict[str, Any]) -> None:
    """A new state.pt; what was state.pt becomes state.previous.pt. Killed anywhere, one of them is whole."""
    fresh = folder / ".state.pt.new.tmp"  # swept when a run goes on
    atomic_write_bytes(fresh, add_checksum(state))
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
            state = verify_checksum(file.read_bytes())
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
