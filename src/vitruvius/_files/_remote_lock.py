"""One owner per folder elsewhere: a numbered lock object inside it; the owner of the highest number has the folder.

The first owner makes `.1.lock`. Who finds its owner dead makes `.2.lock`, and so on: the store is asked to make an
object only if there is none, so that of several processes one succeeds. No process writes or removes the lock of one
that may live. A store that knows no such condition is written to, and read again after a while: the last one to write
has won. The owner writes its lock anew every few seconds, with a number that grows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time

from vitruvius._files._owners import Held, Owner, parse, refuse_the_living, who
from vitruvius._files._store import LOCK, list_files, make_folder, open_url, persist, quietly
from vitruvius._secrets import redact_text

SETTLE = 1.0  # seconds after which a store without conditions is asked who has written last
CONDITIONAL = {"s3", "s3a", "gs", "gcs", "memory"}  # schemes whose packages hand the condition to the store

_NAME = re.compile(rf"\.(\d+){re.escape(LOCK)}")
_log = logging.getLogger(__name__)


def key_of(url: str) -> str:
    """The same text for every way to write a URL: without credentials and slashes at its end."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].rstrip('/')}"


class RemoteHeld(Held):
    """A lock object of this process in a folder elsewhere; `url` names the folder."""

    def __init__(self, url: str) -> None:
        super().__init__(key_of(url))
        self.url = redact_text(url)
        self.beats = 0
        self.scheme = url.partition("://")[0]
        self.filesystem, self.root = open_url(url)
        persist(lambda: list_files(url))  # which says what is wrong with the bucket
        persist(lambda: make_folder(self.filesystem, self.root))
        self.number = 0
        while not self.number:
            self.number = self._try()
        self.keep_alive()

    def owner(self) -> Owner | None:
        with contextlib.suppress(Exception):  # a store that cannot be asked
            return next(reversed(quietly(self._locks).values()), None)
        return None

    def is_ours(self) -> bool:
        """Whether this lock is there and the highest one; a store that cannot be asked has not said otherwise."""
        try:
            locks = quietly(self._locks)
        except Exception:
            return True
        return max(locks, default=0) == self.number and self._is_mine(locks[self.number])

    def give_sign(self) -> None:
        self.beats += 1
        with contextlib.suppress(Exception):  # an outage: the next beat may do
            quietly(lambda: self.filesystem.pipe_file(self._path(self.number), self._text()))

    def remove(self) -> None:
        """The locks of the dead first: while one is there, the highest is ours."""
        with contextlib.suppress(Exception):  # an outage: the lock of a dead process
            mine = [(number, note) for number, note in quietly(self._locks).items() if number <= self.number]
            for number, note in mine:
                if number < self.number or self._is_mine(note):
                    quietly(lambda number=number: self.filesystem.rm_file(self._path(number)))  # type: ignore[misc]

    def _try(self) -> int:
        """The number of the lock that was made; 0 if somebody else was faster or has just left."""
        before = persist(self._locks)
        last = max(before, default=0)
        if last:
            refuse_the_living(self.url, before[last], lambda: persist(self._locks).get(last))
            _log.debug("the lock of %s in %s, which is gone, is taken over.", who(before[last]), self.url)
        if not self._create(last + 1):
            return 0
        now = persist(self._locks)
        below = {number: note.get("token") for number, note in now.items() if number <= last}
        if max(now, default=0) == last + 1 and all(before.get(n, {}).get("token") == t for n, t in below.items()):
            return last + 1
        persist(lambda: self.filesystem.rm_file(self._path(last + 1)))  # meanwhile all was given back and taken anew
        return 0

    def _create(self, number: int) -> bool:
        """Make the lock object, which must not be there; whether it is ours."""
        if self._put(number) and not (self.scheme in CONDITIONAL and not self._put(number)):
            time.sleep(SETTLE)  # made twice: this store does not look before it writes
        return self._is_mine(persist(self._locks).get(number, {}))

    def _put(self, number: int) -> bool:
        """Whether the store has made the object; false where there was one."""
        try:
            persist(lambda: self.filesystem.pipe_file(self._path(number), self._text(), mode="create"))
        except FileExistsError:
            return False
        return True

    def _locks(self) -> dict[int, Owner]:
        """Every lock in the folder and what it says, lowest number first."""
        self.filesystem.invalidate_cache()
        try:
            paths = self.filesystem.ls(self.root, detail=False)
        except FileNotFoundError:
            return {}
        found = {}
        for path in paths:
            match = _NAME.fullmatch(str(path).rstrip("/").rpartition("/")[2])
            if match is not None:
                with contextlib.suppress(FileNotFoundError):  # gone since
                    found[int(match[1])] = parse(self.filesystem.cat_file(path))
        return dict(sorted(found.items()))

    def _is_mine(self, note: Owner) -> bool:
        return note.get("token") == self.note["token"]

    def _path(self, number: int) -> str:
        return f"{self.root}/.{number}{LOCK}"

    def _text(self) -> bytes:
        return json.dumps({**self.note, "beats": self.beats}).encode()
