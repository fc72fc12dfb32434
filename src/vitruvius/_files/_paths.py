"""Read and write by path, local or an fsspec URL; every failure is one RunError."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitruvius._errors import RunError, VitruviusError
from vitruvius._files import _local
from vitruvius._files._store import is_lock, make_folder, open_url, persist, reason_of
from vitruvius._secrets import redact_text

StrPath = str | Path
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def is_url(path: StrPath) -> bool:
    """True for `scheme://…`; such paths must stay strings, a `Path` would merge their slashes."""
    return isinstance(path, str) and "://" in path


def join(folder: StrPath, *names: str) -> StrPath:
    """`folder/name/…`, a Path for local folders and a string for URLs."""
    return "/".join([str(folder).rstrip("/"), *names]) if is_url(folder) else Path(folder).joinpath(*names)


def exists(path: StrPath) -> bool:
    """Whether a file or folder is there; a store that cannot be asked is a RunError."""
    if not is_url(path):
        return Path(path).exists()
    with explained(path, "read"):
        filesystem, inner = open_url(str(path))
        return bool(persist(lambda: filesystem.exists(inner)))


def read_bytes(path: StrPath) -> bytes:
    """The whole file, or a RunError."""
    with explained(path, "read"):
        if not is_url(path):
            return Path(path).read_bytes()
        filesystem, inner = open_url(str(path))
        data: bytes = persist(lambda: filesystem.cat_file(inner))
        return data


def read_text(path: StrPath) -> str:
    """The whole file as UTF-8, or a RunError."""
    return read_bytes(path).decode("utf-8")


def read_json(path: StrPath) -> dict[str, Any]:
    """The JSON object in a file, or a RunError that calls it damaged."""
    try:
        found = json.loads(read_text(path))
    except ValueError as error:
        raise RunError(
            f"{path} is damaged, it is not JSON: {error}. Delete it, or use a copy that is whole."
        ) from error
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged: it holds {type(found).__name__}, expected a JSON object.")
    return found


def atomic_write_bytes(path: StrPath, data: bytes, *, workshop: Path | None = None) -> None:
    """Replace `path` by `data` in one step; on any failure the previous file stays and nothing else is left.

    path: the file. data: its bytes. workshop: a folder on the same disk where it is written before it is moved, so that
    a kill leaves nothing beside it; default: its own folder.
    """
    with explained(path, "write"):
        if is_url(path):
            filesystem, inner = open_url(str(path))
            persist(lambda: filesystem.pipe_file(inner, data))
        else:
            _local.replace(Path(path), data, workshop)


def atomic_write_text(path: StrPath, text: str) -> None:
    """`atomic_write_bytes` of UTF-8 text, with secrets hidden (`vitruvius._secrets`)."""
    atomic_write_bytes(path, redact_text(text).encode("utf-8"))


def append_line(path: StrPath, text: str, *, sync: bool = False) -> None:
    """Add one line in one write, with secrets hidden; a line that does not fit on the disk is taken back."""
    line = (redact_text(text).rstrip("\n") + "\n").encode("utf-8")
    with explained(path, "append to"):
        if is_url(path):  # object stores cannot append: the whole object is put again
            filesystem, inner = open_url(str(path))
            before = persist(lambda: filesystem.cat_file(inner) if filesystem.exists(inner) else b"")
            persist(lambda: filesystem.pipe_file(inner, before + line))
        else:
            _local.append(Path(path), line, sync)


def check_new_file(path: StrPath, example: str) -> None:
    """Refuse a path at which no file can be made, before anything is computed for it.

    path: where the file shall be. example: a name for it, told to whoever named a folder.
    """
    if is_url(path):
        return
    if "\0" in str(path):
        raise RunError(f"cannot write {str(path)!r}: a path cannot hold a null byte.")
    with explained(path, "write"):
        if str(path).endswith(("/", os.sep)) or Path(path).is_dir():
            raise RunError(f"{path} is a folder; name the file, e.g. {Path(path) / example}.")
        above = _nearest_that_exists(Path(path))
        if not above.is_dir():
            raise RunError(f"cannot write {path}: {above} is a file, not a folder. Choose another folder.")


def _nearest_that_exists(path: Path) -> Path:
    """The first of the folders above a path that is there."""
    return next(folder for folder in path.absolute().parents if folder.exists())


def ensure_writable(folder: StrPath) -> StrPath:
    """Make the folder if need be and prove that a file can be written there, else RunError."""
    if is_url(folder):
        with explained(folder, "write to"):
            filesystem, inner = open_url(str(folder))
            persist(lambda: make_folder(filesystem, inner))
        return folder
    with explained(folder, "write to"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        probe = Path(folder) / f".writable.{os.getpid()}.tmp"
        try:
            _local.write_synced(probe, b"vitruvius")
        finally:
            probe.unlink(missing_ok=True)
    return Path(folder)


made_for_locks: set[Path] = set()  # folders that were made to be locked: they go with the lock if they stay empty


class MadeFolder:
    """A folder that is about to be made: with it, what has to go if nothing comes of it."""

    def __init__(self, folder: StrPath) -> None:
        self.folder = Path(folder)
        self.missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        if not self.missing and self.folder.resolve() in made_for_locks:
            self.missing = [self.folder]

    def take_back(self, *files: str) -> None:
        """Remove these files and the folder, if it was not there before and holds nothing else; its parents too.

        While the folder is locked it stays, and goes with the lock.
        """
        if not self.missing or not self.folder.is_dir():
            return
        if any(path.name not in files and not is_lock(path) for path in self.folder.iterdir()):
            return
        with contextlib.suppress(OSError):  # somebody has put a file there
            for file in files:
                (self.folder / file).unlink(missing_ok=True)
            for folder in self.missing:
                folder.rmdir()


def sweep(folder: StrPath) -> list[str]:
    """Remove temporary files that a killed process left in a folder; their names."""
    if is_url(folder):
        return []
    left = sorted(Path(folder).glob(".*.tmp"))
    for path in left:
        path.unlink(missing_ok=True)
    return [path.name for path in left]


@contextlib.contextmanager
def explained(path: StrPath, verb: str) -> Iterator[None]:
    """Any OSError inside, and at a URL any error of its store, as one RunError that says what to do."""
    try:
        yield
    except VitruviusError:
        raise
    except Exception as error:
        if is_url(path):
            raise RunError(redact_text(f"cannot {verb} {path}: {reason_of(error)}")) from error
        if isinstance(error, OSError):
            raise RunError(redact_text(f"cannot {verb} {path}: {_reason(error)}")) from error
        raise


def _reason(error: OSError) -> str:
    if error.errno in _FULL:
        return "the disk is full. What was there before is intact; free some space or choose another folder."
    if error.errno in _FORBIDDEN:
        return "no permission. Choose another folder or change its rights."
    if error.errno == errno.ENAMETOOLONG:
        return "the name is too long for the disk. Choose a shorter one."
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "a part of this path is a file, not a folder. Choose another folder."
    if error.errno == errno.ENOENT or isinstance(error, FileNotFoundError):
        return "there is no such file."
    return f"{error.strerror or error}."
