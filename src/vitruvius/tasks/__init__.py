"""Objectives, as timm training tasks: one file each, `task(x, y) → {"loss", "output", …}`."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.tasks.adversarial import Adversarial as Adversarial
    from vitruvius.tasks.adversarial import AdversarialObjective as AdversarialObjective
    from vitruvius.tasks.base import Objective as Objective
    from vitruvius.tasks.base import tasks as tasks
    from vitruvius.tasks.distillation import Distillation as Distillation
    from vitruvius.tasks.fast import Fast as Fast
    from vitruvius.tasks.free import Free as Free
    from vitruvius.tasks.jsd import JSD as JSD
    from vitruvius.tasks.mart import Mart as Mart
    from vitruvius.tasks.robust_distillation import RobustDistillation as RobustDistillation
    from vitruvius.tasks.supervised import Supervised as Supervised
    from vitruvius.tasks.trades import Trades as Trades
else:
    __getattr__, __dir__, __all__ = exports(__name__)
