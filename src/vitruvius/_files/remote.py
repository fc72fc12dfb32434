"""A run at a URL: worked on in a folder of this machine, and copied to the URL by fsspec. One run has one writer.

States are copied before what follows from them and metrics last, so that what is there can always be trained further.
Beside the folder, `.NAME.copy.json` notes which files are the same on both sides.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from vitruvius._errors import RunError
from vitruvius._files.paths import (
    StrPath,
    at_url,
    atomic_write_text,
    exists,
    explained,
    has_buckets,
    is_url,
    join,
    make_folder,
    open_url,
    read_text,
)
from vitruvius._secrets import redact

CONFIG, METRICS = "config.yaml", "metrics.jsonl"
STATE, PREVIOUS = "state.pt", "state.previous.pt"
SHARDS = "shards/"  # folder of what the processes of a state have written
STATES = (STATE, PREVIOUS, "state.calm.pt", "nonfinite.pt")  # what only further training needs

logger = logging.getLogger(__name__)


def local_path(url: str) -> Path:
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
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty; name a new folder for the copy of {run}.")
    copy = RemoteCopy(str(run), folder or local_path(str(run)))
    if not copy.download(states=states or (copy.folder / STATE).exists()):
        raise RunError(redact(f"there is nothing at {run}; expected a run folder."))
    return copy.folder


class RemoteCopy:
    """The copy at `url` of a run that is worked on in `folder`."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self._notes = folder.with_name(f".{folder.name}.copy.json")
        self._there: dict[str, str] = {}  # files that are the same on both sides, and what they were like there
        self._here: dict[str, list[int]] = {}  # and here
        with contextlib.suppress(OSError, ValueError, KeyError):  # none, or cut off: then all is copied again
            notes = json.loads(self._notes.read_text(encoding="utf-8"))
            self._there, self._here = notes["there"], notes["here"]

    def download(self, *, states: bool = True) -> bool:
        """Take over what has changed there, unless the folder here has come as far; whether there is anything.

        states: also the files that only further training needs.
        """
        with explained(self.url, "read"):
            stamps = at_url(self.url, self._list)
            wanted = self._wanted([name for name in stamps if states or name not in STATES], stamps)
            arriving = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.arriving")
            try:
                for name in wanted:
                    self._get(name, arriving / name)
                for name in wanted:  # only now, since all has arrived
                    (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (arriving / name).replace(self.folder / name)
                    self._there[name], self._here[name] = stamps[name], self._stamp(name)
            finally:
                shutil.rmtree(arriving, ignore_errors=True)
        if wanted:
            self._save_notes()
        return bool(stamps)

    def upload(self, *, required: bool = True) -> None:
        """Copy what has changed here.

        required: whether a failure is an error; else it is logged, and the next upload makes up for it.
        """
        changed = [name for name in self._names() if self._here.get(name) != self._stamp(name)]
        try:
            for name in changed:
                stamp = self._stamp(name)
                with explained(self._url_of(name), "write"):
                    self._put(name)
                self._here[name] = stamp
                self._there.pop(name, None)
                self._save_notes()
            for name in [name for name in self._here if name.startswith(SHARDS) and not (self.folder / name).exists()]:
                at_url(self._url_of(name), lambda filesystem, path: filesystem.rm_file(path))
                del self._here[name]
        except RunError as error:
            if required:
                raise RunError(f"{error} {self.folder} is whole; the same command uploads it.") from error
            logger.warning("%s Training continues in %s; the next save tries again.", error, self.folder)

    def forget(self) -> None:
        """Remove the recipe there, the only file of a run of which nothing came, and what is known of it here."""
        with contextlib.suppress(Exception):  # a store that cannot be reached keeps it
            at_url(self._url_of(CONFIG), lambda filesystem, path: filesystem.rm_file(path))
        self._notes.unlink(missing_ok=True)

    def _list(self, filesystem: Any, root: str) -> dict[str, str]:
        """Every file there by its path inside, with a stamp that changes with it."""
        filesystem.invalidate_cache()
        try:
            files = filesystem.find(root, detail=True)
        except FileNotFoundError as error:
            if not has_buckets(filesystem):
                return {}
            missing = f"there is no bucket {root.partition('/')[0]!r}. Check its name, or make it first"
            raise RunError(redact(f"cannot open {self.url}: {missing}; buckets are never created here.")) from error
        return {path[len(root) :].lstrip("/"): _remote_stamp(facts) for path, facts in files.items()}

    def _wanted(self, names: list[str], stamps: dict[str, str]) -> list[str]:
        """The files to download, metrics last."""
        if (self.folder / STATE).exists() and _epochs(join(self.folder, METRICS)) >= _epochs(self._url_of(METRICS)):
            wanted = [name for name in names if not (self.folder / name).exists()]
        else:
            same = {name for name, stamp in stamps.items() if self._there.get(name) == stamp}
            wanted = [name for name in names if name not in same or not (self.folder / name).exists()]
        return sorted(wanted, key=lambda name: name == METRICS)

    def _names(self) -> list[str]:
        """Every file here that is not hidden, by its path inside: states first, after their shards, metrics last."""
        paths = [path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file()]
        names = {path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)}
        first = [CONFIG, *sorted(name for name in names if name.startswith(SHARDS)), STATE]
        rest = sorted(names - {PREVIOUS, *first}, key=lambda name: (name == METRICS, name))
        return [name for name in first if name in names] + rest

    def _get(self, name: str, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        at_url(self._url_of(name), lambda filesystem, path: filesystem.get_file(path, str(file)))

    def _put(self, name: str) -> None:
        url = self._url_of(name)
        if name == STATE and STATE in self._here:  # as it is here, at the store's own speed
            previous = self._url_of(PREVIOUS)
            at_url(url, lambda filesystem, path: filesystem.copy(path, open_url(previous)[1]))
        at_url(url, lambda filesystem, path: make_folder(filesystem, path.rpartition("/")[0]))
        at_url(url, lambda filesystem, path: filesystem.put_file(str(self.folder / name), path))

    def _url_of(self, name: str) -> str:
        return str(join(self.url, name))

    def _stamp(self, name: str) -> list[int]:
        """What tells a file here from its next version: on a disk with a coarse clock its number, too."""
        status = (self.folder / name).stat()
        return [status.st_size, status.st_mtime_ns, status.st_ino]

    def _save_notes(self) -> None:
        atomic_write_text(self._notes, json.dumps({"there": self._there, "here": self._here}))


def _remote_stamp(facts: dict[str, Any]) -> str:
    """The size of a file, and whatever its store says of its contents or time."""
    times = [facts.get(key) for key in ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "created")]
    return f"{facts.get('size')} {next((time for time in times if time is not None), '')}"


def _epochs(metrics: StrPath) -> int:
    """How many epochs a run has finished."""
    return len(read_text(metrics).splitlines()) if exists(metrics) else 0
