"""One owner per folder: a lock file with process, host and a heartbeat; what a dead process left is taken over.

The lock of a folder is `.lock` inside it, that of a file `.NAME.lock` beside it; its owner touches it every few
seconds. A folder elsewhere (an fsspec URL) has its lock there (`_remote_lock`), seen by all machines.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

from vitruvius._files._owners import Held, Owner, join, parse, refuse_the_living, taken_over, who
from vitruvius._files._paths import MadeFolder, StrPath, explained, is_url, made_for_locks
from vitruvius._files._remote_lock import RemoteHeld, key_of
from vitruvius._files._store import LOCK, open_url
from vitruvius._secrets import redact_text

_log = logging.getLogger(__name__)


class Lock:
    """The right to write a folder or a file, held by one process; taken twice by the same process it counts as one."""

    def __init__(self, path: StrPath, *, file: bool = False) -> None:
        """`path` is what is written, a folder unless `file` says otherwise; it may be the URL of a folder."""
        self.path = path
        self._file = file
        if is_url(path) and str(path).startswith(("file://", "local://")):
            self.path = Path(open_url(str(path))[1])
        self._held: Held | None = None

    def __enter__(self) -> Lock:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> None:
        """Become the owner, or say who is; the folder is made if need be."""
        if self._held is not None or os.environ.get("RANK", "0") != "0":
            return  # of many processes the first one writes
        with explained(self.path, "write to"):
            if is_url(self.path):
                url = str(self.path)
                self._held = join(key_of(url)) or RemoteHeld(url)
            else:
                place = self._place()
                self._held = join(_key(place)) or _Held(place, self.path)

    def release(self) -> None:
        """Let others have it; a folder that was made for it and is empty goes."""
        if self._held is not None:
            self._held.leave()
            self._held = None

    def check(self) -> None:
        """Refuse to go on if another process has taken over: this one was silent for too long, asleep perhaps."""
        if self._held is not None and not self._held.is_ours():
            raise taken_over(redact_text(str(self.path)), self._held.owner())

    def _place(self) -> Path:
        if self._file:
            return Path(self.path).with_name(f".{Path(self.path).name}{LOCK}")
        return Path(self.path) / LOCK


class _Held(Held):
    """A lock file of this process."""

    def __init__(self, place: Path, path: StrPath) -> None:
        super().__init__(_key(place))
        self.place = place
        self.made = MadeFolder(place.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            while not self._create():
                _wait_for_death(place, path)
        except BaseException:
            self.made.take_back()
            raise
        self.keep_alive()
        if self.made.missing:
            made_for_locks.add(place.parent.resolve())

    def owner(self) -> Owner | None:
        return _read(self.place)

    def is_ours(self) -> bool:
        """Whether the lock file is still the one that was made here, or gone with its folder."""
        found = _read(self.place)
        return found is None or found.get("token") == self.note["token"]

    def give_sign(self) -> None:
        with contextlib.suppress(OSError):  # moved away: the next save says so
            os.utime(self.place)

    def remove(self) -> None:
        made_for_locks.discard(self.place.parent.resolve())
        if self.is_ours():
            with contextlib.suppress(OSError):  # a disk that has become read-only: the lock of a dead process
                self.place.unlink(missing_ok=True)
        self.made.take_back()

    def _create(self) -> bool:
        """Make the lock file, which must not be there."""
        try:
            handle = os.open(self.place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        try:
            os.write(handle, json.dumps(self.note).encode())
        except OSError:  # a disk that is full
            self.place.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        return True


def _key(place: Path) -> str:
    return str(place.parent.resolve() / place.name)


def _wait_for_death(place: Path, path: StrPath) -> None:
    """Return when nobody owns the lock file any more, which is then gone; RunError if its owner lives."""
    owner = _read(place)
    if owner is not None:
        refuse_the_living(path, owner, lambda: _touched(place))
        _take_away(place, owner)


def _take_away(place: Path, owner: Owner) -> None:
    """Remove the lock of a dead owner. Of several processes that find it, none may remove the lock of another."""
    aside = place.with_name(f"{place.name}.{os.getpid()}.tmp")
    try:
        place.rename(aside)
    except FileNotFoundError:  # somebody was faster
        return
    if _read(aside) == owner:
        _log.debug("the lock %s of %s, which is gone, is taken over.", place, who(owner))
    else:  # somebody was faster, and this is the new lock
        with contextlib.suppress(FileExistsError):
            os.link(aside, place)
    aside.unlink(missing_ok=True)


def _read(place: Path) -> Owner | None:
    """What a lock file says; nothing of a file that is not whole, None where there is none."""
    try:
        return parse(place.read_bytes())
    except FileNotFoundError:
        return None
    except OSError:
        return {}


def _touched(place: Path) -> int | None:
    try:
        return place.stat().st_mtime_ns
    except OSError:
        return None
