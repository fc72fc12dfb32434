"""Auto-PGD toward the likeliest wrong classes, one after the other (Croce & Hein 2020, arXiv:2003.01690, section 5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from vitruvius.attacks._models import logits_in_batches
from vitruvius.attacks.apgd import Attempt, AutoPGD
from vitruvius.attacks.base import Model, attacks
from vitruvius.attacks.losses import TARGETED_DLR, TargetedLoss, likeliest_classes


@attacks.register("apgd_targeted")
@dataclass(frozen=True, kw_only=True)
class APGDTargeted(AutoPGD):
    """Auto-PGD toward each of the likeliest wrong classes; dlr or margin loss.

    Settings beside eps, norm and seed:
    `targets`: wrong classes tried; fewer where the model has fewer.
    `steps`, `restarts`: of the ascent toward each of them.
    `eot_iterations`: passes averaged for each gradient, for models that are random.
    `loss`: dlr or margin.
    `batch_size`: images searched at once; default all.
    `compile`: the model, and the bookkeeping in linf and l2, by torch.compile.
    `precision`: of the search: exact, fast or auto, as for autoattack.
    """

    targets: int = 9
    loss: TargetedLoss = TARGETED_DLR

    def objective(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        return self.loss(logits, y, target)

    def attempts(self, model: Model, x: Tensor, y: Tensor) -> Iterator[Attempt]:
        for rank, target in enumerate(self.choose_targets(model, x, y).T):
            for restart in range(self.restarts):
                yield Attempt(rank * self.restarts + restart, target)

    def choose_targets(self, model: Model, x: Tensor, y: Tensor) -> Tensor:
        """(B, T) wrong classes, in the order in which they are tried."""
        return likeliest_classes(logits_in_batches(model, x, self.batch_size), y, self.targets)

    def _name_of_dice(self) -> str:
        return f"apgd-targeted-{self.loss}"
