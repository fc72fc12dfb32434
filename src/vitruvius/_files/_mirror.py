"""A folder here that follows a folder elsewhere: pulled once, pushed file by file as it changes (fsspec URLs)."""

from __future__ import annotations

import shutil
from pathlib import Path

from vitruvius._errors import RunError
from vitruvius._files._paths import StrPath, atomic_write_bytes, explained, is_url, join, open_url


class Mirror:
    """`url` is the truth; `folder` a local copy to work in."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self._pushed: dict[str, tuple[int, int]] = {}

    def pull(self) -> Path:
        """Make the local folder what the remote one is."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        with explained(self.url, "read"):
            filesystem, root = open_url(self.url)
            found = filesystem.find(root) if filesystem.exists(root) else []
            for path in found:
                name = path[len(root) :].lstrip("/")
                atomic_write_bytes(self.folder / name, filesystem.cat_file(path))
                self._pushed[name] = self._stamp(name)
        return self.folder

    def push(self, *first: str) -> list[str]:
        """Upload what has changed since it was last here, `first` before all others; the names."""
        names = self._names()
        in_turn = [*(name for name in first if name in names), *(name for name in names if name not in first)]
        changed = [name for name in in_turn if self._pushed.get(name) != self._stamp(name)]
        for name in changed:
            stamp = self._stamp(name)
            self._put(name)
            self._pushed[name] = stamp
        return changed

    def _names(self) -> list[str]:
        """Every file of the folder that is not hidden, by its path inside, sorted."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
        return sorted(str(path.relative_to(self.folder)) for path in files)

    def _put(self, name: str) -> None:
        with explained(join(self.url, name), "write"):
            filesystem, path = open_url(str(join(self.url, name)))
            filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            if (twin := self._twin(name)) is not None:  # renamed here: copied over there
                filesystem.copy(open_url(str(join(self.url, twin)))[1], path)
            else:
                filesystem.pipe_file(path, (self.folder / name).read_bytes())

    def _twin(self, name: str) -> str | None:
        """The name under which these very bytes are there already."""
        stamp = self._stamp(name)
        return next((other for other, pushed in self._pushed.items() if pushed == stamp and other != name), None)

    def _stamp(self, name: str) -> tuple[int, int]:
        status = (self.folder / name).stat()
        return status.st_size, status.st_mtime_ns


def place_of(url: str) -> Path:
    """Where a remote run is worked on: `s3://bucket/a` → `runs/remote/s3/bucket/a`."""
    scheme, _, rest = url.partition("://")
    parts = [part for part in rest.rpartition("@")[2].split("/") if part not in ("", ".", "..")]
    if not parts:
        raise RunError(f"{url} names no folder; expected something like {scheme}://bucket/runs/mine.")
    return Path("runs", "remote", scheme, *parts)


def fetch(run: StrPath, folder: Path | None = None) -> Path:
    """A run folder on this machine: a local one as it is, a remote one as a fresh copy in `folder`."""
    if not is_url(run):
        return Path(run)
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty; name a new folder for the copy of {run}.")
    return Mirror(str(run), folder or place_of(str(run))).pull()
