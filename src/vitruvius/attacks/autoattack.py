"""AutoAttack: a parameter-free ensemble of attacks, each on the images the others left robust.

Croce & Hein 2020, arXiv:2003.01690. Images drop out as soon as they are broken and batches are refilled. With
precision="fast" all stages search in bfloat16 first; what breaks is checked in float32, what is left is searched again.
On an NVIDIA GPU passes of the model are recorded and replayed (`_views/cuda_graphs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitruvius._checks import check_eval_mode
from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius._registry import Spec, read_spec
from vitruvius.attacks._base import (
    Attack,
    Ball,
    Threat,
    Work,
    attacks,
    check_hard_labels,
    check_inputs,
    check_not_empty,
    known_ids,
    outside_inference_mode,
    whole_labels,
    work_of,
)
from vitruvius.attacks._ensemble.cascade import Cascade
from vitruvius.attacks._ensemble.journal import Journal, OnEvent
from vitruvius.attacks._ensemble.result import Outcome, stage_label
from vitruvius.attacks._ensemble.stages import STAGES, VERSIONS, Settings
from vitruvius.attacks._models import VerifiedView, check_logits, frozen
from vitruvius.attacks._search.batching import SMALL_BATCH
from vitruvius.attacks._views.choice import bfloat16_pays
from vitruvius.attacks._views.compiled import compile_model
from vitruvius.attacks._views.cuda_graphs import with_cuda_graphs
from vitruvius.attacks._views.lower_precision import bfloat16_view

PRECISIONS = ("exact", "fast", "auto")
SHORTEST = 6  # steps of a short search, its start included


@attacks.register("autoattack")
@dataclass(frozen=True, kw_only=True)
class AutoAttack(Ball):
    """The ensemble APGD-CE, APGD-T, FAB-T, Square (standard); plus, rand and custom lists too.

    Settings beside eps, norm and seed:
    `version`: standard, plus, rand (for random models), fast-standard (APGD-CE, then Auto-PGD toward the classes that
    are nearest by the gradient; quicker with many classes, not the published composition), or custom.
    `attacks`: of a custom version, in order: names of stages (apgd-ce, apgd-dlr, apgd-t, apgd-malt, fab, fab-t,
    square), attacks by name with settings (`"pgd:steps=20"`, `{use: pgd, steps: 20}`; eps, norm and seed are the
    ensemble's unless given), or any threats.
    `precision`: exact; fast: search in bfloat16 first, then in float32 what is left; auto: fast where a pass in
    bfloat16 takes less than half the time on this machine, else exact (always on a CPU).
    `batch_size`: images searched at once; default all that are given.
    `compile`: torch.compile what is searched (fast: the bfloat16 view) and the bookkeeping.
    """

    pool_batches: ClassVar[int] = 8  # batches of an evaluation given to one run

    version: str = "standard"
    attacks: tuple[Spec | Threat, ...] = ()
    precision: str = "exact"
    batch_size: int | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_known("version", self.version, VERSIONS)
        _check_known("precision", self.precision, PRECISIONS)
        if bool(self.attacks) != (self.version == "custom"):
            raise ConfigError(
                f"AutoAttack with version={self.version!r} and {len(self.attacks)} attacks; "
                "a list of attacks belongs to version='custom', and only there."
            )
        self.stages()

    def stages(self) -> list[tuple[str, Threat]]:
        """The attacks by name, in order; a name that comes again is numbered."""
        made: dict[str, Threat] = {}
        for item in VERSIONS[self.version].stages or self.attacks:
            name, threat = self._stage(item)
            repeats = sum(name == known.split(" ")[0] for known in made)
            if repeats:
                name = f"{name} {repeats + 1}"
            made[name] = threat
        return list(made.items())

    def stage_labels(self) -> list[str]:
        """What a journal may hear of, in order: the names of the stages; but for "exact" with their searches."""
        if self.precision == "exact":
            return [name for name, _ in self.stages()]
        labels = [stage_label(name, "fast") for name, _ in self.stages()]
        for name, threat in self.stages():
            if isinstance(threat, Attack):
                labels.append(stage_label(name, "polish"))
            labels.append(name)
        return labels

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, /, *, ids: Tensor | None = None) -> Tensor:
        """x' of images `x` with labels `y`; `ids` as for `run`.

        `model` is in eval mode.
        """
        return self.run(model, x, y, ids=ids).x

    def run(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        ids: Tensor | None = None,
        batch_size: int | None = None,
        on_event: OnEvent | None = None,
        journal: Journal | None = None,
    ) -> Outcome:
        """All stages, with a record of which one broke which image.

        `x` (B, C, H, W) in [0, 1], `y` (B,) labels. `ids` (B,) int64 name the images for the dice; default: a hash of
        their pixels. `batch_size`: images searched at once where the attack itself has none; default all.
        `on_event` is called with a `StageEvent` as stages advance. `journal` keeps what they decide, batch by batch, so
        that a killed run can go on.

        `model` is in eval mode and returns logits (B, K).
        """
        check_eval_mode(model)
        check_inputs(x, y)
        check_not_empty(x)
        check_hard_labels(y, "AutoAttack")
        batch_size = self.batch_size or batch_size
        with torch.inference_mode(False), torch.no_grad(), frozen(model):
            x = outside_inference_mode(x)
            y = outside_inference_mode(whole_labels(y))
            check_logits(model(x[:1]), y, len(x[:1]))
            cascade = Cascade(model, x, y, known_ids(x, ids), batch_size, on_event=on_event, journal=journal)
            if batch_size is None:  # what few pixels leave free is used for several targets at once
                batch_size = max(len(x), SMALL_BATCH // max(x[:1].numel(), 1), 1)
            sized = replace(self, batch_size=batch_size)
            if self.precision == "exact" or (self.precision == "auto" and x.device.type == "cpu"):
                sized._run_exact(cascade, model, x, batch_size)
            else:
                sized._run_fast(cascade, model, x, batch_size)
        return cascade.outcome()

    @property
    def revision(self) -> int:
        """2 where APGD-CE starts once and started twice in version 0.1: ledgers of that time hold other figures."""
        if self.version == "standard" and self.norm.name != "l1":
            return 2
        return 1

    def _run_exact(self, cascade: Cascade, model: nn.Module, x: Tensor, batch_size: int) -> None:
        cascade.plan = {name: work_of(threat) for name, threat in self.stages()}
        view = with_cuda_graphs(self._compiled(model, x), x, batch_size)
        for name, threat in self.stages():
            cascade.run(name, threat, view)

    def _run_fast(self, cascade: Cascade, model: nn.Module, x: Tensor, batch_size: int) -> None:
        """All stages in bfloat16, then again in float32; what is left to do there does not pay for compiling it."""
        exact = with_cuda_graphs(model, x, batch_size)
        view = with_cuda_graphs(self._compiled(bfloat16_view(model, x), x), x, batch_size)
        few = slice(batch_size)
        if self.precision == "auto" and not bfloat16_pays(model, exact, view, x[few], cascade.y[few]):
            self._run_exact(cascade, model, x, batch_size)
            return
        cascade.plan = self._plan_fast()
        cascade.measure_view(view)
        for name, threat in self.stages():
            cascade.run_fast(name, threat, VerifiedView(view, exact))
        for name, threat in replace(self, compile=False).stages():
            cascade.confirm(name, threat, exact)

    def _plan_fast(self) -> dict[str, Work]:
        """All stages fast, then each shortly and in full; by label."""
        works = {name: work_of(threat) for name, threat in self.stages()}
        plan = {stage_label(name, "fast"): work for name, work in works.items()}
        for name, threat in self.stages():
            if isinstance(threat, Attack):
                plan[stage_label(name, "polish")] = _short(threat)
            plan[name] = works[name]
        return plan

    def _compiled(self, model: nn.Module, x: Tensor) -> nn.Module:
        if self.compile:
            return compile_model(model, x)
        return model

    def _stage(self, item: Spec | Threat) -> tuple[str, Threat]:
        """Name and attack of one item of the list."""
        if isinstance(item, str) and item in STAGES:
            effort = VERSIONS[self.version].effort_in(self.norm.name)._replace(compile=self.compile)
            return item, STAGES[item](effort, {**self._ball(), "batch_size": self.batch_size})
        if isinstance(item, str | Mapping):
            name, settings = read_spec(item, where="attacks")
            _check_known("stage", name, [*STAGES, *attacks])
            return name, attacks.make({"use": name, **self._ball(), **settings}, where="attacks")
        return str(getattr(item, "__name__", type(item).__name__)).lower(), item

    def _ball(self) -> Settings:
        return {"eps": self.eps, "norm": self.norm, "seed": self.seed}


def _short(attack: Attack) -> Work:
    """What the short search after a fast one takes at most: a tenth of the steps, or all where there is none."""
    work = attack.work()
    if type(attack).polish is Attack.polish:
        return work
    return work._replace(steps=max(math.ceil(work.steps / 10), SHORTEST))


def _check_known(what: str, name: str, known: Iterable[Any]) -> None:
    names = list(known)
    if name not in names:
        raise UnknownName(f"no {what} named {name!r}{suggest(name, names)} Known: {', '.join(names)}.")
