"""A pool: the images that an ensemble is given together, their rows as its stages end, and how it resumes after a kill.

What a stage breaks is final, so its rows go into the ledger when the stage ends; then it is noted which stages the pool
is through with, and which images have fooled a faster view. The worst points of the first stage, which later searches
start from and which the row of an image that nothing breaks is about, are written once. B images.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from vitruvius.attacks.base import ROBUST, Outcome, StageResult
from vitruvius.evaluation.base import DRAWS_RIGHT, Batch, Columns
from vitruvius.evaluation.ledger import AFTER, POINTS, STAGES, Ledger

Answer = Callable[[Tensor, Tensor], Columns]  # images, labels → what the model answers


class Pool:
    """The images of a batch, some of which may have their rows already.

    ledger, threat: where rows go. batch: images (B, …), labels (B,) and ids (B,). answer: what the model says of some.
    """

    def __init__(self, ledger: Ledger, threat: str, batch: Batch, answer: Answer) -> None:
        self.ledger = ledger
        self.threat = threat
        self.answer = answer
        self.pool = batch[2]
        self.x, self.y, self.ids = batch
        self.start = self._read()
        if self.start is None:
            self._take(~torch.isin(self.ids, ledger.done(threat)))
        self._clock = time.perf_counter()

    def write(self, outcome: Outcome) -> None:
        """A stage has ended: rows for what it has broken, then the note that the pool is through with it."""
        self._add_rows(outcome, (outcome.broken_by != ROBUST).cpu() & self._missing())
        if len(outcome.stages) == 2:
            row = outcome.robust.nonzero().squeeze(1)
            points = {"pool": self.pool, "row": row, "point": outcome.x[row]}
            self.ledger.write_pool(self.threat, POINTS, points, {})
        fooled = torch.zeros_like(outcome.robust) if outcome.view_fooled is None else outcome.view_fooled
        columns = {"pool": self.pool, "id": self.ids, "broken_by": outcome.broken_by, "view_fooled": fooled}
        about = {
            "stages": outcome.stages, "plan": outcome.plan,
            "view_error": outcome.view_error, "view_trusted": outcome.view_trusted,
        }  # fmt: skip
        self.ledger.write_pool(self.threat, STAGES, columns, about)

    def finish(self, outcome: Outcome) -> None:
        """All stages have ended: rows for the images that are left."""
        self._add_rows(outcome, self._missing())
        self.ledger.forget_pool(self.threat, self.pool)

    def _take(self, chosen: Tensor) -> None:
        """From now on only some of the images, (B,) bool on the CPU."""
        rows = chosen.to(self.x.device)
        self.x, self.y, self.ids = self.x[rows], self.y[rows], self.ids[chosen]

    def _missing(self) -> Tensor:
        """(B,) bool: images without a row."""
        return ~torch.isin(self.ids, self.ledger.done(self.threat))

    def _add_rows(self, outcome: Outcome, chosen: Tensor) -> None:
        if not chosen.any():
            return
        rows = chosen.to(self.x.device)
        columns = self.answer(outcome.x[rows], self.y[rows])
        broken_by = outcome.broken_by.cpu()[chosen]
        if DRAWS_RIGHT in columns:  # another draw may be right where one was fooled
            columns["correct"] = columns["correct"].cpu() & (broken_by == ROBUST)
        now = time.perf_counter()
        seconds = torch.full((len(broken_by),), (now - self._clock) / len(broken_by))
        self._clock = now
        stood = outcome.robust_by_stage()
        if outcome.plan:
            stood = {label: outcome.robust | (outcome.broken_by > number) for number, label in enumerate(outcome.plan)}
        after = {f"{AFTER}{label}": robust.cpu()[chosen] for label, robust in stood.items()}
        about = {"id": self.ids[chosen], "label": self.y[rows], "seconds": seconds}
        self.ledger.add(self.threat, {**about, **columns, **after})

    def _read(self) -> Outcome | None:
        """What an interrupted ensemble has found about these images; None where it must begin with those without rows.

        It must begin where images were pooled otherwise, or where a file was damaged.
        """
        note = self.ledger.read_pool(self.threat, STAGES, self.pool)
        points = self.ledger.read_pool(self.threat, POINTS, self.pool)
        if note is None:
            return None
        columns, about = note
        chosen = torch.isin(self.pool, columns["id"])
        in_first_stage = len(about["stages"]) == 1
        if (points is None and not in_first_stage) or (self._missing() & ~chosen).any():
            return None
        broken_by, has_row = self._broken_by_rows(columns["id"], about["plan"])
        if ((columns["broken_by"] != ROBUST) & ~has_row).any():
            return None
        self._take(chosen)
        x = self.x.clone()
        if points is not None and not in_first_stage:
            x[points[0]["row"].to(x.device)] = points[0]["point"].to(x)
        return Outcome(
            x=x,
            broken_by=torch.where(has_row, broken_by, columns["broken_by"]).to(x.device),
            stages=tuple(StageResult(*stage) for stage in about["stages"]),
            plan=tuple(about["plan"]),
            view_fooled=columns["view_fooled"].to(x.device),
            view_error=about["view_error"],
            view_trusted=about["view_trusted"],
        )

    def _broken_by_rows(self, ids: Tensor, plan: list[str]) -> tuple[Tensor, Tensor]:
        """(n,) the stage that has broken each image by the rows of the ledger, and whether it has a row."""
        broken_by = torch.full_like(ids, ROBUST)
        rows = self.ledger.columns.get(self.threat)
        if rows is None:
            return broken_by, torch.zeros_like(ids, dtype=torch.bool)
        number = torch.stack([rows[f"{AFTER}{label}"] for label in plan]).sum(0)  # of stages that it stood
        stage = dict(zip(rows["id"].tolist(), number.tolist(), strict=True))
        found = torch.tensor([stage.get(image, len(plan)) for image in ids.tolist()])
        return torch.where(found < len(plan), found, ROBUST), torch.isin(ids, rows["id"])
