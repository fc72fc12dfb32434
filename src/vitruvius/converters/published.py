"""The checkpoints that the papers publish, by name: fetched once, checked, converted.

The table is published.yaml. Files are kept in $VITRUVIUS_CACHE, by default ~/.cache/vitruvius/checkpoints. No README
states a hash; what came first is remembered beside the file, and a file that changed since is refused.
"""

from __future__ import annotations

import hashlib
import logging
import os
import urllib.request
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitruvius._errors import CheckpointError, UnknownName, suggest
from vitruvius._progress import Bar, Progress
from vitruvius._yaml import parse_value

if TYPE_CHECKING:
    from vitruvius.converters.base import Converted

logger = logging.getLogger(__name__)

DRIVE = "https://drive.usercontent.google.com/download?id={}&export=download&confirm=t"
CHUNK = 1 << 20  # bytes
STATED = ("autoattack", "clean", "top1", "top5")


@dataclass(frozen=True, kw_only=True)
class Published:
    """One checkpoint: where it lies, how it is read, and what its authors state."""

    name: str
    source: str  # the converter that reads it
    model: str
    classes: int
    page: str  # where a person finds it
    url: str | None = None  # of the file itself
    sha256: str | None = None
    statistics: dict[str, tuple[float, ...]] = field(default_factory=dict)  # mean, std
    stated: dict[str, float] = field(default_factory=dict)  # per cent, by measure


@cache
def published_checkpoints() -> dict[str, Published]:
    """Every published checkpoint by name."""
    table = parse_value(files("vitruvius.converters").joinpath("published.yaml").read_text(encoding="utf-8"))
    found = {}
    for group, facts in table.items():
        for name, row in facts["checkpoints"].items():
            statistics = facts.get("statistics", {}).get(row.get("statistics"), {})
            found[f"{group}/{name}"] = Published(
                name=f"{group}/{name}",
                source=facts["source"],
                model=row["model"],
                classes=row["classes"],
                page=row.get("page", facts["page"]),
                url=DRIVE.format(row["drive"]) if "drive" in row else row.get("url"),
                sha256=row.get("sha256"),
                statistics={key: tuple(map(float, value)) for key, value in statistics.items()},
                stated={key: row[key] for key in STATED if key in row},
            )
    return found


def describe_published() -> list[tuple[str, str, str]]:
    """Name, classes and what its authors state, of every published checkpoint."""
    rows = []
    for name, entry in sorted(published_checkpoints().items()):
        stated = ", ".join(f"{measure} {value:.2f} %" for measure, value in entry.stated.items())
        reach = "" if entry.url else f"; fetch it from {entry.page}"
        rows.append((name, f"{entry.classes} classes", f"{entry.model}: {stated or 'no number stated'}{reach}"))
    return rows


def open_published(name: str, *, file: str | Path | None = None) -> Converted:
    """A published checkpoint as a model of ours.

    name: as in `published_checkpoints()`. file: the file, where it was fetched by hand; default: fetched, once.
    """
    from vitruvius.converters.base import convert  # with timm: only when a file is read

    table = published_checkpoints()
    if name not in table:
        raise UnknownName(f"no published checkpoint {name!r}{suggest(name, table)}")
    entry = table[name]
    statistics: dict[str, Any] = dict(entry.statistics)
    converted = convert(file or fetch_published(entry), entry.source, model_name=entry.model, **statistics)
    found = converted.model.get("num_classes", entry.classes)
    if found != entry.classes:
        raise CheckpointError(f"{name} has {entry.classes} classes, this file {found}: it is another checkpoint.")
    return converted


def fetch_published(entry: Published, *, folder: Path | None = None) -> Path:
    """The file of a checkpoint, from the cache or the network, checked.

    entry: which. folder: the cache; default: $VITRUVIUS_CACHE, else ~/.cache/vitruvius/checkpoints.
    """
    folder = folder or Path(os.environ.get("VITRUVIUS_CACHE") or Path.home() / ".cache" / "vitruvius" / "checkpoints")
    path = folder / f"{entry.name.replace('/', '-')}.pth"
    if not path.is_file():
        by_hand = f"fetch it from {entry.page} and say where it is: model.weights=FILE."
        if entry.url is None:
            raise CheckpointError(f"{entry.name}: its authors publish no address of the file itself; {by_hand}")
        folder.mkdir(parents=True, exist_ok=True)
        with Bar(f"fetching {entry.name}") as bar:
            _download(entry, path, by_hand, bar)
    _check(entry, path)
    return path


def _download(entry: Published, path: Path, by_hand: str, progress: Progress) -> None:
    part = path.with_suffix(".part")
    try:
        with urllib.request.urlopen(str(entry.url), timeout=60) as answer, part.open("wb") as file:
            total = int(answer.headers.get("Content-Length") or 0)
            if "text/html" in (answer.headers.get("Content-Type") or ""):
                raise CheckpointError(
                    f"{entry.name}: {entry.url} answers with a page, not with a file. In a browser, {by_hand}"
                )
            done = 0
            while block := answer.read(CHUNK):
                file.write(block)
                done += len(block)
                progress(done >> 20, total >> 20 or None, "MiB")
        if total and done != total:
            raise CheckpointError(f"{entry.name}: {done:,} of {total:,} bytes came; try again.")
        part.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{entry.name} cannot be fetched from {entry.url}: {error}. Without a network, {by_hand}"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _check(entry: Published, path: Path) -> None:
    """Against the published hash, or where there is none against what came the first time."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    beside = path.with_suffix(".sha256")
    expected = entry.sha256 or (beside.read_text(encoding="utf-8").strip() if beside.is_file() else None)
    if expected is None:
        logger.warning("%s: its authors publish no hash; what came has sha256 %s, remembered.", entry.name, sha256)
        beside.write_text(sha256 + "\n", encoding="utf-8")
    elif sha256 != expected:
        raise CheckpointError(
            f"{path} has sha256 {sha256}, expected {expected}: it is damaged or another file. Delete it to fetch it "
            "again."
        )
