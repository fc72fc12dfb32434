"""A folder here that follows a folder elsewhere: pulled once, pushed file by file as it changes (fsspec URLs).

Of two copies of a run the newer one wins, by the updates in its state and the state's checksum. An upload that fails
is made up for by the next one. Which files are the same on both sides is noted beside the folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from vitruvius._errors import RunError
from vitruvius._files._paths import StrPath, atomic_write_bytes, atomic_write_text, explained, is_url, join
from vitruvius._files._sealed import PREVIOUS, STATE, progress_of
from vitruvius._files._store import list_files, make_folder, open_url, persist, quietly
from vitruvius._secrets import redact_text

STATES = (STATE, PREVIOUS, "state.calm.pt", "nonfinite.pt")  # what only the next half of a run needs

_log = logging.getLogger(__name__)
Stamp = tuple[int, int, int]  # bytes, nanoseconds of the last change, and the file's number on its disk


class Mirror:
    """`url` is where a run belongs; `folder` a local copy to work in."""

    def __init__(self, url: str, folder: Path) -> None:
        """`url` of the folder elsewhere, `folder` of the copy; what an earlier process knew of both is read."""
        self.url = url
        self.folder = folder
        self._notes = folder.with_name(f".{folder.name}.mirror.json")
        self._pushed: dict[str, Stamp] = {}  # files that are the same there, and what they were like here
        self._there: dict[str, str] = {}  # what they were like there when they were pulled
        self._read_notes()

    def pull(self, *, states: bool = True) -> Path:
        """Take over what is there, unless what is here is newer; the folder.

        states: also the files that only the next half of a run needs; default true.
        """
        arriving = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.arriving")
        try:
            with explained(self.url, "read"):
                found = persist(lambda: list_files(self.url))
                wanted = [name for name in found if states or name not in STATES]
                self._fetch([name for name in wanted if not self._is_same(name, found[name])], arriving)
            self._take_over(arriving, {name: found[name] for name in wanted})
        finally:
            shutil.rmtree(arriving, ignore_errors=True)
        self._write_notes()
        return self.folder

    def push(self, *first: str, required: bool = True) -> list[str]:
        """Upload what has changed since it was last there, `first` before all others; the names.

        required: whether a failure is an error (default); else it is logged, and the next push makes up for it.
        """
        done = []
        for name in self._changed(first):
            stamp = self._stamp(name)
            try:
                self._put(name)
            except RunError as error:
                if required:
                    self._write_notes()
                    raise RunError(f"{error} {self.folder} is whole; the same command uploads it.") from error
                _log.warning("%s Going on in %s; the next save tries again.", error, self.folder)
                break
            self._pushed[name] = stamp
            self._there.pop(name, None)
            done.append(name)
        self._write_notes()
        return done

    def forget(self, name: str) -> None:
        """Remove the only file there, `name`, and what is known of it; a store that cannot be reached keeps it."""
        with contextlib.suppress(Exception):
            filesystem, path = open_url(str(join(self.url, name)))
            quietly(lambda: filesystem.rm_file(path))
        self._notes.unlink(missing_ok=True)

    def _changed(self, first: Sequence[str]) -> list[str]:
        """Files that are not there as they are here, in the order in which they are uploaded."""
        names = self._names()
        in_turn = [*(name for name in first if name in names), *(name for name in names if name not in first)]
        return [name for name in in_turn if self._pushed.get(name) != self._stamp(name)]

    def _fetch(self, names: list[str], arriving: Path) -> None:
        """Download into a folder of its own: what is here is not touched before all has arrived."""
        filesystem, root = open_url(self.url)
        for name in names:
            data = persist(lambda name=name: filesystem.cat_file(f"{root}/{name}"))  # type: ignore[misc]
            atomic_write_bytes(arriving / name, data)

    def _take_over(self, arriving: Path, found: dict[str, str]) -> None:
        """Move what has arrived into the folder; of two runs that differ the newer one stays."""
        local_wins = self._local_wins(arriving, found)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, stamp in found.items():
            if not (arriving / name).exists() or (local_wins and (self.folder / name).exists()):
                continue
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (arriving / name).replace(self.folder / name)
            self._pushed[name] = self._stamp(name)
            self._there[name] = stamp

    def _local_wins(self, arriving: Path, found: dict[str, str]) -> bool:
        """Whether what is here stays: it has come farther, or as far by the same way; what differs is set aside."""
        places = [arriving]
        if STATE in found and self._unchanged(STATE):
            places.append(self.folder)
        here = progress_of(self.folder)
        there = progress_of(*places)
        if here is None:
            return False
        if there is None or here.updates > there.updates:
            _log.warning("%s is newer (update %d) than %s and is uploaded.", self.folder, here.updates, self.url)
            return True
        if here.updates == there.updates and here != there:
            self._set_aside()
        return here == there

    def _set_aside(self) -> None:
        """Keep what is here under another name: it has come as far as what is there, by another way."""
        number = 1
        while (aside := self.folder.with_name(f"{self.folder.name}.local-{number}")).exists():
            number += 1
        shutil.copytree(self.folder, aside, ignore=shutil.ignore_patterns(".*"))
        _log.warning("%s differs from %s at the same update; it is kept as %s.", self.folder, self.url, aside)

    def _is_same(self, name: str, stamp: str) -> bool:
        """Whether a file is the same on both sides since it was last pulled."""
        return self._there.get(name) == stamp and self._unchanged(name)

    def _unchanged(self, name: str) -> bool:
        return (self.folder / name).is_file() and self._pushed.get(name) == self._stamp(name)

    def _names(self) -> list[str]:
        """Every file of the folder that is not hidden, by its path inside, sorted."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
        return sorted(path.relative_to(self.folder).as_posix() for path in files)

    def _put(self, name: str) -> None:
        with explained(join(self.url, name), "write"):
            filesystem, path = open_url(str(join(self.url, name)))
            twin = self._twin(name)
            if twin is not None:  # renamed here: copied over there
                source = open_url(str(join(self.url, twin)))[1]
                persist(lambda: filesystem.copy(source, path))
                return
            data = (self.folder / name).read_bytes()
            persist(lambda: make_folder(filesystem, path.rpartition("/")[0]))
            persist(lambda: filesystem.pipe_file(path, data))

    def _twin(self, name: str) -> str | None:
        """The name under which these very bytes are there already."""
        stamp = self._stamp(name)
        return next((other for other, pushed in self._pushed.items() if pushed == stamp and other != name), None)

    def _stamp(self, name: str) -> Stamp:
        """A renamed file keeps its number, one that was written anew has another."""
        status = (self.folder / name).stat()
        return status.st_size, status.st_mtime_ns, status.st_ino

    def _read_notes(self) -> None:
        try:
            known = json.loads(self._notes.read_text(encoding="utf-8"))
            if known["url"] != _plain(self.url):
                return
            self._pushed = {name: (int(a), int(b), int(c)) for name, (a, b, c) in known["pushed"].items()}
            self._there = dict(known["there"])
        except (OSError, ValueError, KeyError, TypeError):  # none, or cut off: then all is compared anew
            return

    def _write_notes(self) -> None:
        notes = {"url": _plain(self.url), "pushed": self._pushed, "there": self._there}
        atomic_write_text(self._notes, json.dumps(notes))


def _plain(url: str) -> str:
    """A URL without what stands before its host."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def place_of(url: str) -> Path:
    """Where a remote run is worked on: `s3://bucket/a` → `runs/remote/s3/bucket/a`."""
    scheme, _, rest = url.partition("://")
    parts = [part for part in rest.rpartition("@")[2].split("/") if part not in ("", ".", "..")]
    if not parts:
        raise RunError(f"{url} names no folder; expected something like {scheme}://bucket/runs/mine.")
    return Path("runs", "remote", scheme, *parts)


def fetch(run: StrPath, folder: Path | None = None, *, states: bool = True) -> Path:
    """A run folder on this machine: a local one as it is, a remote one as a copy.

    run: the folder, here or at a URL. folder: where the copy goes, which must be empty; by default runs/remote/…, where
    only what has changed is downloaded again and a newer copy stays. states: whether the copy can be trained further;
    else the large files that this needs are left out.
    """
    if not is_url(run):
        return Path(run)
    if folder is not None and _holds_something(folder):
        raise RunError(f"{folder} is not empty; name a new folder for the copy of {run}.")
    place = folder or place_of(str(run))
    if not states:
        states = (place / STATE).exists()  # trained on this machine: which copy is newer?
    with explained(str(run), "read"):
        if not persist(lambda: list_files(str(run))):
            raise RunError(redact_text(f"there is nothing at {run}; expected a run folder."))
    return Mirror(str(run), place).pull(states=states)


def _holds_something(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())
