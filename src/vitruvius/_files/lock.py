"""One writer per folder: `.lock` inside it (`.NAME.lock` beside a file) names the process, its machine, and since when.

The kernel holds the lock (filelock) and lets go of it when its process ends, however that ends. Some shared file
systems lock within one machine only, or keep the lock of a machine that is gone. So the owner also touches the file
every few seconds, and what a process of another machine has left is taken over after it was not touched for a while.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from vitruvius._errors import RunError
from vitruvius._files.paths import LOCK, StrPath, explained, is_url
from vitruvius._files.remote import local_path

BEAT = 10.0  # seconds between two signs of life
SILENCE = 3.5  # beats without a sign of life after which a process of another machine counts as dead
LOOK = 0.5  # seconds between two looks at a lock
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # a file system without locks: signs of life decide

Owner = dict[str, Any]
logger = logging.getLogger(__name__)


class Lock:
    """The right to write a folder or a file, held by one process; taken twice by the same process it counts as one."""

    def __init__(self, path: StrPath, *, file: bool = False) -> None:
        """`path` is what is written, a folder unless `file` says otherwise; of a URL its copy on this machine."""
        self.path = local_path(str(path)) if is_url(path) else Path(path)
        self._file = self.path.with_name(f".{self.path.name}{LOCK}") if file else self.path / LOCK
        self._held: _Held | None = None

    def __enter__(self) -> Lock:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> None:
        """Become the owner, or raise a RunError that says who is; the folder is made if need be."""
        if self._held is not None or os.environ.get("RANK", "0") != "0":
            return  # of many processes the first one writes
        with explained(self.path, "write to"):
            file = self._file.parent.resolve() / self._file.name
            held = _held.get(file)
            if held is None or held.pid != os.getpid():
                held = _Held(file, self.path)
                _held[file] = held
        held.holders += 1
        self._held = held

    def release(self) -> None:
        """Let others have it; a folder that was made for it and is empty goes."""
        if self._held is not None:
            self._held.leave()
            self._held = None

    def check(self) -> None:
        """Raise a RunError if another process has taken over: this one was silent for too long, asleep perhaps."""
        if self._held is not None and not self._held.is_ours():
            owner = _name(_read(self._file) or {})
            raise RunError(
                f"{self.path} was taken over by {owner} while this process gave no sign of life. Let that one finish; "
                "the same command resumes from there."
            )


class _Held:
    """A lock of this process, until its last holder leaves."""

    def __init__(self, file: Path, path: Path) -> None:
        self.file = file
        self.path = path
        self.pid = os.getpid()
        self.holders = 0
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.note = {"pid": self.pid, "host": socket.gethostname(), "since": since, "token": uuid.uuid4().hex}
        self._kernel = FileLock(file, blocking=False, thread_local=False, fallback_to_soft=False)
        self._over = threading.Event()
        self._new_folders = [folder for folder in file.parents if not folder.exists()]
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            while not self._try_to_acquire():
                pass
        except BaseException:
            self._release()
            raise
        threading.Thread(target=self._heartbeat, name="lock", daemon=True).start()

    def leave(self) -> None:
        """One holder less; the last one removes the lock."""
        self.holders -= 1
        if self.holders or self.pid != os.getpid():
            return
        del _held[self.file]
        self._over.set()
        if self.is_ours():
            with contextlib.suppress(OSError):  # a disk that has become read-only: the lock of a dead process
                self.file.unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        self._kernel.release()
        with contextlib.suppress(OSError):  # they hold something
            for folder in self._new_folders:
                folder.rmdir()

    def is_ours(self) -> bool:
        """Whether the file is still the one that was written here, or gone with its folder."""
        owner = _read(self.file)
        return owner is None or owner.get("token") == self.note["token"]

    def _try_to_acquire(self) -> bool:
        """Take the lock, or raise a RunError that says who has it; false if it has changed hands meanwhile."""
        owner = None if self._create() else self._read_whole()
        supported, free = True, True
        try:
            self._kernel.acquire()
        except Timeout:
            free, owner = False, _read(self.file)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            supported = False
        is_here = supported and owner is not None and owner.get("host") == self.note["host"]
        if free and (owner is None or is_here):  # new, or left by a process of this machine that has ended
            self.file.write_text(json.dumps(self.note), encoding="utf-8")
            return True
        if owner is not None:
            if is_here or not self._wait_until_released(owner):
                owner = _read(self.file) or {}
                raise RunError(
                    f"{self.path} is being written by {_name(owner)}, since {owner.get('since', 'an unknown time')}. "
                    "Wait for it, stop it, or choose another place."
                )
            if _read(self.file) == owner:
                self.file.unlink(missing_ok=True)
        self._kernel.release()
        return False

    def _wait_until_released(self, owner: Owner) -> bool:
        """Whether the owner has left its lock or gives no sign of life; false as soon as it gives one."""
        touched = self._touched()
        patience = SILENCE * BEAT
        logger.warning("%s was written by %s; waiting %.0f s for a sign of life.", self.path, _name(owner), patience)
        end = time.monotonic() + patience
        while time.monotonic() < end:
            now = self._touched()
            if now != touched:
                return now is None
            time.sleep(min(LOOK, BEAT / 4))
        return True

    def _read_whole(self) -> Owner | None:
        """What the lock says; one that somebody makes at this moment is read when it is written."""
        for _ in range(100):
            owner = _read(self.file)
            if owner != {}:
                return owner
            time.sleep(0.01)
        return {}

    def _touched(self) -> int | None:
        try:
            return self.file.stat().st_mtime_ns
        except OSError:
            return None

    def _create(self) -> bool:
        """Make the file, so that of two machines only one can; false if it is there."""
        try:
            with self.file.open("x", encoding="utf-8") as file:
                json.dump(self.note, file)
        except FileExistsError:
            return False
        except OSError:  # a disk that is full
            self.file.unlink(missing_ok=True)
            raise
        return True

    def _heartbeat(self) -> None:
        while not self._over.wait(BEAT) and self.is_ours():
            with contextlib.suppress(OSError):  # moved away: the next save says so
                os.utime(self.file)


_held: dict[Path, _Held] = {}  # the locks of this process, by their files


def _read(file: Path) -> Owner | None:
    """What a lock says; nothing of a file that is not whole, None where there is none."""
    try:
        owner = json.loads(file.read_bytes() or b"{}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _name(owner: Owner) -> str:
    return f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown machine')}"
