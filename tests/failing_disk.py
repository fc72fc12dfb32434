"""A disk that stops taking files, after so many."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from vitruvius._files import _local


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, after: int, number: int = errno.ENOSPC) -> None:
    """Let so many files be written, then no more."""
    write, written = _local.write_synced, 0

    def failing(path: Path, data: bytes) -> None:
        nonlocal written
        written += 1
        if written > after:
            raise OSError(number, "simulated")
        write(path, data)

    monkeypatch.setattr(_local, "write_synced", failing)
