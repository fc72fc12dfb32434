"""One owner per folder: a lock file with process, host and a heartbeat; what a dead process left is taken over.

The lock of a folder is `.lock` inside it, that of a file `.NAME.lock` beside it. Its owner touches it every few
seconds. A process of this machine that is gone is known to be gone; of another machine's process a lock that is not
touched while one looks at it says so. Clocks are not compared.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from vitruvius._errors import RunError
from vitruvius._files._paths import LOCK, MadeFolder, StrPath, explained, is_url, made_for_locks

BEAT = 10.0  # seconds between two signs of life
SILENCE = 3.5  # beats without a sign of life after which a process elsewhere counts as dead
LOOK = 0.5  # seconds between two looks at a lock

_log = logging.getLogger(__name__)


class Lock:
    """The right to write a folder or a file, held by one process; taken twice by the same process it counts as one."""

    def __init__(self, path: StrPath, *, file: bool = False) -> None:
        """`path` is what is written, a folder unless `file` says otherwise. URLs have no lock here."""
        self.path = path
        self.place: Path | None = None  # of the lock file
        if not is_url(path):
            self.place = Path(path) / LOCK
            if file:
                self.place = Path(path).with_name(f".{Path(path).name}{LOCK}")
        self._held: _Held | None = None

    def __enter__(self) -> Lock:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> None:
        """Become the owner, or say who is; the folder is made if need be."""
        if self.place is None or self._held is not None or os.environ.get("RANK", "0") != "0":
            return  # of many processes the first one writes
        with explained(self.path, "write to"):
            self._held = _join(self.place) or _Held(self.place, self.path)

    def release(self) -> None:
        """Let others have it; a folder that was made for it and is empty goes."""
        if self._held is not None:
            self._held.leave()
            self._held = None

    def check(self) -> None:
        """Refuse to go on if another process has taken over: this one was silent for too long, asleep perhaps."""
        if self._held is not None and not self._held.is_ours():
            raise RunError(
                f"{self.path} was taken over by {_who(_read(self._held.place))} while this process gave no sign of "
                "life. Let that one finish; the same command goes on from there."
            )


class _Held:
    """A lock file of this process, kept alive by a thread."""

    def __init__(self, place: Path, path: StrPath) -> None:
        self.place = place
        self.pid = os.getpid()
        self.holders = 1
        self.made = MadeFolder(place.parent)
        self.note = {**_myself(), "token": uuid.uuid4().hex, "since": _now()}
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            while not self._create():
                _wait_for_death(place, path)
        except BaseException:
            self.made.take_back()
            raise
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._thread.start()
        _ours[_key(place)] = self
        if self.made.missing:
            made_for_locks.add(place.parent.resolve())

    def leave(self) -> None:
        self.holders -= 1
        if self.holders or self.pid != os.getpid():
            return
        del _ours[_key(self.place)]
        made_for_locks.discard(self.place.parent.resolve())
        self._over.set()
        if self.is_ours():
            with contextlib.suppress(OSError):  # a disk that has become read-only: the lock of a dead process
                self.place.unlink(missing_ok=True)
        self.made.take_back()

    def is_ours(self) -> bool:
        """Whether the lock file is still the one that was made here, or gone with its folder."""
        found = _read(self.place)
        return found is None or found.get("token") == self.note["token"]

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

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            if not self.is_ours():
                return
            with contextlib.suppress(OSError):  # moved away: the next save says so
                os.utime(self.place)


_ours: dict[Path, _Held] = {}  # locks of this process, by their files


def _key(place: Path) -> Path:
    return place.parent.resolve() / place.name


def _join(place: Path) -> _Held | None:
    """A lock that this process has already, now with one more holder."""
    held = _ours.get(_key(place))
    if held is None or held.pid != os.getpid():
        return None
    held.holders += 1
    return held


def _wait_for_death(place: Path, path: StrPath) -> None:
    """Return when nobody owns the lock file any more, which is then gone; RunError if its owner lives."""
    owner = _read(place)
    if owner is None:
        return
    if _is_here(owner):
        if _is_alive(owner):
            raise RunError(_in_use(path, owner))
    else:
        _watch(place, path, owner)
    _take_away(place, owner)


def _watch(place: Path, path: StrPath, owner: dict[str, Any]) -> None:
    """Look at the lock of a process elsewhere; RunError at its next sign of life."""
    seen = _touched(place)
    patience = SILENCE * BEAT
    _log.warning("%s was written by %s; looking for up to %.0f s whether it lives.", path, _who(owner), patience)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if _touched(place) != seen:
            if _read(place) is None:
                return
            raise RunError(_in_use(path, _read(place) or owner))
        time.sleep(min(LOOK, BEAT / 4))


def _take_away(place: Path, owner: dict[str, Any]) -> None:
    """Remove the lock of a dead owner. Of several processes that find it, none may remove the lock of another."""
    aside = place.with_name(f"{place.name}.{os.getpid()}.tmp")
    try:
        place.rename(aside)
    except FileNotFoundError:  # somebody was faster
        return
    if _read(aside) == owner:
        _log.info("the lock %s of %s, which is gone, is taken over.", place, _who(owner))
    else:  # somebody was faster, and this is the new lock
        with contextlib.suppress(FileExistsError):
            os.link(aside, place)
    aside.unlink(missing_ok=True)


def _myself() -> dict[str, Any]:
    """What tells this process from all others: number, start, and the system in which the number counts."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "system": _system(), "started": _started(pid)}


def _is_here(owner: dict[str, Any]) -> bool:
    """Whether the numbers of processes mean the same for the owner of a lock as for us."""
    known = _system()
    return known is not None and owner.get("system") == known and owner.get("host") == socket.gethostname()


def _is_alive(owner: dict[str, Any]) -> bool:
    """Whether a process of this machine runs, and is the one that it was."""
    try:
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return owner.get("started") == _started(int(owner["pid"]))


def _system() -> str | None:
    """The machine since its start, and the container; None where that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's own count: numbers of processes are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _read(place: Path) -> dict[str, Any] | None:
    """What a lock file says; nothing of a file that is not whole, None where there is none."""
    try:
        found = json.loads(place.read_bytes() or b"{}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _touched(place: Path) -> int | None:
    try:
        return place.stat().st_mtime_ns
    except OSError:
        return None


def _in_use(path: StrPath, owner: dict[str, Any]) -> str:
    return (
        f"{path} is being written by {_who(owner)}, since {owner.get('since', 'an unknown time')}. Wait for it, stop "
        "it, or choose another place."
    )


def _who(owner: dict[str, Any] | None) -> str:
    owner = owner or {}
    return f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown machine')}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
