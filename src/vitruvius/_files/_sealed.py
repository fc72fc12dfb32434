"""Sealed state files: what torch.save writes, with a checksum at its end.

The checksum (sha256 of everything before it) is the comment of the zip file that torch.save makes, so that
torch.load reads the file as it is.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any, NamedTuple

import torch

STATE = "state.pt"
PREVIOUS = "state.previous.pt"
_DIGITS = 64  # of sha256, in hexadecimal
_LENGTH = _DIGITS.to_bytes(2, "little")  # ends the zip file's last record: how long the comment is


class Progress(NamedTuple):
    """How far the run in a folder has come."""

    updates: int
    checksum: str


def seal(state: dict[str, Any]) -> bytes:
    """A state as torch.save writes it, sealed."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    assert data[-2:] == b"\0\0", "torch.save ends its file with a comment of its own"
    body = data[:-2] + _LENGTH
    return body + hashlib.sha256(body).hexdigest().encode()


def unseal(data: bytes) -> dict[str, Any]:
    """The state in a sealed file; ValueError says what is wrong with it."""
    body = data[:-_DIGITS]
    if body[-2:] != _LENGTH:
        raise ValueError(f"its {len(data)} bytes do not end with a checksum")
    if hashlib.sha256(body).hexdigest().encode() != data[-_DIGITS:]:
        raise ValueError("it does not match its checksum")
    state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state


def progress_of(*folders: Path) -> Progress | None:
    """How far a run has come by its newest whole state, each file looked for in these folders in turn; None: no state.

    folders: where a file is looked for, the first that has it counts.
    """
    for name in (STATE, PREVIOUS):
        file = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if file is None:
            continue
        data = file.read_bytes()
        try:
            return Progress(int(unseal(data)["updates"]), data[-_DIGITS:].decode())
        except Exception:  # whatever a broken file makes of the reader: then the state before it counts
            continue
    return None
