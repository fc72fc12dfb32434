"""Auto-PGD toward the likeliest wrong classes, one after the other (Croce & Hein 2020, arXiv:2003.01690, section 5)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from vitruvius.attacks._models import logits_in_batches
from vitruvius.attacks.apgd import AutoPGD
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

    def targets_of(self, model: Model, x: Tensor, y: Tensor) -> Iterable[Tensor]:
        return likeliest_classes(logits_in_batches(model, x, self.batch_size), y, self.targets).T

    def _name_of_dice(self) -> str:
        return f"apgd-targeted-{self.loss}"
