"""Auto-PGD on an untargeted loss (Croce & Hein 2020, arXiv:2003.01690; L1: 2021, arXiv:2103.01208)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.attacks._auto_pgd import Attempt, AutoPGD
from vitruvius.attacks.base import Model, attacks
from vitruvius.attacks.losses import CE, KL, Loss, as_loss


@attacks.register("apgd")
@dataclass(frozen=True, kw_only=True)
class APGD(AutoPGD):
    """Auto-PGD: gradient ascent with momentum that halves its steps by itself; ce, dlr or margin loss.

    Settings beside eps, norm and seed:
    `steps`: of an ascent.
    `restarts`: ascents from random points, on the images that are not fooled yet.
    `eot_iterations`: passes averaged for each gradient, for models that are random.
    `loss`: ce, dlr or margin.
    `batch_size`: images searched at once; default all.
    `compile`: the model, and the bookkeeping in linf and l2, by torch.compile.
    `precision`: of the search: exact, fast or auto, as for autoattack.
    """

    loss: Loss = CE

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "loss", as_loss(self.loss))
        if self.loss == KL:
            raise ConfigError("APGD with loss=kl; expected ce, dlr or margin, which compare with labels.")

    def objective(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        return self.loss(logits, y)

    def attempts(self, model: Model, x: Tensor, y: Tensor) -> Iterator[Attempt]:
        for number in range(self.restarts):
            yield Attempt(number, y)

    def _name_of_dice(self) -> str:
        return f"apgd-{self.loss}"
