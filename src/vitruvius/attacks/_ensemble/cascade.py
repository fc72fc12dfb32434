"""A cascade: one attack after the other on the images that are still robust, and a record of which one broke which.

An image counts as broken only if its x' fools the float32 model, also when a faster view of it is searched: Auto-PGD
goes on there until its x' is confirmed. What is left is searched again in float32: shortly, from the worst point known;
then in full where another search may have stopped because only the view was fooled, and everywhere if the view is not
to be trusted: it is wrong about clean images, or the short search has broken more than a hundredth of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitruvius._checks import check_logits
from vitruvius._dice import Dice
from vitruvius.attacks._base import Attack, Ensemble, Threat, disturb
from vitruvius.attacks._ensemble.result import CLEAN, ROBUST, Outcome, StageResult
from vitruvius.attacks._losses import MARGIN
from vitruvius.attacks._models import CheckedModel, VerifiedView, logits_in_batches, unwrapped
from vitruvius.attacks._norms import per_image
from vitruvius.attacks._search.auto_pgd import AutoPGD

MARGIN_ERRORS = 2  # mean errors of a view's logits within which it may have been fooled where the model is not
CLEAN_ERRORS = 0.05  # share of clean images a view may be wrong about before nothing it says is trusted
SURPRISES = 0.01  # share of images the short search may break before the full one must follow

Move = Callable[[Tensor], Tensor]  # rows → x' of these images


class Cascade:
    """The images, which of them are broken, and what has been tried.

    `model` judges images `x` (B, C, H, W) with labels `y` (B,) and `ids` (B,), `batch_size` at a time; default all.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor, batch_size: int | None) -> None:
        self.model = model
        self.x = x
        self.y = y
        self.ids = ids
        self.batch_size = batch_size or max(len(x), 1)
        self.found = x.clone()  # x' of the broken; for the others the worst point of the first stage
        self.claimed = torch.zeros_like(y, dtype=torch.bool)  # images that fooled a faster view of the model
        self.view_error = 0.0  # of a faster view's logits
        self.view_trusted = True
        self.stages: list[StageResult] = []
        begun = time.perf_counter()
        wrong = self._misclassified(x, y)
        self.broken_by = torch.where(wrong, CLEAN, ROBUST)
        self._record("clean", "exact", len(x), int(wrong.sum()), begun)

    def run(self, name: str, threat: Threat, model: nn.Module) -> None:
        """Search with a threat on the images that are robust so far."""
        self._run(name, "exact", self._search(threat, model), self._robust_rows(), threat)

    def measure_view(self, view: nn.Module) -> None:
        """Compare a faster view with the model on clean images: how wrong are its logits, and its labels?"""
        rows = self._robust_rows()[: self.batch_size]
        if not len(rows):
            return
        logits = logits_in_batches(self.model, self.x[rows])
        seen = logits_in_batches(unwrapped(view), self.x[rows])
        wrong = (seen.argmax(1) != self.y[rows]).float().mean()
        self.view_error = MARGIN_ERRORS * float((seen - logits).abs().amax(1).mean())
        self.view_trusted = float(wrong) <= CLEAN_ERRORS

    def run_fast(self, name: str, threat: Threat, view: VerifiedView) -> None:
        """Search on a faster view of the model, and note the images it gave up too soon: where only it was fooled."""
        search = self._search(threat, view)
        enough = -self.view_error
        if isinstance(threat, AutoPGD):  # goes on until the model is fooled
            enough = torch.inf

        def move(rows: Tensor) -> Tensor:
            moved = search(rows)
            logits = logits_in_batches(unwrapped(view), moved, self.batch_size)
            self.claimed[rows] |= MARGIN(logits, self.y[rows]) > enough
            return moved

        self._run(name, "fast", move, self._robust_rows(), threat)

    def confirm(self, name: str, threat: Threat, model: nn.Module) -> None:
        """After a fast search: shortly, then in full where that search is not to be trusted."""
        rows = self._robust_rows()
        if isinstance(threat, Attack):
            rows = self._polish(name, threat, model, rows)
        if len(rows):
            self._run(name, "exact", self._search(threat, model), rows, threat)

    def outcome(self) -> Outcome:
        return Outcome(self.found, self.broken_by, tuple(self.stages))

    def _polish(self, name: str, attack: Attack, model: nn.Module, rows: Tensor) -> Tensor:
        """Search shortly from the worst points known; the images that need the full search."""

        def move(part: Tensor) -> Tensor:
            dice = Dice(self.ids[part], attack.seed, attack.tag())
            checked = CheckedModel(model, self.y[part])
            moved = attack.polish(checked, self.x[part], self.y[part], dice, self.found[part])
            checked.check_finite(moved)
            return moved

        self._run(name, "polish", move, rows, attack)
        robust = self.broken_by[rows] == ROBUST
        claimed = self.claimed[rows]
        surprises = int((~robust & ~claimed).sum())
        if self.view_trusted and surprises <= SURPRISES * int((~claimed).sum()):
            return rows[robust & claimed]
        return rows[robust]

    def _search(self, threat: Threat, model: nn.Module) -> Move:
        return lambda rows: disturb(threat, model, self.x[rows], self.y[rows], self.ids[rows])

    def _robust_rows(self) -> Tensor:
        return (self.broken_by == ROBUST).nonzero().squeeze(1)

    def _run(self, name: str, search: str, move: Move, rows: Tensor, threat: Threat) -> None:
        """Move images, all at once if the threat makes batches by itself, and see which ones are broken."""
        begun = time.perf_counter()
        portion = self.batch_size
        if isinstance(threat, Ensemble) or (isinstance(threat, Attack) and threat.batches_itself):
            portion = max(len(self.x), 1)
        broken = 0
        for part in rows.split(portion):
            if len(part):
                broken += self._judge(move(part), part)
        self._record(name, search, len(rows), broken, begun)

    def _judge(self, moved: Tensor, rows: Tensor) -> int:
        """Keep what fools the model, from the first stage everything; how many images were broken."""
        broken = self._misclassified(moved, self.y[rows])
        is_first = len(self.stages) == 1
        self.found[rows] = torch.where(per_image(broken | is_first, moved), moved, self.found[rows])
        self.broken_by[rows[broken]] = len(self.stages)
        return int(broken.sum())

    def _misclassified(self, x: Tensor, y: Tensor) -> Tensor:
        logits = logits_in_batches(self.model, x, self.batch_size)
        check_logits(logits, len(x))
        return logits.argmax(1) != y

    def _record(self, name: str, search: str, searched: int, broken: int, begun: float) -> None:
        self.stages.append(StageResult(name, search, searched, broken, time.perf_counter() - begun))
