"""What both kinds of copy share: a record of the settings that must not change, and processes that share the work."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from vitruvius._checks import Progress
from vitruvius._errors import ConfigError, RunError
from vitruvius._files import atomic_write_text, ensure_writable, is_lock, read_json, sweep
from vitruvius._secrets import redact
from vitruvius._version import __version__
from vitruvius.corruptions.base import Corruption
from vitruvius.data.identity import LOOKED_AT, SAMPLE, hash_file, spread

T = TypeVar("T")
RECORD = "corrupt.json"
FILES = "files"  # in it: sizes and contents of the images of a folder
WORKSHOP = ".parts"  # folder inside the copy of what is not finished


def claim(out: Path, settings: Mapping[str, Any]) -> None:
    """Make the folder ours: new, or begun with the same settings. Temporary files of a killed process go.

    out: the folder, locked by the caller. settings: what must not change.
    """
    settings = redact(dict(settings))
    record = out / RECORD
    if record.exists():
        known = read_json(record)
        _refuse_changes(out, known, settings)
    elif out.exists() and (not out.is_dir() or not _is_bare(out)):
        raise ConfigError(f"{out} exists and is not a corrupted copy. Choose a new or empty folder.")
    else:
        known = {"version": __version__}
    ensure_writable(out)
    sweep(out)
    sweep(out / WORKSHOP)
    atomic_write_text(record, json.dumps({**known, **settings}, indent=2) + "\n")


def claim_files(out: Path, source: Path, files: Sequence[str]) -> None:
    """Refuse to go on where images have changed since their copies were made, perhaps; new ones may have come.

    out: the folder of the copy. source: the folder of the images. files: `class/file` of each. Noted are the sizes of
    50,000 files at most and the contents of 64; another size or content is refused.
    """
    record = read_json(out / RECORD)
    known = record.get(FILES, {"sizes": {}, "contents": {}})
    present = [file for file in known["contents"] if (source / file).exists()]
    sizes = _sizes(source, files)
    _refuse_changed(out, source, known["sizes"], sizes)
    _refuse_changed(out, source, known["contents"], _contents(source, present))  # a larger set has another sample
    noted = {"sizes": {**known["sizes"], **sizes}, "contents": {**known["contents"], **_contents(source, files)}}
    atomic_write_text(out / RECORD, json.dumps({**record, FILES: noted}, indent=2) + "\n")


def _refuse_changed(out: Path, source: Path, known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [file for file, value in known.items() if now.get(file, value) != value]
    if changed:
        raise ConfigError(
            f"{out} holds copies of {source}, of which {len(changed)} file(s) have changed since, among them "
            f"{changed[0]}. Choose another folder, or delete this one."
        )


def _sizes(source: Path, files: Sequence[str]) -> dict[str, Any]:
    return {files[place]: (source / files[place]).stat().st_size for place in spread(len(files), LOOKED_AT)}


def _contents(source: Path, files: Sequence[str]) -> dict[str, Any]:
    return {files[place]: hash_file(source / files[place]) for place in spread(len(files), SAMPLE)}


def _is_bare(out: Path) -> bool:
    """Whether a folder holds nothing but the lock and what a process left that was killed before its record."""
    return all(is_lock(path) or (path.name.startswith(".") and path.suffix == ".tmp") for path in out.iterdir())


def _refuse_changes(out: Path, known: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    changed = [key for key, value in settings.items() if key in known and known[key] != value]
    if changed:
        said = ", ".join(f"{key} was {known[key]!r}, is now {settings[key]!r}" for key in changed)
        raise ConfigError(f"{out} holds a copy made otherwise ({said}). Choose another folder, or delete this one.")


def settings_of(corruptions: Sequence[Corruption]) -> dict[str, Any]:
    """What all corruptions of a copy must share; severities and names may be added later."""
    fields = [{f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.name != "severity"} for c in corruptions]
    shared: dict[str, Any] = {}
    for one in fields:
        for key, value in one.items():
            if shared.setdefault(key, value) != value:
                raise ConfigError(f"the corruptions of a copy have one {key}; got {shared[key]!r} and {value!r}.")
    return shared


def share(work: Callable[[T], object], items: Iterable[T], *, workers: int, progress: Progress | None) -> None:
    """`work(item)` for every item, in `workers` processes; the first error ends all, what is written stays."""
    items = list(items)
    done = 0
    if workers <= 1:
        for item in items:
            work(item)
            done += 1
            _tell(progress, done, len(items))
        return
    with ProcessPoolExecutor(min(workers, len(items) or 1), get_context("spawn"), initializer=_alone) as pool:
        try:
            for future in as_completed([pool.submit(work, item) for item in items]):
                future.result()
                done += 1
                _tell(progress, done, len(items))
        except BrokenProcessPool as error:
            raise RunError(
                f"a worker process was killed, perhaps for lack of memory ({workers} worked). What is written stays; "
                "the same command with fewer --workers goes on."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def usual_workers() -> int:
    """One process per core that we may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _alone() -> None:
    torch.set_num_threads(1)


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
