"""The ledger: one row per image, one group of columns per threat; written as it grows, resumed where it stopped.

ledger.json            what is judged (data, model, weights), and the threats in order of appearance; also by which
                       version of vitruvius, which may change
parts/…                the rows of one batch under one threat, written in one step: a kill loses no more than that
images.json            of a published set, names, sizes and hashes of the images of each part
stages/…, points/…     of an ensemble, for the pool of images at hand: which stage each has survived, and the worst
                       points of the first stage
ledger.safetensors     all rows, when an evaluation has finished; the parts have gone into it
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvius._errors import CheckpointError, RunError
from vitruvius._files import (
    Lock,
    atomic_write_text,
    discard,
    ensure_writable,
    load_tensors,
    read_json,
    save_tensors,
    sweep,
)
from vitruvius._random import image_ids
from vitruvius._secrets import redact
from vitruvius._version import __version__
from vitruvius.data.identity import changes
from vitruvius.evaluation.base import Columns
from vitruvius.evaluation.threats import Entry

PARTS, STAGES, POINTS = "parts", "stages", "points"  # folders of what is written while an evaluation runs
IMAGES = "images.json"  # of published sets: what the images of each part are
PIXELS = "pixels"  # column of clean images: a hash of each, so that other images are noticed
AGAIN = "Choose another folder (--out), or start again (--fresh, which deletes that ledger)."
AFTER = "standing after "  # columns of an ensemble: which images were robust after each of its stages
MEANINGS = (
    "id, label, prediction, confidence (max softmax), correct, loss, top5, max_logit, energy (logsumexp of logits), "
    "entropy (nats), seconds; again, clean_again (of ensembles): what a copy of the model taken before says of x' and "
    "of the image, 0 the same class, 1 another one: a memory, 2 another one: it depends on the batch"
)

logger = logging.getLogger(__name__)


class _Rows:
    """Rows of one threat, as they come: a batch costs the same however many images came before it."""

    def __init__(self) -> None:
        self.parts: list[Columns] = []
        self.runs: list[Tensor] = []  # sorted ids, each run more than twice as long as the next one
        self.number = self.correct = 0
        self.ordered = False

    def add(self, rows: Columns) -> None:
        self.parts.append(rows)
        self.ordered = False
        self.number += len(rows["id"])
        self.correct += int(rows["correct"].sum())
        run = rows["id"].sort().values
        while self.runs and len(self.runs[-1]) <= 2 * len(run):
            run = torch.cat([self.runs.pop(), run]).sort().values
        self.runs.append(run)

    def holds(self, ids: Tensor) -> Tensor:
        """(n,) bool: which of these images have a row."""
        ids = ids.contiguous()
        found = torch.zeros_like(ids, dtype=torch.bool)
        for run in filter(len, self.runs):
            found |= run[torch.searchsorted(run, ids).clamp(max=len(run) - 1)] == ids
        return found

    def columns(self) -> Columns:
        """All rows together, ordered by image."""
        if not self.ordered:
            self.parts, self.ordered = [_joined(self.parts)], True
        return self.parts[0]


def _joined(parts: Sequence[Columns]) -> Columns:
    """The rows of several parts, ordered by image, with the columns that all of them have."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    rows = {name: torch.cat([part[name] for part in parts]) for name in names}
    order = rows["id"].argsort()
    return {name: column[order] for name, column in rows.items()}


class Ledger:
    """What every image did under every threat; threats go by their descriptions.

    `folder` is where rows are written as they come, None keeps them in memory; `rank` is that of this process, whose
    files have names of their own.
    """

    def __init__(self, folder: str | Path | None = None, *, rank: int = 0) -> None:
        self.folder = None if folder is None else Path(folder)
        self.rank = rank
        self._rows: dict[str, _Rows] = {}
        self._written = 0
        self._judged: Columns | None = None  # clean rows of earlier evaluations, by id
        self._claimed = False
        self._lock: Lock | None = None  # of the first process

    def claim(self, subject: Mapping[str, object], entries: Sequence[Entry]) -> list[Entry]:
        """Note what is judged and by which threats; the ledger of something else is refused, never mixed.

        A ledger without a single image is a false start and stands in nobody's way. Returns all threats of the ledger,
        earlier ones first. The folder is locked until `release`.
        """
        if self.folder is None:
            return list(entries)
        folder, subject = self.folder, redact(dict(subject))
        self._lock = Lock(folder)
        self._lock.take()
        file = folder / "ledger.json"
        before: list[Entry] = []
        known: dict[str, Any] = {"subject": subject, "version": __version__}
        if self._holds_rows():
            if not file.exists():
                raise RunError(f"{folder} holds rows, but no ledger.json says of what. {AGAIN}")
            known = read_json(file)
            before = _entries(known, file)
            judged = redact(known["subject"])
            differing = [key for key in {**judged, **subject} if judged.get(key) != subject.get(key)]
            if differing:
                was = [f"{key} was {judged.get(key, 'not noted')}, now {subject.get(key)}" for key in differing[:3]]
                raise RunError(f"{folder} holds the ledger of another evaluation: {'; '.join(was)}. {AGAIN}")
        every = {entry.spec: entry for entry in [*before, *entries]}
        self._claimed = True
        ensure_writable(folder)
        for growing in (folder, *self._growing()):
            sweep(growing)
        known["threats"] = [dataclasses.asdict(entry) for entry in every.values()]
        atomic_write_text(file, json.dumps(known, indent=1, ensure_ascii=False) + "\n")
        return list(every.values())

    def release(self) -> None:
        """Let other processes write to the folder again."""
        if self._lock is not None:
            self._lock.release()

    def read(self) -> None:
        """Take in the rows that earlier evaluations have left here."""
        if self.folder is None:
            return
        if (self.folder / "ledger.safetensors").exists():
            self.join([load_ledger(self.folder / "ledger.safetensors")])
        for file in sorted((self.folder / PARTS).glob("*.safetensors")):
            self._read_part(file)
        if "clean" in self._rows and PIXELS in self._rows["clean"].columns():
            self._judged = self.rows("clean")

    def _read_part(self, file: Path) -> None:
        rank, number = map(int, file.stem.rsplit("-", 2)[1:])
        if rank == self.rank:
            self._written = max(self._written, number + 1)
        try:
            rows, metadata = load_tensors(file)
            self._merge(metadata["threat"], _in_order(rows, metadata))
        except CheckpointError as error:
            logger.warning("%s Its images are judged again.", error)

    def check_images(self, ids: Tensor, x: Tensor, y: Tensor) -> None:
        """Refuse images (B, …) or labels (B,) that are not those an earlier evaluation has judged under these ids."""
        if self._judged is None:
            return
        place = torch.searchsorted(self._judged["id"], ids.cpu().contiguous()).clamp(max=len(self._judged["id"]) - 1)
        known = self._judged["id"][place] == ids.cpu()
        differs = (self._judged[PIXELS][place] != image_ids(x).cpu()) | (self._judged["label"][place] != y.cpu())
        changed = ids.cpu()[known & differs]
        if len(changed):
            raise RunError(
                f"{self.folder} holds the ledger of other images: image {int(changed[0])} has other pixels or another "
                f"label than when it was judged. {AGAIN}"
            )

    def check_part(self, part: str, identity: Mapping[str, str]) -> None:
        """Refuse a part of a published set whose images are not those that the ledger has judged, and note them."""
        if self.folder is None:
            return
        file = self.folder / IMAGES
        known: dict[str, Any] = read_json(file) if file.exists() else {}
        differing = changes(known.get(part, {}), identity)
        if differing and self.number(part):
            raise RunError(f"{self.folder} holds rows of other images of {part}: {differing[0]}. {AGAIN}")
        if known.get(part) != identity:
            atomic_write_text(file, json.dumps({**known, part: identity}, indent=1) + "\n")

    def clear(self) -> None:
        """Delete whatever an earlier evaluation has left in the folder."""
        if self.folder is None:
            return
        for name in (
            "ledger.json", "ledger.safetensors", "report.json", "sanity.json", IMAGES, "findings*.json",
            f"{PARTS}/*", f"{STAGES}/*", f"{POINTS}/*",
        ):  # fmt: skip
            for file in self.folder.glob(name):
                file.unlink(missing_ok=True)

    @property
    def columns(self) -> dict[str, Columns]:
        """All columns by threat, ordered by image."""
        return {threat: rows.columns() for threat, rows in self._rows.items()}

    @property
    def resumed(self) -> bool:
        """Whether an earlier evaluation has judged some of the images."""
        return self._judged is not None

    def number(self, threat: str) -> int:
        """How many images have a row under this `threat`."""
        return self._rows[threat].number if threat in self._rows else 0

    def correct(self, threat: str) -> int:
        """How many of them are classified correctly."""
        return self._rows[threat].correct if threat in self._rows else 0

    def lacks(self, threat: str, ids: Tensor) -> Tensor:
        """(n,) bool: which of these images have no row under this `threat` yet."""
        if threat not in self._rows:
            return torch.ones_like(ids, dtype=torch.bool)
        return ~self._rows[threat].holds(ids)

    def add(self, threat: str, rows: Columns) -> None:
        """Rows of one batch, on the CPU; on disk before this returns."""
        rows = {name: column.detach().cpu() for name, column in rows.items()}
        self._merge(threat, rows)
        if self.folder is not None:
            self._check_folder()
            name = f"{_safe(threat)}-{self.rank:05d}-{self._written:06d}.safetensors"
            save_tensors(self.folder / PARTS / name, rows, {"threat": threat, **_notes(rows)})
            self._written += 1

    def write_pool(self, threat: str, kind: str, columns: Columns, about: Mapping[str, Any]) -> None:
        """What an ensemble knows about a pool of images, in place of what it knew before; on disk before this returns.

        `kind` is one of the folders `stages` and `points`; `columns` are of the images, the ids of all of the pool
        first among them; `about` are plain values.
        """
        if self.folder is not None:
            self._check_folder()
            file = self._pool_file(threat, kind, columns["pool"])
            columns = {name: column.detach().cpu() for name, column in columns.items()}
            save_tensors(file, columns, {"threat": threat, "about": json.dumps(dict(about))})

    def read_pool(self, threat: str, kind: str, pool: Tensor) -> tuple[Columns, dict[str, Any]] | None:
        """What `write_pool` has written about the images with these ids, if an earlier evaluation was interrupted."""
        if self.folder is None or not (file := self._pool_file(threat, kind, pool)).exists():
            return None
        try:
            columns, metadata = load_tensors(file)
        except CheckpointError as error:
            logger.warning("%s Its images are searched again.", error)
            return None
        same = metadata["threat"] == threat and torch.equal(columns["pool"], pool)
        return (columns, json.loads(metadata["about"])) if same else None

    def forget_pool(self, threat: str, pool: Tensor) -> None:
        """All images of the pool have their rows."""
        if self.folder is not None:
            for kind in (STAGES, POINTS):
                self._pool_file(threat, kind, pool).unlink(missing_ok=True)

    def _pool_file(self, threat: str, kind: str, pool: Tensor) -> Path:
        assert self.folder is not None
        key = zlib.crc32(f"{threat} {pool.tolist()}".encode())
        return self.folder / kind / f"{_safe(threat)}-{key:08x}.safetensors"

    def join(self, others: Sequence[dict[str, Columns]]) -> None:
        """Take in rows from elsewhere; an image counts once."""
        for columns in others:
            for threat, rows in columns.items():
                self._merge(threat, rows)

    def rows(self, threat: str) -> Columns:
        """Columns of one `threat`, ordered by image."""
        return dict(self._rows[threat].columns())

    def find(self, threat: str, ids: Tensor) -> Columns:
        """Columns of these images, all of which have a row under this `threat`."""
        rows = self.rows(threat)
        place = torch.searchsorted(rows["id"], ids.contiguous())
        return {name: column[place] for name, column in rows.items()}

    def save(self) -> None:
        """All rows in one file, columns named `<threat>/<column>`; only then the parts go."""
        assert self.folder is not None
        self._check_folder()
        named = {f"{t}/{name}": column for t in self._rows for name, column in self.rows(t).items()}
        save_tensors(self.folder / "ledger.safetensors", named, _notes(named))
        for folder in self._growing():
            for file in folder.glob("*.safetensors"):
                file.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Take the folder back if it was made for an evaluation that has judged nothing."""
        if self._claimed and self.folder is not None and not self._holds_rows():
            discard(self.folder, "ledger.json", IMAGES)

    def _growing(self) -> list[Path]:
        """Folders of what is written while an evaluation runs."""
        assert self.folder is not None
        return [self.folder / name for name in (PARTS, STAGES, POINTS)]

    def _check_folder(self) -> None:
        """Refuse to continue in a folder that was moved or deleted since this evaluation started in it."""
        if self._claimed and self.folder is not None and not (self.folder / "ledger.json").exists():
            raise RunError(
                f"{self.folder} was moved or deleted while it was written to: ledger.json is gone. Move it back and "
                "call the same command again; it resumes where this one stopped."
            )
        if self._lock is not None:
            self._lock.check()

    def _holds_rows(self) -> bool:
        if self.folder is None:
            return False
        return (self.folder / "ledger.safetensors").exists() or any(any(folder.glob("*")) for folder in self._growing())

    def _merge(self, threat: str, rows: Columns) -> None:
        """Of an image the first row counts."""
        new = self.lacks(threat, rows["id"])
        if not new.all():
            rows = {name: column[new] for name, column in rows.items()}
        self._rows.setdefault(threat, _Rows()).add(rows)


def _entries(known: Mapping[str, Any], file: Path) -> list[Entry]:
    """The threats that a ledger.json names."""
    try:
        dict(known["subject"])
        return [Entry(**threat) for threat in known["threats"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file} is damaged: it does not say what was judged ({error}). {AGAIN}") from error


def load_ledger(path: str | Path) -> dict[str, Columns]:
    """Columns by threat, from the one file `Ledger.save` writes, or from the folder it lies in."""
    file = Path(path) / "ledger.safetensors" if Path(path).is_dir() else path
    columns: dict[str, Columns] = {}
    for key, tensor in _in_order(*load_tensors(file)).items():
        threat, _, name = key.rpartition("/")
        columns.setdefault(threat, {})[name] = tensor
    return columns


def _notes(columns: Columns) -> dict[str, str]:
    """What a file says of its columns; their order too, which safetensors sort away: stages of an ensemble have one."""
    return {"columns": MEANINGS, "order": json.dumps(list(columns), ensure_ascii=False)}


def _in_order(columns: Columns, notes: Mapping[str, str]) -> Columns:
    names = [name for name in json.loads(notes.get("order", "[]")) if name in columns]
    return {name: columns[name] for name in dict.fromkeys([*names, *columns])}


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.=]+", "_", name)[:80]
