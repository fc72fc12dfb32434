"""Is the robustness real? The checks a reviewer asks for (Carlini et al. 2019, arXiv:1902.06705; Athalye et al. 2018).

Each check compares accuracies that must be in order if gradients tell the truth. N images.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vitruvius._checks import Progress, check_count, check_eval_mode
from vitruvius._errors import ConfigError
from vitruvius._format import format_number
from vitruvius.attacks import (
    CE,
    LINF,
    MARGIN,
    Attack,
    Norm,
    SurrogateGradient,
    Threat,
    as_norm,
    check_inputs,
    disturb,
    frozen,
    image_ids,
    loss_and_grad,
    watched_by,
)
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.hopskipjump import HopSkipJump
from vitruvius.attacks.square import Square
from vitruvius.evaluation._progress import CheckProgress
from vitruvius.evaluation.findings import SLACK, Finding
from vitruvius.evaluation.masking import DRAWS, IMAGES, RANDOMNESS, look
from vitruvius.evaluation.straight_through import (
    InFloat64,
    StraightThrough,
    ZeroGradient,
    modules_without_gradient,
)

__all__ = ["Finding", "Sanity"]

GRADIENT = 3  # passes that a gradient takes
SAMPLE = 8  # images of an unsuspicious model that long black-box searches are tried on
MOST = 64  # of a suspicious one
T = TypeVar("T")
Batch = tuple[Tensor, Tensor, Tensor]  # images, labels, ids
IN_COMMON = {RANDOMNESS}  # checks of `masking.look` that are made here at greater length


@dataclass(frozen=True, kw_only=True)
class Sanity:
    """How thoroughly to look: at radius `eps` of `norm`, with `steps` of APGD and `queries` of a black-box search.

    With `twins` (models by name) or one `surrogate`, transfer from each and attacks with its gradients are tried too,
    and the worst case says who found it. A model that rounds, detaches or saturates is also attacked through itself,
    with gradients passed straight through (BPDA) and in float64. `eot_iterations` gradients are averaged where the
    model is random. `long_queries` are spent on images that nothing has broken: by a longer search over squares, and
    by `hops` rounds of HopSkipJump, which sees classes alone (linf and l2); on a few images, on more where a check is
    suspicious; 0 leaves either out. `batch_size` images are looked at at once (default all), `seed` is that of the
    attacks.
    """

    eps: float
    norm: Norm = LINF
    steps: int = 50
    queries: int = 500
    long_queries: int = 5000
    hops: int = 25
    eot_iterations: int = 20  # where the model turns out to be random
    seed: int = 0
    surrogate: nn.Module | None = None
    twins: Mapping[str, nn.Module] = field(default_factory=dict)
    batch_size: int | None = None  # images at once; default all

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", as_norm(self.norm))
        if not self.eps > 0:
            raise ConfigError(f"checks at eps={self.eps:g}; give a radius above 0, such as 8/255.")
        for count, name in ((self.steps, "steps"), (self.queries, "queries"), (self.eot_iterations, "eot_iterations")):
            check_count(count, name)
        for count, name in ((self.long_queries, "long_queries"), (self.hops, "hops")):
            if count:
                check_count(count, name)
        APGD(eps=self.eps, norm=self.norm)  # refuses a radius that allows every image

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, *, ids: Tensor | None = None, progress: Progress | None = None
    ) -> list[Finding]:
        """All checks on these images; a few hundred say enough.

        `model` is in eval mode; `x` (B, C, H, W) in [0, 1]; `y` (B,) labels; `ids` (B,) int64 name the images for the
        dice (default: a hash of their pixels). `progress` is called with the checks done, how many there are, and what
        is being done now (default: nobody is told).
        """
        check_eval_mode(model)
        check_inputs(x, y)
        return _Examination(self, model, x, y, image_ids(x) if ids is None else ids, progress).findings()


class _Examination:
    """One model on one set of images."""

    def __init__(
        self, plan: Sanity, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor, progress: Progress | None = None
    ) -> None:
        self.plan = plan
        self.model = model
        self.attacked = ZeroGradient(model)  # so that a model without any gradient is a finding and not an error
        self.x = x
        self.y = y
        self.ids = ids.to(y.device)
        self.batch_size = plan.batch_size or len(y)
        self.batches = self._split(torch.arange(len(y), device=y.device))
        self.checks = CheckProgress(progress, len(y), self._planned_passes())
        self.known: dict[
            tuple[Threat, nn.Module], Tensor
        ] = {}  # which images are robust to an attack: some are asked for twice
        self.others: dict[str, Tensor] = {}  # which images are robust to what is no white-box attack, by check
        self.spread = self._spread()
        self.passes = 1
        self.draws = 1
        if self.spread > 0:
            self.passes = plan.eot_iterations
            self.draws = DRAWS

    def findings(self) -> list[Finding]:
        begin = self.checks.begin
        begin("white box")
        white = self._robust(self._apgd(self.plan.eps)) & self._robust(self._apgd(self.plan.eps, loss=MARGIN))
        self.checks.robust = int(white.sum())
        begin("first look")
        found = self._first_look()
        checks: dict[str, Callable[[Tensor], Finding]] = {
            "randomness": self._randomness,
            "zero gradients": self._zero_gradients,
            "more steps": self._steps,
            "larger radius": self._radius,
            "unbounded": self._unbounded,
            "black box": self._black_box,
        }
        for name, check in checks.items():
            begin(name)
            found.append(check(white))
        twins = self._twins()
        for suffix, twin in twins.items():
            begin(f"transfer{suffix}", GRADIENT * self.plan.steps)
            found.append(self._transfer(white, suffix, twin))
            begin(f"adaptive{suffix}", 2 * GRADIENT * self.plan.steps)
            found.append(self._adaptive(white, suffix, twin))
        found += self._long_searches(white, suspicious=not all(finding.passed for finding in found))
        return [*found, self._worst_case(white)]

    def _planned_passes(self) -> dict[str, float]:
        """The checks of every model, and roughly how many passes of an image each takes."""
        ascent = GRADIENT * self.plan.steps
        return {
            "white box": 2 * ascent,
            "first look": GRADIENT,
            "randomness": 1,
            "zero gradients": GRADIENT,
            "more steps": ascent / 2,
            "larger radius": 2 * ascent,
            "unbounded": 2 * ascent,
            "black box": self.plan.queries,
            **{
                name: attack.work().total * SAMPLE / max(len(self.y), SAMPLE)
                for name, attack in self._searches().items()
            },
        }

    def _first_look(self) -> list[Finding]:
        """What the checks inside every evaluation find, but for what is looked at here at greater length."""
        plan = self.plan
        found = look(
            self.model, self.x[:IMAGES], self.y[:IMAGES], eps=plan.eps, norm=plan.norm, batch_size=self.batch_size
        )
        return [finding for finding in found if finding.name not in IN_COMMON]

    def _twins(self) -> dict[str, nn.Module]:
        """Every model to attack through, by what its findings' names end in."""
        twins = {f" ({name})": twin for name, twin in self.plan.twins.items()}
        if self.plan.surrogate is not None:
            twins[""] = self.plan.surrogate
        twins |= {f" ({name})": twin for name, twin in self._own_twins().items()}
        return twins

    def _own_twins(self) -> dict[str, nn.Module]:
        """The model itself: its gradients passed straight through, without what has none, and in float64 where flat."""
        few = self.x[:2]
        none: tuple[str, ...] = ()
        modules = _tried(lambda: modules_without_gradient(self.model, few), none)
        straight = StraightThrough(self.model, modules)
        twins: dict[str, nn.Module] = {}
        if self._has_gradient(straight) and straight.replaced:
            twins["straight-through"] = straight
            smooth = StraightThrough(self.model, modules, smooth=True)
            if self._has_gradient(smooth):
                twins["smooth"] = smooth
        if bool(self._over(self._is_flat).any()):
            double = _tried(lambda: InFloat64(copy.deepcopy(self.model)), None)
            if double is not None and self._has_gradient(double):
                twins["float64"] = double
        return twins

    def _has_gradient(self, twin: nn.Module) -> bool:
        """Whether the model can be run this way on two images, and one of them then has a gradient."""
        gradient = _tried(lambda: self._grad_through(twin, self.x[:2]), None)
        return gradient is not None and bool(gradient.any())

    def _grad_through(self, twin: nn.Module, x: Tensor) -> Tensor:
        with frozen(twin):
            return loss_and_grad(twin, x, lambda logits: MARGIN(logits, self.y[: len(x)])).grad

    def _randomness(self, white: Tensor) -> Finding:
        return Finding(
            name="randomness",
            passed=self.spread == 0,
            sentence="two passes agree"
            if self.spread == 0
            else f"two passes differ: the model is random; gradients here are means of {self.passes} passes, "
            "and AutoAttack must run as version='rand'",
            numbers={"largest difference of logits": self.spread},
        )

    def _zero_gradients(self, white: Tensor) -> Finding:
        share = float(self._over(self._is_flat).double().mean())
        sentence = "the loss is flat at some images"
        if share <= SLACK:
            sentence = "the loss has a slope at the images"
        return Finding(name="zero gradients", passed=share <= SLACK, sentence=sentence, numbers={"share": share})

    def _steps(self, white: Tensor) -> Finding:
        counts = [max(self.plan.steps // 10, 1), max(self.plan.steps // 3, 1), self.plan.steps]
        accuracies = [self._accuracy(self._apgd(self.plan.eps, steps=n)) for n in counts]
        return self._falling("more steps", "accuracy does not rise with steps", counts, accuracies, "steps")

    def _radius(self, white: Tensor) -> Finding:
        radii = [self.plan.eps * factor for factor in (0.5, 1.0, 2.0)]
        unit = f"{self.plan.norm} eps"
        if self.plan.norm == LINF:
            unit = "eps"
            radii = [min(radius, 1.0) for radius in radii]
        accuracies = [self._accuracy(self._apgd(radius)) for radius in radii]
        return self._falling("larger radius", "accuracy does not rise with the radius", radii, accuracies, unit)

    def _unbounded(self, white: Tensor) -> Finding:
        everything = {"linf": 1.0, "l2": self.x[0].numel() ** 0.5, "l1": float(self.x[0].numel())}[self.plan.norm.name]
        left = self._robust(self._apgd(everything)) & self._robust(self._apgd(everything, loss=MARGIN))
        accuracy = float(left.double().mean())
        passed = int(left.sum()) <= self._tolerated()
        sentence = "with every image allowed, " + ("none is robust" if passed else "some are still robust")
        return Finding(name="unbounded", passed=passed, sentence=sentence, numbers={"accuracy": accuracy})

    def _black_box(self, white: Tensor) -> Finding:
        square = self._square(self.plan.queries, self.plan.seed)
        return self._not_stronger("black box", "a search without gradients", self._robust(square), white)

    def _square(self, queries: int, seed: int) -> Square:
        """A search that never asks more rows at once than anybody else here."""
        plan = self.plan
        return Square(eps=plan.eps, norm=plan.norm, queries=queries, seed=seed, batch_size=self.batch_size)

    def _transfer(self, white: Tensor, suffix: str, twin: nn.Module) -> Finding:
        robust = self._robust(self._apgd(self.plan.eps, loss=MARGIN), twin)
        return self._not_stronger(f"transfer{suffix}", "an attack on the surrogate", robust, white)

    def _adaptive(self, white: Tensor, suffix: str, twin: nn.Module) -> Finding:
        through = SurrogateGradient(self.model, twin)
        robust = self._robust(self._apgd(self.plan.eps), through)
        robust = robust & self._robust(self._apgd(self.plan.eps, loss=MARGIN), through)
        return self._not_stronger(f"adaptive{suffix}", "an attack with the surrogate's gradients", robust, white)

    def _long_searches(self, white: Tensor, *, suspicious: bool) -> list[Finding]:
        """What takes long and needs no gradient: of images that nothing has broken, a few or more."""
        return [self._search_long(name, attack, white, suspicious) for name, attack in self._searches().items()]

    def _searches(self) -> dict[str, Attack]:
        """By the name of the check."""
        searches: dict[str, Attack] = {}
        plan = self.plan
        together = max(self.batch_size // max(MOST, 1), 1)  # queries of an image at once
        if plan.long_queries:
            searches["longer black box"] = self._square(plan.long_queries, plan.seed + 1)
        if plan.hops and plan.norm.name in HopSkipJump.norms:
            searches["decision based"] = HopSkipJump(
                eps=plan.eps, norm=plan.norm, steps=plan.hops, first_queries=40, group=together, seed=plan.seed
            )
        return searches

    def _search_long(self, name: str, attack: Attack, white: Tensor, suspicious: bool) -> Finding:
        self.checks.begin(name)
        left = white.clone()
        for robust in self.others.values():
            left &= robust
        limit = SAMPLE
        if suspicious:
            limit = MOST
        tried = left.nonzero().squeeze(1)[:limit]
        robust = torch.ones_like(white)
        if len(tried):
            robust[tried] = self._over(
                lambda x, y, ids: self._right(disturb(attack, self.model, x, y, ids), y), self._split(tried)
            )
        self.others[name] = robust
        broken = int((~robust).sum())
        passed = broken <= self._tolerated()
        sentence = f"{describe_search(attack)} breaks "
        if passed:
            sentence += "nothing that all others have left"
        else:
            sentence += "images that all others have left"
        return Finding(
            name=name,
            passed=passed,
            sentence=sentence,
            numbers={"images tried": float(len(tried)), "images only it breaks": float(broken)},
        )

    def _worst_case(self, white: Tensor) -> Finding:
        """What is left when each image meets the attack that breaks it, whoever found it."""
        left = white.clone()
        for robust in self.others.values():
            left &= robust
        gains = {name: int((white & ~robust).sum()) for name, robust in self.others.items()}
        best = max(gains, key=lambda name: gains[name])
        passed = int((white & ~left).sum()) <= self._tolerated()
        sentence = "nothing breaks more than the white-box attack"
        if not passed:
            sentence = f"{best} breaks most of what the white-box attack does not: report this accuracy"
        numbers = {"accuracy": float(left.double().mean()), "white-box accuracy": float(white.double().mean())}
        return Finding(name="worst case", passed=passed, sentence=sentence, numbers=numbers)

    def _falling(
        self, name: str, sentence: str, settings: Sequence[float], accuracies: list[float], unit: str
    ) -> Finding:
        slack = self._tolerated() / len(self.y)
        passed = all(later <= earlier + slack for earlier, later in pairwise(accuracies))
        numbers = {
            f"{unit} {format_number(setting)}": accuracy for setting, accuracy in zip(settings, accuracies, strict=True)
        }
        if not passed:
            sentence = sentence.replace("does not rise", "rises")
        return Finding(name=name, passed=passed, sentence=sentence, numbers=numbers)

    def _not_stronger(self, name: str, who: str, robust: Tensor, white: Tensor) -> Finding:
        self.others[name] = robust
        surprises = int((white & ~robust).sum())
        passed = surprises <= self._tolerated()
        numbers = {
            "its accuracy": float(robust.double().mean()),
            "white-box accuracy": float(white.double().mean()),
            "images only it breaks": float(surprises),
        }
        sentence = f"{who} breaks {'nothing' if passed else 'images'} that the white-box attack does not"
        return Finding(name=name, passed=passed, sentence=sentence, numbers=numbers)

    def _tolerated(self) -> int:
        """Images by which chance may spoil an order."""
        return max(1, int(SLACK * len(self.y)))

    def _apgd(self, eps: float, **settings: Any) -> APGD:
        chosen = {"steps": self.plan.steps, "seed": self.plan.seed, "eot_iterations": self.passes, **settings}
        return APGD(eps=eps, norm=self.plan.norm, **chosen)

    def _accuracy(self, threat: Threat) -> float:
        return float(self._robust(threat).double().mean())

    def _robust(self, threat: Threat, victim: nn.Module | None = None) -> Tensor:
        """Which images the model has right after an attack on itself, or on a victim in its place."""
        key = (threat, victim or self.attacked)
        if key not in self.known:
            self.known[key] = self._over(lambda x, y, ids: self._right(disturb(threat, key[1], x, y, ids), y))
        return self.known[key]

    def _over(self, judge: Callable[[Tensor, Tensor, Tensor], Tensor], batches: Sequence[Batch] = ()) -> Tensor:
        """One answer per image, batch by batch; of all images unless some batches are given."""
        answers = []
        for number, batch in enumerate(batches or self.batches, 1):
            with watched_by(self.checks.of_batch(number, len(batches or self.batches))):
                answers.append(judge(*batch))
        return torch.cat(answers)

    def _split(self, rows: Tensor) -> list[Batch]:
        """Some images in batches, with their labels and ids."""
        return [(self.x[part], self.y[part], self.ids[part]) for part in rows.split(self.batch_size)]

    @torch.no_grad()
    def _right(self, x: Tensor, y: Tensor) -> Tensor:
        """Whether the answer is the label; of a random model, every one of several answers."""
        return torch.stack([self.model(x).argmax(1) == y for _ in range(self.draws)]).all(0)

    def _is_flat(self, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        with frozen(self.model):
            grad = loss_and_grad(self.attacked, x, lambda logits: CE(logits, y)).grad
        return grad.flatten(1).abs().amax(1) < 1e-12

    @torch.no_grad()
    def _spread(self) -> float:
        first, second = (torch.cat([self.model(x) for x, _, _ in self.batches]) for _ in range(2))
        spread = float((first - second).abs().max())
        if spread > 1e-4 * (1 + float(first.abs().max())):
            return spread
        return 0.0


def describe_search(attack: Attack) -> str:
    """A search without gradients in words: what `attack` does, and how many queries it has."""
    if isinstance(attack, Square):
        return f"a search over squares of {attack.queries} queries"
    return "HopSkipJump, which sees predicted classes alone,"


def _tried(work: Callable[[], T], otherwise: T) -> T:
    """What the work gives; something else where the model cannot be run that way, which is not an error of its own."""
    try:
        return work()
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return otherwise
