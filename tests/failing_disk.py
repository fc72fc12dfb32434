"""Disks that fail: simulated, after so many files; and truly, by the kernel, for files above a size."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitruvius._files import paths


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, after: int, number: int = errno.ENOSPC) -> None:
    """Let so many files be written, then no more."""
    write, written = paths.write_synced, 0

    def failing(path: Path, data: bytes) -> None:
        nonlocal written
        written += 1
        if written > after:
            raise OSError(number, "simulated")
        write(path, data)

    monkeypatch.setattr(paths, "write_synced", failing)


@contextlib.contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """A real fault: the kernel takes no byte of any file beyond `size` (EFBIG), also from libraries outside Python."""
    resource = pytest.importorskip("resource", reason="this system has no limit on the size of files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
