"""Who owns a lock: a process, told from all others by its number, its start and its machine.

A process of this machine that is gone is known to be gone; of another machine's process a lock that does not change
while one looks at it says so. Clocks are not compared.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitruvius._errors import RunError

BEAT = 10.0  # seconds between two signs of life
SILENCE = 3.5  # beats without a sign of life after which a process elsewhere counts as dead
LOOK = 0.5  # seconds between two looks at a lock

Owner = dict[str, Any]
_log = logging.getLogger(__name__)


class Held(ABC):
    """A lock of this process, kept alive by a thread until its last holder leaves; what it is, subclasses know."""

    def __init__(self, key: str) -> None:
        """`key` is the same for all names of one lock."""
        self.key = key
        self.pid = os.getpid()
        self.holders = 1
        self.note = {**myself(), "token": uuid.uuid4().hex, "since": _now()}
        self._over = threading.Event()

    def keep_alive(self) -> None:
        """From now on the lock is this process's."""
        threading.Thread(target=self._beat, name="lock", daemon=True).start()
        held[self.key] = self

    def leave(self) -> None:
        """One holder less; the last one removes the lock."""
        self.holders -= 1
        if self.holders or self.pid != os.getpid():
            return
        del held[self.key]
        self._over.set()
        self.remove()

    @abstractmethod
    def owner(self) -> Owner | None:
        """Who has the lock now; None if that cannot be known."""

    @abstractmethod
    def is_ours(self) -> bool:
        """Whether nobody has taken the lock over."""

    @abstractmethod
    def give_sign(self) -> None:
        """Show that this process lives."""

    @abstractmethod
    def remove(self) -> None:
        """Let others have it."""

    def _beat(self) -> None:
        while not self._over.wait(BEAT) and self.is_ours():
            self.give_sign()


held: dict[str, Held] = {}  # locks of this process, by their keys


def join(key: str) -> Held | None:
    """A lock that this process has already, now with one more holder."""
    found = held.get(key)
    if found is None or found.pid != os.getpid():
        return None
    found.holders += 1
    return found


def refuse_the_living(path: object, owner: Owner, look: Callable[[], object]) -> None:
    """Return when the owner of a lock is dead or has left; RunError if it lives.

    path: what is locked. owner: what its lock says. look: what changes with every sign of life, None without a lock.
    """
    if not is_here(owner):
        _watch(path, owner, look)
    elif is_alive(owner):
        raise RunError(_in_use(path, owner))


def _watch(path: object, owner: Owner, look: Callable[[], object]) -> None:
    seen = look()
    patience = SILENCE * BEAT
    _log.warning("%s was written by %s; looking for up to %.0f s whether it lives.", path, who(owner), patience)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        now = look()
        if now is None:
            return
        if now != seen:
            raise RunError(_in_use(path, owner))
        time.sleep(min(LOOK, BEAT / 4))


def taken_over(path: object, owner: Owner | None) -> RunError:
    """What a process is told that was silent for too long."""
    return RunError(
        f"{path} was taken over by {who(owner)} while this process gave no sign of life. Let that one finish; the same "
        "command goes on from there."
    )


def myself() -> Owner:
    """What tells this process from all others: number, start, and the system in which the number counts."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "system": system(), "started": started(pid)}


def is_here(owner: Owner) -> bool:
    """Whether the numbers of processes mean the same for the owner of a lock as for us."""
    known = system()
    return known is not None and owner.get("system") == known and owner.get("host") == socket.gethostname()


def is_alive(owner: Owner) -> bool:
    """Whether a process of this machine runs, and is the one that it was."""
    if owner["pid"] == os.getpid():  # a lock that could not be removed, or one of ours
        return any(ours.note["token"] == owner.get("token") for ours in held.values())
    try:
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return owner.get("started") == started(int(owner["pid"]))


def system() -> str | None:
    """The machine since its start, and the container; None where that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def started(pid: int) -> str | None:
    """When a process began, in the kernel's own count: numbers of processes are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def parse(data: bytes) -> Owner:
    """What a lock says; nothing of one that is not whole."""
    try:
        found = json.loads(data or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def who(owner: Owner | None) -> str:
    """An owner in words."""
    owner = owner or {}
    return f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown machine')}"


def _in_use(path: object, owner: Owner) -> str:
    return (
        f"{path} is being written by {who(owner)}, since {owner.get('since', 'an unknown time')}. Wait for it, stop "
        "it, or choose another place."
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
