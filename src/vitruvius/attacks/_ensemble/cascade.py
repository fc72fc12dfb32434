"""A siege: one attack after the other on the images that still stand, and a record of who brought each one down.

An image counts as fallen only if its x' fools the float32 model, also when a faster view of it is searched: Auto-PGD
goes on there until its x' is confirmed. What stands is searched again in float32: shortly, from the worst point known;
then in full where another search may have stopped because only the view was fooled, and everywhere if the view is not
to be trusted: it is wrong about untouched images, or the short search has felled more than a hundredth of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitruvius._dice import Dice
from vitruvius._errors import DataError
from vitruvius.attacks._base import Attack, Threat, disturb
from vitruvius.attacks._ensemble.result import CLEAN, ROBUST, Outcome, StageResult
from vitruvius.attacks._losses import MARGIN
from vitruvius.attacks._models import VerifiedView, unwrapped
from vitruvius.attacks._norms import per_image
from vitruvius.attacks._search.auto_pgd import AutoPGD
from vitruvius.attacks._search.targets import clean_logits

DOUBTS = 2  # mean errors of a view's logits within which it may have been fooled where the model is not
SIGHT = 0.05  # share of untouched images a view may be wrong about before nothing it says is trusted
TRUST = 0.01  # share of images the short search may fell before the full one must follow


class Cascade:
    """The images, where they stand, and what has been tried."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor, batch_size: int | None) -> None:
        self.model, self.x, self.y, self.ids = model, x, y, ids
        self.batch_size = batch_size or max(len(x), 1)
        self.found = x.clone()  # x' of the fallen; for the others the worst point of the first stage
        self.claimed = torch.zeros_like(y, dtype=torch.bool)  # images that fooled a faster view of the model
        self.doubt, self.trusts = 0.0, True  # in a faster view: error of its logits; whether it is worth anything
        self.stages: list[StageResult] = []
        begun = time.perf_counter()
        wrong = self._wrong(x, y)
        self.broken_by = torch.where(wrong, CLEAN, ROBUST)
        self._record("clean", "exact", len(x), int(wrong.sum()), begun)

    def run(self, name: str, threat: Threat, model: nn.Module) -> None:
        """Search with a threat on the images that stand."""
        self._run(name, "exact", self._search(threat, model), self._unbroken(), threat)

    def measure_view(self, view: nn.Module) -> None:
        """Compare a faster view with the model on untouched images: how wrong are its logits, and its labels?"""
        rows = self._unbroken()[: self.batch_size]
        if len(rows):
            logits, seen = (clean_logits(model, self.x[rows]) for model in (self.model, unwrapped(view)))
            self.doubt = DOUBTS * float((seen - logits).abs().amax(1).mean())
            self.trusts = float((seen.argmax(1) != self.y[rows]).float().mean()) <= SIGHT

    def run_fast(self, name: str, threat: Threat, view: VerifiedView) -> None:
        """Search on a faster view of the model, and note the images it gave up too soon: where only it was fooled."""
        search = self._search(threat, view)
        enough = torch.inf if isinstance(threat, AutoPGD) else -self.doubt  # Auto-PGD goes on until the model is fooled

        def move(rows: Tensor) -> Tensor:
            moved = search(rows)
            self.claimed[rows] |= MARGIN(clean_logits(unwrapped(view), moved, self.batch_size), self.y[rows]) > enough
            return moved

        self._run(name, "fast", move, self._unbroken(), threat)

    def confirm(self, name: str, threat: Threat, model: nn.Module) -> None:
        """After a fast search: shortly, then in full where that search is not to be trusted."""
        doubtful = self._unbroken()
        if isinstance(threat, Attack):
            doubtful = self._polish(name, threat, model, doubtful)
        if len(doubtful):
            self._run(name, "exact", self._search(threat, model), doubtful, threat)

    def outcome(self) -> Outcome:
        return Outcome(self.found, self.broken_by, tuple(self.stages))

    def _polish(self, name: str, attack: Attack, model: nn.Module, rows: Tensor) -> Tensor:
        """Search shortly from the worst points known; the images that need the full search."""

        def move(part: Tensor) -> Tensor:
            dice = Dice(self.ids[part], attack.seed, attack.tag())
            return attack.polish(model, self.x[part], self.y[part], dice, self.found[part])

        self._run(name, "polish", move, rows, attack)
        standing, claimed = self.broken_by[rows] == ROBUST, self.claimed[rows]
        surprises, others = int((~standing & ~claimed).sum()), int((~claimed).sum())
        trusted = self.trusts and surprises <= TRUST * others
        return rows[standing & claimed] if trusted else rows[standing]

    def _search(self, threat: Threat, model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda rows: disturb(threat, model, self.x[rows], self.y[rows], self.ids[rows])

    def _unbroken(self) -> Tensor:
        return (self.broken_by == ROBUST).nonzero().squeeze(1)

    def _run(self, name: str, search: str, move: Callable[[Tensor], Tensor], rows: Tensor, threat: Threat) -> None:
        """Move images, all at once if the threat makes batches by itself, and see which ones fall."""
        begun, portion = time.perf_counter(), len(self.x) if hasattr(threat, "batch_size") else self.batch_size
        fallen = sum(self._judge(move(part), part) for part in rows.split(max(portion, 1)) if len(part))
        self._record(name, search, len(rows), fallen, begun)

    def _judge(self, moved: Tensor, rows: Tensor) -> int:
        fallen, first = self._wrong(moved, self.y[rows]), len(self.stages) == 1
        self.found[rows] = torch.where(per_image(fallen | first, moved), moved, self.found[rows])
        self.broken_by[rows[fallen]] = len(self.stages)
        return int(fallen.sum())

    def _wrong(self, x: Tensor, y: Tensor) -> Tensor:
        logits = clean_logits(self.model, x, self.batch_size)
        if logits.isnan().any():
            raise DataError(f"the model returned {int(logits.isnan().sum())} NaN logits; check its weights.")
        return logits.argmax(1) != y

    def _record(self, name: str, search: str, searched: int, fallen: int, begun: float) -> None:
        self.stages.append(StageResult(name, search, searched, fallen, time.perf_counter() - begun))
