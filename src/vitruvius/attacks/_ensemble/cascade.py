"""A cascade: one attack after the other on the images that are still robust, and a record of which one broke which.

An image counts as broken only if its x' fools the float32 model, also when a faster view of it is searched: Auto-PGD
goes on there until its x' is confirmed. What is left is searched again in float32: shortly, from the worst point known;
then in full where another search may have stopped because only the view was fooled, and everywhere if the view is not
to be trusted: it is wrong about clean images, or the short search has broken more than a hundredth of the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from vitruvius._checks import check_logits
from vitruvius._dice import Dice
from vitruvius.attacks._base import Attack, Ensemble, Threat, Work, disturb
from vitruvius.attacks._ensemble.fast_facts import FastFacts
from vitruvius.attacks._ensemble.journal import Journal, OnEvent, StageEvent, StageWatch, StepWatch
from vitruvius.attacks._ensemble.result import CLEAN, ROBUST, Outcome, StageResult, stage_label
from vitruvius.attacks._losses import MARGIN
from vitruvius.attacks._models import CheckedModel, VerifiedView, logits_in_batches, unwrapped
from vitruvius.attacks._norms import per_image
from vitruvius.attacks._search.auto_pgd import AutoPGD
from vitruvius.attacks._search.watch import watched_by

MARGIN_ERRORS = 2  # mean errors of a view's logits within which it may have been fooled where the model is not
CLEAN_ERRORS = 0.05  # share of clean images a view may be wrong about before nothing it says is trusted
SURPRISES = 0.01  # share of images the short search may break before the full one must follow

Move = Callable[[Tensor], Tensor]  # rows → x' of these images
Claims = Callable[[Tensor, Tensor], Tensor]  # x', labels → whether a search may have stopped for the view alone


class Cascade:
    """The images, which of them are broken, and what has been tried.

    `model` judges images `x` (B, C, H, W) with labels `y` (B,) and `ids` (B,), `batch_size` at a time; default all.
    `on_event` is told how far the stages of `plan` are; `journal` keeps what they decide and knows what they decided
    before.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        ids: Tensor,
        batch_size: int | None,
        *,
        on_event: OnEvent | None = None,
        journal: Journal | None = None,
    ) -> None:
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
        self.plan: dict[str, Work] = {}  # the stages that may run, by label, and what each spends on an image
        self.spent = 0.0  # passes of a batch through the model
        self.on_event = on_event
        self.journal = journal
        self.facts = FastFacts(None, ids)  # of a faster view
        self._claims: Claims | None = None  # of the stage that runs
        begun = time.perf_counter()
        wrong = self._misclassified(x, y)
        self.broken_by = torch.where(wrong, CLEAN, ROBUST)
        if journal is not None and wrong.any():
            journal.settle("clean", ids[wrong].cpu(), x[wrong], y[wrong], wrong[wrong])
        self._record("clean", "exact", len(x), int(wrong.sum()), begun)

    @property
    def is_first_search(self) -> bool:
        """Whether the first attack is running, of which the worst point of every image is kept."""
        return len(self.stages) == 1

    def count_robust(self) -> int:
        return int((self.broken_by == ROBUST).sum())

    def event(self, stage: str, *, to_search: int, finished: bool = False) -> StageEvent:
        """How far the cascade is as a stage, by its label, begins or ends."""
        number = self._number(stage)
        robust = self.count_robust()
        searched = 0
        left = self.passes_left(stage, 0, robust)
        if finished:
            searched = to_search
        else:
            left += self._at_most(stage, robust)
        return StageEvent(
            stage=stage,
            number=number,
            stages=max(len(self.plan), number),
            spent=self.spent,
            left=left,
            attempt=1,
            attempts=1,
            searched=searched,
            to_search=to_search,
            robust=robust,
            images=len(self.x),
            finished=finished,
        )

    def count_step(self, stage: str) -> None:
        """A batch has made one more step in a stage."""
        self.spent += self.plan.get(stage, Work()).passes

    def passes_left(self, stage: str, steps: int, robust: int) -> float:
        """Passes of a batch that follow at most: `steps` of this stage, then all later ones on the `robust` images."""
        later = sum(self._at_most(label, robust) for label in list(self.plan)[self._number(stage) :])
        return steps * self.plan.get(stage, Work()).passes + later

    def _number(self, stage: str) -> int:
        """Of a stage, from 1."""
        if stage in self.plan:
            return list(self.plan).index(stage) + 1
        return len(self.stages)

    def _at_most(self, stage: str, robust: int) -> float:
        """How many passes of a batch a stage takes on the images that are robust now; attempts may run side by side."""
        if not robust:
            return 0.0
        return self.plan.get(stage, Work()).total * math.ceil(robust / self.batch_size)

    def tell(self, event: StageEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)

    def run(self, name: str, threat: Threat, model: nn.Module) -> None:
        """Search with a threat on the images that are robust so far."""
        self._run(name, "exact", self._search(threat, model), self._robust_rows(), threat)

    def measure_view(self, view: nn.Module) -> None:
        """Compare a faster view with the model on clean images: how wrong are its logits, and its labels?

        After a kill that is known, as are the worst points and the claims of stages that had run.
        """
        self.facts = FastFacts(self.journal, self.ids)
        known = self.facts.known_view()
        if known is not None:
            self.view_error, self.view_trusted = known
            rows, points = self.facts.known_points()
            self.found[rows.to(self.x.device)] = points.to(self.x)
            self.claimed[self.facts.known_claims().to(self.x.device)] = True
            return
        rows = self._robust_rows()[: self.batch_size]
        if not len(rows):
            return
        logits = logits_in_batches(self.model, self.x[rows])
        seen = logits_in_batches(unwrapped(view), self.x[rows])
        wrong = (seen.argmax(1) != self.y[rows]).float().mean()
        self.view_error = MARGIN_ERRORS * float((seen - logits).abs().amax(1).mean())
        self.view_trusted = float(wrong) <= CLEAN_ERRORS
        self.facts.keep_view(self.view_error, trusted=self.view_trusted)

    def run_fast(self, name: str, threat: Threat, view: VerifiedView) -> None:
        """Search on a faster view of the model, and note the images it gave up too soon: where only it was fooled."""

        def claims(moved: Tensor, y: Tensor) -> Tensor:
            logits = logits_in_batches(unwrapped(view), moved, self.batch_size)
            return MARGIN(logits, y) > -self.view_error

        if not isinstance(threat, AutoPGD):  # which goes on until the model is fooled
            self._claims = claims
        self._run(name, "fast", self._search(threat, view), self._robust_rows(), threat)
        self._claims = None

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
        before = int((~self.facts.broken_before(f"{name} (polish)")).sum())
        surprises = int((~robust & ~claimed).sum()) + before
        if self.view_trusted and surprises <= SURPRISES * (int((~claimed).sum()) + before):
            return rows[robust & claimed]
        return rows[robust]

    def _search(self, threat: Threat, model: nn.Module) -> Move:
        return lambda rows: disturb(threat, model, self.x[rows], self.y[rows], self.ids[rows])

    def _robust_rows(self) -> Tensor:
        return (self.broken_by == ROBUST).nonzero().squeeze(1)

    def _run(self, name: str, search: str, move: Move, rows: Tensor, threat: Threat) -> None:
        """Move images, all at once if the threat makes batches by itself, and see which ones are broken."""
        begun = time.perf_counter()
        label = stage_label(name, search)
        if self.journal is not None and len(rows):
            survived = self.journal.survivors(label, self.ids[rows].cpu())
            rows = rows[~survived.to(rows.device)]
        robust = self.count_robust()
        self.tell(self.event(label, to_search=len(rows)))
        portions = [part for part in rows.split(self._portion(threat)) if len(part)]
        for number, part in enumerate(portions, 1):
            watch = StageWatch(self, label, part, len(portions) - number)
            with self._watched(threat, watch):
                moved = move(part)
            watch.close(moved)
        self.tell(self.event(label, to_search=len(rows), finished=True))
        self._record(name, search, len(rows), robust - self.count_robust(), begun)

    def _watched(self, threat: Threat, watch: StageWatch) -> AbstractContextManager[None]:
        """Our own searches are watched; of others only steps, since what they call may be about other images."""
        if _batches_itself(threat):
            return watched_by(watch)
        return watched_by(StepWatch(watch))

    def _portion(self, threat: Threat) -> int:
        """Images given to a threat at once: all if it makes batches by itself."""
        if isinstance(threat, Ensemble) or _batches_itself(threat):
            return max(len(self.x), 1)
        return self.batch_size

    def judge(self, stage: str, moved: Tensor, rows: Tensor) -> None:
        """Keep what fools the model, from the first stage everything."""
        broken = self._misclassified(moved, self.y[rows])
        keep = broken | self.is_first_search
        self.found[rows] = torch.where(per_image(keep, moved), moved, self.found[rows])
        self.broken_by[rows[broken]] = len(self.stages)
        if self._claims is not None:
            self.claimed[rows] |= self._claims(moved, self.y[rows])
        if self.journal is not None:
            self._keep_facts(stage, moved, rows, broken)
            self.journal.settle(stage, self.ids[rows].cpu(), moved, self.y[rows], broken)

    def _keep_facts(self, stage: str, moved: Tensor, rows: Tensor, broken: Tensor) -> None:
        """Before the decision is, so that a kill between the two loses nothing."""
        ids = self.ids[rows].cpu()
        if stage.endswith("(fast)"):
            self.facts.keep_claims(ids[(self.claimed[rows] & ~broken).cpu()])
            if self.is_first_search:
                self.facts.keep_points(ids[~broken.cpu()], moved[~broken])
        elif stage.endswith("(polish)"):
            self.facts.keep_broken(stage, ids[broken.cpu()], self.claimed[rows[broken]])

    def _misclassified(self, x: Tensor, y: Tensor) -> Tensor:
        logits = logits_in_batches(self.model, x, self.batch_size)
        check_logits(logits, len(x))
        return logits.argmax(1) != y

    def _record(self, name: str, search: str, searched: int, broken: int, begun: float) -> None:
        self.stages.append(StageResult(name, search, searched, broken, time.perf_counter() - begun))


def _batches_itself(threat: Threat) -> bool:
    return isinstance(threat, Attack) and threat.batches_itself
