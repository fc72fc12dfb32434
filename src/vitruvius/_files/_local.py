"""Local files that are whole or absent: written beside their place, synced, then moved."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_BINARY = getattr(os, "O_BINARY", 0)  # Windows would translate line ends


def replace(path: Path, data: bytes, workshop: Path | None = None) -> None:
    """Write `data` in the workshop, by default the file's own folder, then move it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    if workshop is not None:
        workshop.mkdir(parents=True, exist_ok=True)
        beside = workshop / beside.name
    try:
        write_synced(beside, data)
        os.replace(beside, path)  # noqa: PTH105 (tests replace os.replace)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _BINARY, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def append(path: Path, line: bytes, sync: bool) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _BINARY, 0o666)
    try:
        before = os.fstat(handle).st_size
        try:
            if os.write(handle, line) != len(line):
                raise OSError(errno.ENOSPC, "only a part of the line was written")
            if sync:
                os.fsync(handle)
        except OSError:
            os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make the move itself durable; Windows cannot open folders and does not need it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
