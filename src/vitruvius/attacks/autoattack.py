"""AutoAttack: a parameter-free ensemble of attacks, each on the images the others left robust.

Croce & Hein 2020, arXiv:2003.01690; L1: 2021. Images drop out as soon as they are broken and batches are refilled.

An image counts as broken only if its x' fools the float32 model. With precision="fast" all stages search in bfloat16
first: Auto-PGD continues there until its x' is confirmed. What is left is searched again in float32: shortly, from the
worst point known; then in full where another search may have stopped because only the view in bfloat16 was fooled, and
everywhere if the view is not to be trusted: it is wrong about clean images, or the short search has broken more than a
hundredth of the others. On an NVIDIA GPU passes of the model are recorded and replayed (`_cuda_graphs`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitruvius._checks import check_eval_mode, check_logits
from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius._progress import Progress, no_progress
from vitruvius._random import image_ids
from vitruvius._registry import Spec, read_spec
from vitruvius.attacks._batching import SMALL_BATCH
from vitruvius.attacks._cuda_graphs import with_cuda_graphs
from vitruvius.attacks._lower_precision import bfloat16_pays, bfloat16_view, may_pay
from vitruvius.attacks._models import (
    Searched,
    frozen,
    in_one_precision,
    logits_in_batches,
    rounded_toward,
    unwrapped,
)
from vitruvius.attacks.apgd import APGD, AutoPGD
from vitruvius.attacks.apgd_malt import APGDMalt
from vitruvius.attacks.apgd_targeted import APGDTargeted
from vitruvius.attacks.base import (
    CLEAN,
    ROBUST,
    Attack,
    Ball,
    Cost,
    Ensemble,
    Outcome,
    StageResult,
    Threat,
    attacks,
    check_call,
    check_hard_labels,
    check_moved,
    cost_of,
    disturb,
    outside_inference_mode,
    stage_label,
)
from vitruvius.attacks.fab import FAB
from vitruvius.attacks.fab_targeted import FABTargeted
from vitruvius.attacks.losses import CE, DLR, MARGIN
from vitruvius.attacks.norms import per_image
from vitruvius.attacks.square import Square

SHORTEST = 6  # steps of a short search, its start included
MARGIN_ERRORS = 2  # mean errors of a view's logits within which it may have been fooled where the model is not
CLEAN_ERRORS = 0.05  # share of clean images a view may be wrong about before nothing it says is trusted
MISSED = 0.01  # share of images the short search may break before the full one must follow

OnStage = Callable[[Outcome], object]
AUTO_PGD = ("eot_iterations", "compile")
# name of a stage → its attack, its own settings, and what a version decides about it
STAGES: dict[str, tuple[type[Attack], dict[str, Any], tuple[str, ...]]] = {
    "apgd-ce": (APGD, {"loss": CE}, ("restarts", *AUTO_PGD)),
    "apgd-dlr": (APGD, {"loss": DLR}, ("restarts", *AUTO_PGD)),
    "apgd-t": (APGDTargeted, {}, ("targets", *AUTO_PGD)),
    "apgd-malt": (APGDMalt, {}, ("targets", *AUTO_PGD)),
    "fab": (FAB, {}, ("restarts",)),
    "fab-t": (FABTargeted, {}, ()),
    "square": (Square, {}, ()),
}


class Version(NamedTuple):
    """Names of stages in their order, and what is spent on them; in L1 something else."""

    stages: tuple[str, ...] = ()
    restarts: int = 1  # of the untargeted stages
    eot_iterations: int = 1
    restarts_in_l1: int = 5
    targets_in_l1: int = 5


VERSIONS: dict[str, Version] = {
    "standard": Version(("apgd-ce", "apgd-t", "fab-t", "square")),
    "fast-standard": Version(("apgd-ce", "apgd-malt")),
    "plus": Version(("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"), restarts=5, targets_in_l1=9),
    "rand": Version(("apgd-ce", "apgd-dlr"), eot_iterations=20, restarts_in_l1=1),
    "custom": Version(),
}


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
    bfloat16 takes so much less time on this machine that it pays, else exact.
    `batch_size`: images searched at once; default all that are given.
    `compile`: torch.compile what is searched (fast: the bfloat16 view) and the bookkeeping.
    `pool_batches`: batches that an evaluation gives to one run, so that batches stay full while images drop out; a kill
    loses at most one stage on so many.
    """

    version: str = "standard"
    attacks: tuple[Spec | Threat, ...] = ()
    precision: str = "exact"
    batch_size: int | None = None
    compile: bool = False
    pool_batches: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_known("version", self.version, VERSIONS)
        if bool(self.attacks) != (self.version == "custom"):
            raise ConfigError(
                f"AutoAttack with version={self.version!r} and {len(self.attacks)} attacks; "
                "a list of attacks belongs to version='custom', and only there."
            )
        self.stages()

    def stages(self) -> list[tuple[str, Threat]]:
        """The attacks by name, in order; a name that comes again is numbered."""
        stages: dict[str, Threat] = {}
        for item in VERSIONS[self.version].stages or self.attacks:
            name, threat = self._stage(item)
            repeats = sum(name == other.split(" ")[0] for other in stages)
            stages[f"{name} {repeats + 1}" if repeats else name] = threat
        return list(stages.items())

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor | None = None,
        /,
        *,
        ids: Tensor | None = None,
        progress: Progress = no_progress,
    ) -> Tensor:
        """x' of images `x` with labels `y`; the rest as for `run`."""
        return self.run(model, x, check_call(self, model, x, y), ids=ids, progress=progress).x

    def run(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        ids: Tensor | None = None,
        batch_size: int | None = None,
        progress: Progress = no_progress,
        on_stage: OnStage | None = None,
        start: Outcome | None = None,
    ) -> Outcome:
        """All stages, with a record of which one broke which image.

        model: in eval mode; returns logits (B, K).
        x, y: images (B, C, H, W) in [0, 1] and labels (B,).
        ids: (B,) int64, name the images for the random numbers; default: a hash of their pixels.
        batch_size: images that fit at once, where the attack itself does not say; default all. Of small images it
            searches more at once.
        progress: told how much is done, in images that take as long as they can, and how much there is at most.
        on_stage: called with the outcome so far whenever a stage has ended; its tensors change with the next stage.
        start: such an outcome of a run on the same images, to resume after its stages; its tensors change too.
        """
        check_call(self, model, x, y)
        check_eval_mode(model)
        check_hard_labels(y, "AutoAttack")
        with torch.inference_mode(False), torch.no_grad(), frozen(model):
            ids, dtype = image_ids(x) if ids is None else ids.to(x.device), x.dtype
            model, x = in_one_precision(model, outside_inference_mode(x))
            y = outside_inference_mode(y.long())  # of any whole type
            Searched(model, y)(x[:1])
            start = start and replace(start, x=start.x.to(x))
            # what a batch of few pixels leaves free is used for several targets or queries at once
            size = self.batch_size or max(batch_size or len(x), SMALL_BATCH // max(x[:1].numel(), 1))
            cascade = Cascade(model, x, y, ids, size, progress, on_stage, dtype, start)
            sized = replace(self, batch_size=size)
            if self.precision == "exact" or (self.precision == "auto" and not may_pay(x)):
                sized._run_exact(cascade)
            else:
                sized._run_fast(cascade)
        return replace(cascade.outcome, x=cascade.outcome.x.to(dtype))

    def _run_exact(self, cascade: Cascade) -> None:
        view = with_cuda_graphs(self._compiled(cascade.model, cascade.x), cascade.x, cascade.batch_size)
        cascade.run([Stage(name, "exact", threat, view) for name, threat in self.stages()])

    def _run_fast(self, cascade: Cascade) -> None:
        """All stages in bfloat16, then again in float32; what is left to do there does not pay for compiling it."""
        model, x = cascade.model, cascade.x
        exact = with_cuda_graphs(model, x, cascade.batch_size)
        view = with_cuda_graphs(self._compiled(bfloat16_view(model, x), x), x, cascade.batch_size)
        first = slice(cascade.batch_size)
        if self.precision == "auto" and not bfloat16_pays(model, exact, view, x[first], cascade.y[first]):
            self._run_exact(cascade)
            return
        stages = [Stage(name, "fast", threat, view, verifier=exact) for name, threat in self.stages()]
        for name, threat in replace(self, compile=False).stages():
            if isinstance(threat, Attack):
                stages.append(Stage(name, "polish", threat, exact))
            stages.append(Stage(name, "exact", threat, exact))
        cascade.run(stages)

    def _compiled(self, model: nn.Module, x: Tensor) -> nn.Module:
        if not self.compile:
            return model
        from vitruvius.attacks._compiled import compile_model

        return compile_model(model, x)

    def _stage(self, item: Spec | Threat) -> tuple[str, Any]:
        """Name and attack of one item of the list; it searches as many images at once as the ensemble."""
        ball: dict[str, Any] = {"eps": self.eps, "norm": self.norm, "seed": self.seed}
        if isinstance(item, str) and item in STAGES:
            kind, settings, decided = STAGES[item]
            effort = self._effort()
            chosen = {name: effort[name] for name in decided}
            return item, kind(**ball, **settings, **chosen, batch_size=self.batch_size)  # type: ignore[call-arg]
        threat: Any = item
        name = str(getattr(item, "__name__", type(item).__name__)).lower()
        if isinstance(item, str | Mapping):
            name, settings = read_spec(item, where="attacks")
            _check_known("stage", name, [*STAGES, *attacks])
            threat = attacks.make({"use": name, **ball, **settings}, where="attacks")
        if isinstance(threat, Attack) and getattr(threat, "batch_size", 0) is None:
            threat = replace(threat, batch_size=self.batch_size)  # type: ignore[call-arg]
        return name, threat

    def _effort(self) -> dict[str, Any]:
        """What this version spends on its stages in this norm."""
        version, in_l1 = VERSIONS[self.version], self.norm.name == "l1"
        return {
            "restarts": version.restarts_in_l1 if in_l1 else version.restarts,
            "targets": version.targets_in_l1 if in_l1 else 9,
            "eot_iterations": version.eot_iterations,
            "compile": self.compile,
        }


def _check_known(what: str, name: str, known: Iterable[Any]) -> None:
    names = list(known)
    if name not in names:
        raise UnknownName(f"no {what} named {name!r}{suggest(name, names)} Known: {', '.join(names)}.")


class Stage(NamedTuple):
    """One attack of a cascade, and the model that it searches."""

    name: str
    search: str  # exact, fast, or polish: the short exact search after a fast one
    threat: Threat
    model: nn.Module
    verifier: nn.Module | None = None  # has the last word where `model` is a faster view

    @property
    def batches_itself(self) -> bool:
        """Whether the attack takes any number of images and searches a batch of them at once."""
        threat = self.threat
        return isinstance(threat, Ensemble) or (isinstance(threat, Attack) and hasattr(threat, "batch_size"))

    def cost(self) -> Cost:
        """At most, for an image; a short search has a tenth of the steps, or all where the attack has none."""
        cost = cost_of(self.threat)
        if self.search == "polish" and type(self.threat).refine is not Attack.refine:  # type: ignore[attr-defined]
            return cost._replace(steps=max(math.ceil(cost.steps / 10), SHORTEST))
        return cost


@dataclass
class Cascade:
    """One attack after the other on the images that are still robust, and a record of which one broke which.

    `model` judges images `x` (B, C, H, W) with labels `y` (B,) and `ids` (B,), `batch_size` at a time; `dtype` is that
    of the images as they were given. `progress`, `on_stage` and `start` are those of `AutoAttack.run`.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    ids: Tensor
    batch_size: int
    progress: Progress
    on_stage: OnStage | None
    dtype: torch.dtype
    start: InitVar[Outcome | None]
    spent: float = 0.0  # passes of a batch through the model

    def __post_init__(self, start: Outcome | None) -> None:
        self.outcome = start or self._clean()

    def run(self, stages: list[Stage]) -> None:
        """Run those of the stages that the outcome does not hold yet."""
        plan = ("clean", *(stage_label(stage.name, stage.search) for stage in stages))
        if self.outcome.plan and self.outcome.plan != plan:  # it is that of another precision
            self.outcome = self._clean()
        self.outcome = replace(self.outcome, plan=plan)
        if stages and stages[0].search == "fast" and self.outcome.view_error is None:
            self._measure(stages[0].model)
        if len(self.outcome.stages) == 1:
            self._tell_stage()
        for number in range(len(self.outcome.stages), len(stages) + 1):
            self._run(stages, number)
            self._tell_stage()

    def _clean(self) -> Outcome:
        """x' is the image itself at first, and later the worst point of the first stage."""
        begun = time.perf_counter()
        wrong = self._misclassified(self.x, self.y)
        clean = StageResult("clean", "exact", len(self.x), int(wrong.sum()), time.perf_counter() - begun)
        return Outcome(
            x=self.x.clone(),
            broken_by=torch.where(wrong, CLEAN, ROBUST),
            stages=(clean,),
            view_fooled=torch.zeros_like(wrong),
        )

    def _measure(self, view: nn.Module) -> None:
        """Compare a faster view with the model on clean images: how wrong are its logits, and its labels?"""
        rows = self.outcome.robust.nonzero().squeeze(1)[: self.batch_size]
        if not len(rows):
            return
        logits = logits_in_batches(self.model, self.x[rows])
        seen = logits_in_batches(unwrapped(view), self.x[rows])
        wrong = (seen.argmax(1) != self.y[rows]).float().mean()
        self.outcome = replace(
            self.outcome,
            view_error=MARGIN_ERRORS * float((seen - logits).abs().amax(1).mean()),
            view_trusted=float(wrong) <= CLEAN_ERRORS,
        )

    def _run(self, stages: list[Stage], number: int) -> None:
        """Stage `number`, from 1: move images, all at once if the threat makes batches by itself, and judge them."""
        begun = time.perf_counter()
        stage = stages[number - 1]
        rows = self._rows_for(stages, number)
        robust = int(self.outcome.robust.sum())
        portions = rows.split(max(len(self.x), 1) if stage.batches_itself else self.batch_size) if len(rows) else ()
        for place, part in enumerate(portions, 1):
            progress = self._progress_of(stages, number, len(portions) - place)
            self._judge(number, stage, part, self._search(stage, part, progress))
        broken = robust - int(self.outcome.robust.sum())
        result = StageResult(stage.name, stage.search, len(rows), broken, time.perf_counter() - begun)
        self.outcome = replace(self.outcome, stages=(*self.outcome.stages, result))

    def _rows_for(self, stages: list[Stage], number: int) -> Tensor:
        """The images that a stage searches: the robust ones; after a short search those it cannot decide about."""
        outcome, stage = self.outcome, stages[number - 1]
        robust = outcome.robust
        if stage.search == "exact" and number > 1 and stages[number - 2].search == "polish":
            assert outcome.view_fooled is not None
            broken = outcome.broken_by == number - 1
            missed = int((broken & ~outcome.view_fooled).sum())  # by the view
            others = int(((robust | broken) & ~outcome.view_fooled).sum())
            if outcome.view_trusted and missed <= MISSED * others:
                robust = robust & outcome.view_fooled
        return robust.nonzero().squeeze(1)

    def _search(self, stage: Stage, rows: Tensor, progress: Progress) -> Tensor:
        """x' of some images."""
        x, y, ids, threat = self.x[rows], self.y[rows], self.ids[rows], stage.threat
        if not isinstance(threat, Attack):
            moved = disturb(threat, stage.model, x, y, ids, progress)
            check_moved(threat, moved, x)
            return moved
        searched = Searched(threat.view(stage.model, x), y, progress, stage.verifier)
        if stage.search == "polish":
            moved = threat.refine(searched, x, y, threat.dice(ids), self.outcome.x[rows])
        else:
            moved = threat.search(searched, x, y, threat.dice(ids))
        searched.check_finite(moved)
        if not type(threat).__module__.startswith("vitruvius."):
            check_moved(threat, moved, x)
        return rounded_toward(moved, x.to(self.dtype)).to(x.dtype)

    def _judge(self, number: int, stage: Stage, rows: Tensor, moved: Tensor) -> None:
        """Keep what fools the model, from the first stage everything; and note what may have fooled a view alone."""
        outcome, y = self.outcome, self.y[rows]
        broken = self._misclassified(moved, y)
        keep = broken if number > 1 else torch.ones_like(broken)
        outcome.x[rows] = torch.where(per_image(keep, moved), moved, outcome.x[rows])
        outcome.broken_by[rows[broken]] = number
        if stage.search == "fast" and not isinstance(stage.threat, AutoPGD):  # which goes on until the model is fooled
            logits = logits_in_batches(unwrapped(stage.model), moved, self.batch_size)
            assert outcome.view_fooled is not None
            outcome.view_fooled[rows] |= MARGIN(logits, y) > -(outcome.view_error or 0.0)

    def _misclassified(self, x: Tensor, y: Tensor) -> Tensor:
        logits = logits_in_batches(self.model, x, self.batch_size)
        check_logits(logits, len(x))
        return logits.argmax(1) != y

    def _tell_stage(self) -> None:
        if self.on_stage is not None:
            self.on_stage(self.outcome)

    def _batches(self, stage: Stage, images: int) -> int:
        return math.ceil(images / (getattr(stage.threat, "batch_size", None) or self.batch_size))

    def _most(self, stage: Stage, images: int) -> float:
        """Passes of a batch that a stage takes at most for so many images."""
        return self._batches(stage, images) * stage.cost().total

    def _progress_of(self, stages: list[Stage], number: int, portions_left: int) -> Progress:
        """The progress of one portion of a stage as that of the cascade: what may follow is all that follows at most.

        It is counted in passes of a batch, and told in images that take as many as an image can.
        """
        robust, stage = int(self.outcome.robust.sum()), stages[number - 1]
        cost, later = stage.cost(), sum(self._most(one, robust) for one in stages[number:])
        unit = sum(self._most(one, len(self.x)) for one in stages) / len(self.x)
        steps = cost.steps * (self._batches(stage, robust) if stage.batches_itself else 1)
        label = stage_label(stage.name, stage.search)
        words = f"{label} ({number} of {len(stages)}), {robust} of {len(self.x)} still robust"
        before = self.spent

        def tell(done: float, total: float | None, text: str = "", /) -> None:
            left = (steps if total is None else total) - done + portions_left * cost.steps
            self.spent = before + done * cost.passes
            most = self.spent + left * cost.passes + later
            self.progress(self.spent / unit, most / unit, f"{words}, {text}" if text else words)

        if self.progress is no_progress:
            return no_progress
        tell(0, None)
        return tell
