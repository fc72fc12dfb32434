"""The journal of an ensemble, kept in a ledger: a kill loses at most one batch of one stage.

An image that a stage breaks is final, so its row goes into the ledger at once. Of the others it is noted which stages,
and which attempts of a stage, they have survived; and how the model answers to the worst point of the first stage,
which is the row of an image that nothing breaks. Notes lie in the folder `stages` until the evaluation has finished;
worst points, which a search on a faster view starts from again, in the folder `points` until their pool is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vitruvius.evaluation.ledger import AFTER, DRAWS_RIGHT, POINTS, Columns, Ledger

Answer = Callable[[Tensor, Tensor], Columns]  # images, labels → what the model answers
NOTHING = torch.empty(0, dtype=torch.int64)
FACT = "fact: "  # before the names of facts, where names of stages stand otherwise


class LedgerJournal:
    """What the stages of one ensemble have decided about the images of one ledger; see `vitruvius.attacks.Journal`.

    ledger, threat: where rows go. stages: names in order, without `clean`. answer: what the model says of images.
    note_size: images that are noted together. pool: ids of all images that run together, whether decided or not.
    """

    def __init__(
        self, ledger: Ledger, threat: str, stages: Sequence[str], answer: Answer, note_size: int, pool: Tensor
    ) -> None:
        self.ledger = ledger
        self.threat = threat
        self.names = ["clean", *stages]
        self.answer = answer
        self.note_size = note_size
        self.pool = pool.cpu()
        self.survived: dict[str, Tensor] = {}  # stage → ids
        self.made: dict[str, dict[int, int]] = {}  # stage → id → attempts made in vain
        self.answers: Columns = {}  # to the worst points of the first stage
        self.facts: dict[str, list[Columns]] = {}
        self.point_files: list[Path] = []  # which go with the pool
        self._waiting: tuple[str, int, list[Tensor]] | None = None  # attempts that are not on disk yet
        self._clock = time.perf_counter()
        for note in ledger.notes_of(threat):
            self._remember(note.stage, note.attempt, note.columns)

    def survivors(self, stage: str, ids: Tensor) -> Tensor:
        return torch.isin(ids, self.survived.get(stage, NOTHING))

    def attempts_made(self, stage: str, ids: Tensor) -> Tensor:
        made = self.made.get(stage, {})
        return torch.tensor([made.get(number, 0) for number in ids.tolist()], dtype=torch.int64)

    def settle(self, stage: str, ids: Tensor, x: Tensor, y: Tensor, broken: Tensor) -> None:
        """Rows for what is broken, notes for what has survived."""
        self._flush()
        known = broken.cpu()
        if known.any():
            rows = {"id": ids[known], "label": y[broken], **self.answer(x[broken], y[broken])}
            self._add(rows, self.names.index(stage))
        if known.all():
            return
        columns: Columns = {"id": ids[~known]}
        if stage == self.names[1]:
            columns |= {"label": y[~broken].cpu(), **_on_cpu(self.answer(x[~broken], y[~broken]))}
        self._note(stage, None, columns)

    def attempted(self, stage: str, attempt: int, ids: Tensor) -> None:
        if self._waiting is not None and self._waiting[:2] != (stage, attempt):
            self._flush()
        if self._waiting is None:
            self._waiting = (stage, attempt, [])
        self._waiting[2].append(ids)
        if sum(map(len, self._waiting[2])) >= self.note_size:
            self._flush()

    def keep(self, kind: str, ids: Tensor, columns: Mapping[str, Tensor]) -> None:
        """On disk at once; points in files of their own, and only there."""
        facts = {"id": ids, **columns}
        if kind == POINTS:
            file = self.ledger.write_points(self.threat, facts)
            if file is not None:
                self.point_files.append(file)
        else:
            self._note(FACT + kind, None, facts)

    def recall(self, kind: str) -> Columns:
        parts = self.facts.get(FACT + kind, [])
        if kind == POINTS:
            parts = self._earlier_points()
        if not parts:
            return {}
        facts = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return _first_of_each(facts, self.pool)

    def _earlier_points(self) -> list[Columns]:
        """Of an earlier run, as far as they are of this pool."""
        parts = []
        for file, columns in self.ledger.points_of(self.threat):
            mine = torch.isin(columns["id"], self.pool)
            if mine.all():
                self.point_files.append(file)
            if mine.any():
                parts.append({name: column[mine] for name, column in columns.items()})
        return parts

    def finish(self, ids: Tensor) -> None:
        """All stages have run on these images: those without a row are robust."""
        self._waiting = None
        self._finish_rows(ids)
        for file in self.point_files:
            file.unlink(missing_ok=True)

    def _finish_rows(self, ids: Tensor) -> None:
        if not self.answers:
            return
        robust = torch.isin(self.answers["id"], ids) & ~torch.isin(self.answers["id"], self.ledger.done(self.threat))
        if robust.any():
            self._add({name: column[robust] for name, column in self.answers.items()}, len(self.names))

    def _add(self, rows: Columns, broken_by: int) -> None:
        """Rows of images that are broken by a stage, or by none where its number is beyond the last."""
        count = len(rows["id"])
        now = time.perf_counter()
        seconds = torch.full((count,), (now - self._clock) / count)
        self._clock = now
        after = {f"{AFTER}{name}": torch.full((count,), number < broken_by) for number, name in enumerate(self.names)}
        if DRAWS_RIGHT in rows and broken_by < len(self.names):  # another draw may be right where one was fooled
            rows["correct"] = torch.zeros_like(rows["correct"])
        own = {name: rows.pop(name) for name in ("id", "label")}
        self.ledger.add(self.threat, {**own, "seconds": seconds, **rows, **after})

    def _flush(self) -> None:
        if self._waiting is not None:
            stage, attempt, ids = self._waiting
            self._waiting = None
            self._note(stage, attempt, {"id": torch.cat(ids)})

    def _note(self, stage: str, attempt: int | None, columns: Columns) -> None:
        self._remember(stage, attempt, columns)
        self.ledger.write_note(self.threat, stage, attempt, columns)

    def _remember(self, stage: str, attempt: int | None, columns: Columns) -> None:
        ids = columns["id"]
        if stage.startswith(FACT):
            self.facts.setdefault(stage, []).append(columns)
            return
        if attempt is not None:
            made = self.made.setdefault(stage, {})
            for number in ids.tolist():
                made[number] = max(made.get(number, 0), attempt + 1)
            return
        self.survived[stage] = torch.cat([self.survived.get(stage, NOTHING), ids])
        if len(columns) > 1:
            self._remember_answers(columns)

    def _remember_answers(self, columns: Columns) -> None:
        """Columns that only some notes have are left out, as the ledger does."""
        if not self.answers:
            self.answers = dict(columns)
            return
        shared = [name for name in self.answers if name in columns]
        self.answers = {name: torch.cat([self.answers[name], columns[name]]) for name in shared}


def _first_of_each(columns: Columns, pool: Tensor) -> Columns:
    """What was said first of each image of the pool."""
    seen: set[int] = set()
    wanted = set(pool.tolist())
    rows = []
    for row, number in enumerate(columns["id"].tolist()):
        if number in wanted and number not in seen:
            seen.add(number)
            rows.append(row)
    return {name: column[rows] for name, column in columns.items()}


def _on_cpu(columns: Columns) -> Columns:
    return {name: column.detach().cpu() for name, column in columns.items()}
