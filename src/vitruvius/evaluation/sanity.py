"""Is the robustness real? The checks a reviewer asks for (Carlini et al. 2019, arXiv:1902.06705; Athalye et al. 2018).

Each check compares accuracies that must be in order if gradients tell the truth. N images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import check_count, check_eval_mode
from vitruvius._errors import ConfigError
from vitruvius._format import format_number
from vitruvius.attacks import (
    CE,
    LINF,
    MARGIN,
    Norm,
    SurrogateGradient,
    Threat,
    as_norm,
    check_inputs,
    disturb,
    frozen,
    image_ids,
    loss_and_grad,
)
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.square import Square

SLACK = 0.01  # share of images by which an order may be missed, and one image always


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check saw."""

    name: str
    passed: bool
    sentence: str
    numbers: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in self.numbers.items())
        return f"{'ok        ' if self.passed else 'suspicious'}  {self.name}: {self.sentence} ({numbers})"

    def remark(self) -> str:
        """What it says of a figure, in one sentence."""
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in self.numbers.items())
        if numbers:
            numbers = f" ({numbers})"
        return f"{self.name}: {self.sentence}{numbers}."

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Sanity:
    """How thoroughly to look: at radius `eps` of `norm`, with `steps` of APGD and `queries` of a black-box search.

    With `twins` (models by name) or one `surrogate`, transfer from each and attacks with its gradients are tried too,
    and the worst case says who found it. `eot_iterations` gradients are averaged where the model is random;
    `batch_size` images are looked at at once (default all), `seed` is that of the attacks.
    """

    eps: float
    norm: Norm = LINF
    steps: int = 50
    queries: int = 500
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
        APGD(eps=self.eps, norm=self.norm)  # refuses a radius that allows every image

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *, ids: Tensor | None = None) -> list[Finding]:
        """All checks on these images; a few hundred say enough."""
        check_eval_mode(model)
        check_inputs(x, y)
        return _Examination(self, model, x, y, image_ids(x) if ids is None else ids).findings()


class _Examination:
    """One model on one set of images."""

    def __init__(self, plan: Sanity, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor) -> None:
        self.plan, self.model, self.x, self.y = plan, model, x, y
        self.batches = list(zip(*(part.split(plan.batch_size or len(y)) for part in (x, y, ids)), strict=True))
        self.known: dict[
            tuple[Threat, nn.Module], Tensor
        ] = {}  # which images are robust to an attack: some are asked for twice
        self.others: dict[str, Tensor] = {}  # which images are robust to what is no white-box attack, by check
        self.spread = self._spread()
        if self.spread > 0:
            self.passes = plan.eot_iterations
        else:
            self.passes = 1

    def findings(self) -> list[Finding]:
        white = self._robust(self._apgd(self.plan.eps)) & self._robust(self._apgd(self.plan.eps, loss=MARGIN))
        checks: list[Callable[[Tensor], Finding]] = [self._randomness, self._zero_gradients, self._steps, self._radius]
        checks += [self._unbounded, self._black_box]
        found = [check(white) for check in checks]
        for suffix, twin in self._twins().items():
            found += [self._transfer(white, suffix, twin), self._adaptive(white, suffix, twin)]
        return [*found, self._worst_case(white)]

    def _twins(self) -> dict[str, nn.Module]:
        """Every model to attack through, by what its findings' names end in."""
        twins = {f" ({name})": twin for name, twin in self.plan.twins.items()}
        if self.plan.surrogate is not None:
            twins[""] = self.plan.surrogate
        return twins

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
        if self.plan.norm == LINF:
            radii = [min(radius, 1.0) for radius in radii]
        accuracies = [self._accuracy(self._apgd(radius)) for radius in radii]
        return self._falling("larger radius", "accuracy does not rise with the radius", radii, accuracies, "eps")

    def _unbounded(self, white: Tensor) -> Finding:
        everything = {"linf": 1.0, "l2": self.x[0].numel() ** 0.5, "l1": float(self.x[0].numel())}[self.plan.norm.name]
        left = self._robust(self._apgd(everything)) & self._robust(self._apgd(everything, loss=MARGIN))
        accuracy = float(left.double().mean())
        passed = int(left.sum()) <= self._tolerated()
        sentence = "with every image allowed, " + ("none is robust" if passed else "some are still robust")
        return Finding(name="unbounded", passed=passed, sentence=sentence, numbers={"accuracy": accuracy})

    def _black_box(self, white: Tensor) -> Finding:
        square = Square(eps=self.plan.eps, norm=self.plan.norm, queries=self.plan.queries, seed=self.plan.seed)
        return self._not_stronger("black box", "a search without gradients", self._robust(square), white)

    def _transfer(self, white: Tensor, suffix: str, twin: nn.Module) -> Finding:
        robust = self._robust(self._apgd(self.plan.eps, loss=MARGIN), twin)
        return self._not_stronger(f"transfer{suffix}", "an attack on the surrogate", robust, white)

    def _adaptive(self, white: Tensor, suffix: str, twin: nn.Module) -> Finding:
        through = SurrogateGradient(self.model, twin)
        robust = self._robust(self._apgd(self.plan.eps), through)
        robust = robust & self._robust(self._apgd(self.plan.eps, loss=MARGIN), through)
        return self._not_stronger(f"adaptive{suffix}", "an attack with the surrogate's gradients", robust, white)

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
        key = (threat, victim or self.model)
        if key not in self.known:
            self.known[key] = self._over(lambda x, y, ids: self._right(disturb(threat, key[1], x, y, ids), y))
        return self.known[key]

    def _over(self, judge: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """One answer per image, batch by batch."""
        return torch.cat([judge(*batch) for batch in self.batches])

    @torch.no_grad()
    def _right(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(x).argmax(1) == y

    def _is_flat(self, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        with frozen(self.model):
            grad = loss_and_grad(self.model, x, lambda logits: CE(logits, y)).grad
        return grad.flatten(1).abs().amax(1) < 1e-12

    @torch.no_grad()
    def _spread(self) -> float:
        first, second = (torch.cat([self.model(x) for x, _, _ in self.batches]) for _ in range(2))
        spread = float((first - second).abs().max())
        if spread > 1e-4 * (1 + float(first.abs().max())):
            return spread
        return 0.0
