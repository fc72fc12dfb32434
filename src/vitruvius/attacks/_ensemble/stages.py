"""The stages of AutoAttack and its named versions (Croce & Hein 2020, arXiv:2003.01690, section 5; L1: 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vitruvius.attacks._base import Attack
from vitruvius.attacks._losses import CE, DLR
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.apgd_targeted import APGDTargeted
from vitruvius.attacks.fab import FAB
from vitruvius.attacks.fab_targeted import FABTargeted
from vitruvius.attacks.square import Square


class Effort(NamedTuple):
    """What a version spends on its stages."""

    restarts: int = 1  # of the untargeted stages
    targets: int = 9
    eot_iterations: int = 1
    compile: bool = False

    def climbing(self) -> dict[str, Any]:
        return {"eot_iterations": self.eot_iterations, "compile": self.compile}


Maker = Callable[[Effort, dict[str, Any]], Attack]  # the second: eps, norm, seed and batch_size

STAGES: dict[str, Maker] = {
    "apgd-ce": lambda effort, common: APGD(loss=CE, restarts=effort.restarts, **effort.climbing(), **common),
    "apgd-dlr": lambda effort, common: APGD(loss=DLR, restarts=effort.restarts, **effort.climbing(), **common),
    "apgd-t": lambda effort, common: APGDTargeted(targets=effort.targets, **effort.climbing(), **common),
    "fab": lambda effort, common: FAB(restarts=effort.restarts, **common),
    "fab-t": lambda _, common: FABTargeted(**common),
    "square": lambda _, common: Square(**common),
}


class Version(NamedTuple):
    """Names of stages in their order, and the effort they take."""

    stages: tuple[str, ...]
    effort: Effort = Effort()
    l1_effort: Effort = Effort(restarts=5, targets=5)


# Standard starts APGD-CE twice, once more than published: 3 % of its time, and less luck in the first stage.
VERSIONS: dict[str, Version] = {
    "standard": Version(("apgd-ce", "apgd-t", "fab-t", "square"), Effort(restarts=2)),
    "plus": Version(("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"), *[Effort(restarts=5)] * 2),
    "rand": Version(("apgd-ce", "apgd-dlr"), *[Effort(eot_iterations=20)] * 2),
    "custom": Version(()),
}
