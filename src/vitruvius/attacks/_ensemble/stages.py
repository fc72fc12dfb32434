"""The stages of AutoAttack and its named versions (Croce & Hein 2020, arXiv:2003.01690, section 5; L1: 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vitruvius.attacks._base import Attack
from vitruvius.attacks._losses import CE, DLR
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.apgd_malt import APGDMalt
from vitruvius.attacks.apgd_targeted import APGDTargeted
from vitruvius.attacks.fab import FAB
from vitruvius.attacks.fab_targeted import FABTargeted
from vitruvius.attacks.square import Square

Settings = dict[str, Any]  # what all stages share: eps, norm, seed and batch_size


class Effort(NamedTuple):
    """What a version spends on its stages."""

    restarts: int = 1  # of the untargeted stages
    targets: int = 9
    eot_iterations: int = 1
    compile: bool = False

    def of_auto_pgd(self) -> Settings:
        return {"eot_iterations": self.eot_iterations, "compile": self.compile}


def apgd_ce(effort: Effort, shared: Settings) -> Attack:
    return APGD(loss=CE, restarts=effort.restarts, **effort.of_auto_pgd(), **shared)


def apgd_dlr(effort: Effort, shared: Settings) -> Attack:
    return APGD(loss=DLR, restarts=effort.restarts, **effort.of_auto_pgd(), **shared)


def apgd_t(effort: Effort, shared: Settings) -> Attack:
    return APGDTargeted(targets=effort.targets, **effort.of_auto_pgd(), **shared)


def apgd_malt(effort: Effort, shared: Settings) -> Attack:
    return APGDMalt(targets=effort.targets, **effort.of_auto_pgd(), **shared)


def fab(effort: Effort, shared: Settings) -> Attack:
    return FAB(restarts=effort.restarts, **shared)


def fab_t(effort: Effort, shared: Settings) -> Attack:
    return FABTargeted(**shared)


def square(effort: Effort, shared: Settings) -> Attack:
    return Square(**shared)


STAGES: dict[str, Callable[[Effort, Settings], Attack]] = {
    "apgd-ce": apgd_ce,
    "apgd-dlr": apgd_dlr,
    "apgd-t": apgd_t,
    "apgd-malt": apgd_malt,
    "fab": fab,
    "fab-t": fab_t,
    "square": square,
}


class Version(NamedTuple):
    """Names of stages in their order, and the effort they take; in L1 another one."""

    stages: tuple[str, ...]
    effort: Effort = Effort()
    l1_effort: Effort = Effort(restarts=5, targets=5)

    def effort_in(self, norm: str) -> Effort:
        if norm == "l1":
            return self.l1_effort
        return self.effort


VERSIONS: dict[str, Version] = {
    "standard": Version(("apgd-ce", "apgd-t", "fab-t", "square")),
    "fast-standard": Version(("apgd-ce", "apgd-malt")),
    "plus": Version(
        ("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"), Effort(restarts=5), l1_effort=Effort(restarts=5)
    ),
    "rand": Version(("apgd-ce", "apgd-dlr"), Effort(eot_iterations=20), l1_effort=Effort(eot_iterations=20)),
    "custom": Version(()),
}
