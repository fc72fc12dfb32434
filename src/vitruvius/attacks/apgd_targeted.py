"""Auto-PGD toward the likeliest wrong classes, one after the other (Croce & Hein 2020, arXiv:2003.01690, section 5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from vitruvius.attacks._base import Model, attacks
from vitruvius.attacks._losses import TARGETED_DLR, TargetedLoss, as_targeted_loss
from vitruvius.attacks._search.auto_pgd import AutoPGD, Run
from vitruvius.attacks._search.targets import clean_logits, likeliest


@attacks.register("apgd_targeted")
@dataclass(frozen=True, kw_only=True)
class APGDTargeted(AutoPGD):
    """Auto-PGD toward each of the likeliest wrong classes; dlr or margin loss."""

    targets: int = 9  # wrong classes tried; fewer where the model has fewer
    loss: TargetedLoss = TARGETED_DLR

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "loss", as_targeted_loss(self.loss))

    def objective(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        return self.loss(logits, y, target)

    def runs(self, model: Model, x: Tensor, y: Tensor) -> Iterator[Run]:
        for rank, target in enumerate(likeliest(clean_logits(model, x, self.batch_size), y, self.targets).T):
            for restart in range(self.restarts):
                yield Run(rank * self.restarts + restart, target)

    def tag(self) -> str:
        return f"apgd-targeted-{self.loss}"
