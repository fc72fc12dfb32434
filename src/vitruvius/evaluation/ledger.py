"""The ledger: one row per image, one group of columns per threat; written as it grows, resumed where it stopped.

ledger.json            what is judged (data, model, weights), and the threats in order of appearance; also by which
                       version of vitruvius, which may change
parts/…                the rows of one batch under one threat, written in one step: a kill loses no more than that
images.json            of a published set, names, sizes and hashes of the images of each part
stages/…               of an ensemble, which images have survived which stage, batch by batch
points/…               of an ensemble that searches on a faster view, the worst points of the pool that is at hand
ledger.safetensors     all rows, when an evaluation has finished; the parts have gone into it
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitruvius._dice import image_ids
from vitruvius._errors import CheckpointError, RunError
from vitruvius._files import (
    Lock,
    MadeFolder,
    atomic_write_text,
    ensure_writable,
    load_tensors,
    read_json,
    save_tensors,
    sweep,
)
from vitruvius._secrets import redact
from vitruvius._version import __version__
from vitruvius.data.identity import changes
from vitruvius.evaluation.threats import Entry

NOTES = "stages"  # folder of what the stages of an ensemble have decided so far
POINTS = "points"  # folder of the worst points that a search on a faster view has found so far
IMAGES = "images.json"  # of published sets: what the images of each part are
PIXELS = "pixels"  # column of clean images: a hash of each, so that other images are noticed
ANEW = "Choose another folder (--out), or begin anew (--fresh, which deletes that ledger)."
AFTER = "standing after "  # columns of an ensemble: which images were robust after each of its stages
DRAWS_RIGHT = "draws_right"  # column of random models: share of the draws in which an image is classified correctly
Columns = dict[str, Tensor]  # every column (n,), `id` among them
MEANINGS = (
    "id, label, prediction, confidence (max softmax), correct, loss, top5, max_logit, energy (logsumexp of logits), "
    "entropy (nats), seconds"
)

_log = logging.getLogger(__name__)


class Note(NamedTuple):
    """What one stage of an ensemble has decided about some images."""

    threat: str
    stage: str
    attempt: int | None  # they have survived all attempts up to this one (from 0); None: the whole stage
    columns: Columns  # `id`, and of the first stage what the model answers to the worst points


class _Images(NamedTuple):
    """What images an earlier evaluation has judged, in order of their ids."""

    ids: Tensor  # (n,)
    pixels: Tensor  # (n,) a hash of each
    labels: Tensor  # (n,)

    @classmethod
    def of(cls, columns: Columns) -> _Images | None:
        if PIXELS not in columns:
            return None
        order = columns["id"].argsort()
        return cls(columns["id"][order], columns[PIXELS][order], columns["label"][order])

    def changed(self, ids: Tensor, pixels: Tensor, labels: Tensor) -> Tensor:
        """Ids of images that are known as others."""
        place = torch.searchsorted(self.ids, ids.contiguous()).clamp(max=len(self.ids) - 1)
        known = self.ids[place] == ids
        differs = (self.pixels[place] != pixels) | (self.labels[place] != labels)
        return ids[known & differs]


class Ledger:
    """What every image did under every threat; threats go by their descriptions.

    `folder` is where rows are written as they come, None keeps them in memory; `rank` is that of this process, whose
    files have names of their own.
    """

    def __init__(self, folder: str | Path | None = None, *, rank: int = 0) -> None:
        if folder is None:
            self.folder = None
        else:
            self.folder = Path(folder)
        self.rank = rank
        self.columns: dict[str, Columns] = {}
        self._written = 0
        self._noted = 0
        self._earlier: list[Note] = []
        self._earlier_points: list[Path] = []
        self._images: _Images | None = None  # judged by earlier evaluations
        self._claimed = False
        self._made: MadeFolder | None = None
        self._lock: Lock | None = None  # of the first process

    def claim(self, subject: Mapping[str, object], entries: Sequence[Entry]) -> list[Entry]:
        """Note what is judged and by which threats; the ledger of something else is refused, never mixed.

        A ledger without a single image is a false start and stands in nobody's way. Returns all threats of the ledger,
        earlier ones first. The folder is locked until `release`.

        `subject` says which model and which images, in plain values; `entries` are the threats that are asked for.
        """
        if self.folder is None:
            return list(entries)
        self._lock = Lock(self.folder)
        self._lock.take()
        try:
            return self._claim(self.folder, subject, entries)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let other processes write to the folder again."""
        if self._lock is not None:
            self._lock.release()

    def _claim(self, folder: Path, subject: Mapping[str, object], entries: Sequence[Entry]) -> list[Entry]:
        subject = redact(dict(subject))
        file = folder / "ledger.json"
        known: dict[str, Any] = {"subject": subject, "version": __version__, "threats": []}
        if file.exists() and self._holds_rows():
            known = read_json(file)
        before = _entries(known, file)
        self._compare(redact(known["subject"]), subject, file)
        self._compare_revisions(before, entries)
        every = {entry.spec: entry for entry in [*before, *entries]}
        self._made = MadeFolder(folder)
        ensure_writable(folder)
        for left in (folder, *self._growing()):
            sweep(left)
        known["threats"] = [dataclasses.asdict(entry) for entry in every.values()]
        atomic_write_text(file, json.dumps(known, indent=1, ensure_ascii=False) + "\n")
        self._claimed = True
        return list(every.values())

    def read(self) -> None:
        """Take in the rows that earlier evaluations have left here."""
        if self.folder is None:
            return
        if (self.folder / "ledger.safetensors").exists():
            self.join([load_ledger(self.folder / "ledger.safetensors")])
        for file in sorted((self.folder / "parts").glob("*.safetensors")):
            self._read_part(file)
        for file in sorted((self.folder / NOTES).glob("*.safetensors")):
            self._read_note(file)
        self._earlier_points = sorted((self.folder / POINTS).glob("*.safetensors"))
        for file in self._earlier_points:
            self._noted = self._number_after(file, self._noted)
        self._images = _Images.of(self.columns.get("clean", {}))

    def check_images(self, ids: Tensor, x: Tensor, y: Tensor) -> None:
        """Refuse images (B, …) or labels (B,) that are not those an earlier evaluation has judged under these ids.

        `ids` (B,) int64 are their numbers in the data set; `x` and `y` are a batch.
        """
        if self._images is None:
            return
        changed = self._images.changed(ids.cpu(), image_ids(x).cpu(), y.cpu())
        if len(changed):
            raise RunError(
                f"{self.folder} holds the ledger of other images: image {int(changed[0])} has other pixels or another "
                f"label than when it was judged. {ANEW}"
            )

    def check_part(self, part: str, identity: Mapping[str, str]) -> None:
        """Refuse a part of a published set whose images are not those that the ledger has judged; note what they are.

        `part` is its name; `identity` what its images are.
        """
        if self.folder is None:
            return
        file = self.folder / IMAGES
        known: dict[str, Any] = {}
        if file.exists():
            known = read_json(file)
        said = changes(known.get(part, {}), identity)
        if said and len(self.done(part)):
            raise RunError(f"{self.folder} holds rows of other images of {part}: {said[0]}. {ANEW}")
        if known.get(part) != identity:
            atomic_write_text(file, json.dumps({**known, part: identity}, indent=1) + "\n")

    def clear(self) -> None:
        """Delete whatever an earlier evaluation has left in the folder."""
        if self.folder is None:
            return
        files = [self.folder / name for name in ("ledger.json", "ledger.safetensors", "report.json", IMAGES)]
        files += self.folder.glob("findings*.json")
        for folder in self._growing():
            files += folder.glob("*")
        for file in files:
            file.unlink(missing_ok=True)

    def done(self, threat: str) -> Tensor:
        """Ids of the images that this `threat` has already seen."""
        if threat in self.columns:
            return self.columns[threat]["id"]
        return torch.empty(0, dtype=torch.int64)

    def add(self, threat: str, rows: Columns) -> None:
        """Rows of one batch, on the CPU; on disk before this returns.

        `threat` is its description; `rows` are columns by name, each (B, …), among them the ids.
        """
        rows = {name: column.detach().cpu() for name, column in rows.items()}
        self._merge(threat, rows)
        if self.folder is not None:
            self._check_place()
            name = f"{_safe(threat)}-{self.rank:05d}-{self._written:06d}.safetensors"
            save_tensors(self.folder / "parts" / name, rows, {"threat": threat, **_notes(rows)})
            self._written += 1

    def write_note(self, threat: str, stage: str, attempt: int | None, columns: Columns) -> None:
        """What a stage of an ensemble has decided about some images; on disk before this returns.

        `threat` and `stage` are descriptions; `attempt` is the last one that all these images survived, None where the
        stage is through with them; `columns` are what it decided, each (B, …).
        """
        if self.folder is None:
            return
        self._check_place()
        name = f"{_safe(threat)}-{self.rank:05d}-{self._noted:06d}.safetensors"
        about = {"threat": threat, "stage": stage, "attempt": json.dumps(attempt)}
        save_tensors(self.folder / NOTES / name, columns, {**about, **_notes(columns)})
        self._noted += 1

    def notes_of(self, threat: str) -> list[Note]:
        """What the stages of this `threat`, an ensemble, had decided when an earlier evaluation was interrupted."""
        return [note for note in self._earlier if note.threat == threat]

    def write_points(self, threat: str, columns: Columns) -> Path | None:
        """Worst points (B, …) of images; the file, where there is a folder.

        `threat` is its description; `columns` are the points and the ids of their images.
        """
        if self.folder is None:
            return None
        self._check_place()
        name = f"{_safe(threat)}-{self.rank:05d}-{self._noted:06d}.safetensors"
        save_tensors(self.folder / POINTS / name, columns, {"threat": threat})
        self._noted += 1
        return self.folder / POINTS / name

    def points_of(self, threat: str) -> Iterator[tuple[Path, Columns]]:
        """What `write_points` has written in an earlier evaluation, one file at a time."""
        for file in self._earlier_points:
            if not file.exists():  # its pool is done
                continue
            try:
                columns, about = load_tensors(file)
            except CheckpointError as error:
                _log.warning("%s The short search of its images starts from themselves.", error)
                continue
            if about["threat"] == threat:
                yield file, columns

    def _growing(self) -> list[Path]:
        """Folders of what is written while an evaluation runs."""
        assert self.folder is not None
        return [self.folder / name for name in ("parts", NOTES, POINTS)]

    def _number_after(self, file: Path, number: int) -> int:
        """The next free number of this process, where `number` was free before this file was seen."""
        rank, taken = map(int, file.stem.rsplit("-", 2)[1:])
        if rank != self.rank:
            return number
        return max(number, taken + 1)

    def _read_note(self, file: Path) -> None:
        self._noted = self._number_after(file, self._noted)
        try:
            columns, about = load_tensors(file)
        except CheckpointError as error:
            _log.warning("%s Its images are searched again.", error)
            return
        attempt = json.loads(about["attempt"])
        self._earlier.append(Note(about["threat"], about["stage"], attempt, _in_order(columns, about)))

    def join(self, others: Sequence[dict[str, Columns]]) -> None:
        """Take in rows from elsewhere; an image counts once.

        `others` are the columns of other processes, by threat.
        """
        for columns in others:
            for threat, rows in columns.items():
                self._merge(threat, rows)

    def rows(self, threat: str) -> Columns:
        """Columns of one `threat`, ordered by image."""
        columns = self.columns[threat]
        order = columns["id"].argsort()
        return {name: column[order] for name, column in columns.items()}

    def save(self) -> None:
        """All rows in one file, columns named `<threat>/<column>`; only then the parts go."""
        assert self.folder is not None
        self._check_place()
        named = {f"{t}/{name}": column for t in self.columns for name, column in self.rows(t).items()}
        save_tensors(self.folder / "ledger.safetensors", named, _notes(named))
        for folder in self._growing():
            for file in folder.glob("*.safetensors"):
                file.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Take the folder back if it was made for an evaluation that has judged nothing."""
        if self._made is not None and not self._holds_rows():
            self._made.take_back("ledger.json", IMAGES)

    def _check_place(self) -> None:
        """Refuse to go on in a folder that was moved or deleted since this evaluation began in it."""
        if self._claimed and self.folder is not None and not (self.folder / "ledger.json").exists():
            raise RunError(
                f"{self.folder} was moved or deleted while it was written to: ledger.json is gone. Move it back and "
                "call the same command again; it goes on where this one stopped."
            )
        if self._lock is not None:
            self._lock.check()

    def _compare(self, known: Mapping[str, Any], asked: Mapping[str, Any], file: Path) -> None:
        differing = [key for key in {**known, **asked} if known.get(key) != asked.get(key)]
        if differing:
            said = "; ".join(f"{key} was {known.get(key, 'not noted')}, now {asked.get(key)}" for key in differing[:3])
            raise RunError(f"{self.folder} holds the ledger of another evaluation: {said}. {ANEW}")
        if not file.exists() and self._holds_rows():
            raise RunError(f"{self.folder} holds rows, but no ledger.json says of what. {ANEW}")

    def _holds_rows(self) -> bool:
        if self.folder is None:
            return False
        if (self.folder / "ledger.safetensors").exists():
            return True
        return any(any(folder.glob("*")) for folder in self._growing())

    def _compare_revisions(self, known: Sequence[Entry], asked: Sequence[Entry]) -> None:
        revisions = {entry.spec: entry.revision for entry in asked}
        for entry in known:
            if revisions.get(entry.spec, entry.revision) != entry.revision:
                raise RunError(
                    f"{self.folder} holds rows of {entry.spec} made by an earlier form of that attack, whose defaults "
                    "were others (CHANGELOG.md, figures that change). Choose another folder, or delete that one."
                )

    def _merge(self, threat: str, rows: Columns) -> None:
        """Rows written by an older version may lack columns; of a threat all rows have the same ones."""
        known = self.columns.get(threat)
        if known is None:
            self.columns[threat] = rows
            return
        new = ~torch.isin(rows["id"], known["id"])
        self.columns[threat] = {name: torch.cat([known[name], rows[name][new]]) for name in known if name in rows}

    def _read_part(self, file: Path) -> None:
        self._written = self._number_after(file, self._written)
        try:
            rows, metadata = load_tensors(file)
            self._merge(metadata["threat"], _in_order(rows, metadata))
        except CheckpointError as error:
            _log.warning("%s Its images are judged again.", error)


def _entries(known: Mapping[str, Any], file: Path) -> list[Entry]:
    """The threats that a ledger.json names."""
    try:
        dict(known["subject"])
        return [Entry(**threat) for threat in known["threats"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file} is damaged: it does not say what was judged ({error}). {ANEW}") from error


def load_ledger(path: str | Path) -> dict[str, Columns]:
    """Columns by threat, from the one file `Ledger.save` writes, or from the folder it lies in.

    `path` is that file or folder.
    """
    if Path(path).is_dir():
        path = Path(path) / "ledger.safetensors"
    columns: dict[str, Columns] = {}
    for key, tensor in _in_order(*load_tensors(path)).items():
        threat, _, name = key.rpartition("/")
        columns.setdefault(threat, {})[name] = tensor
    return columns


def _notes(columns: Columns) -> dict[str, str]:
    """What a file says of its columns; their order too, which safetensors sort away: stages of an ensemble have one."""
    return {"columns": MEANINGS, "order": json.dumps(list(columns), ensure_ascii=False)}


def _in_order(columns: Columns, notes: Mapping[str, str]) -> Columns:
    known = [name for name in json.loads(notes.get("order", "[]")) if name in columns]
    return {name: columns[name] for name in dict.fromkeys([*known, *columns])}


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.=]+", "_", name)[:80]
