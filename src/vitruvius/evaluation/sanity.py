"""Is the robustness real? The checks a reviewer asks for (Carlini et al. 2019, arXiv:1902.06705; Athalye et al. 2018).

Each check compares accuracies that must be in order if gradients tell the truth. Attention may hide its gradient
(thresholds, hidden keys, saturation), so the model is also attacked through surrogates: copies with the same weights in
which each part is replaced as it declares itself (`Part.surrogate`), and in float32 where the model computes in less.
Points found there are tried on the model itself, and its forward pass is attacked with their gradients. N images.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitruvius._checks import check_count, device_of
from vitruvius._errors import ConfigError, DataError
from vitruvius._files import atomic_write_text
from vitruvius._format import format_number
from vitruvius._progress import Progress, no_progress, part_of, scaled
from vitruvius._random import image_ids
from vitruvius._yaml import parse_value
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.base import (
    CE,
    LINF,
    MARGIN,
    Attack,
    Ball,
    Norm,
    SurrogateGradient,
    Threat,
    as_norm,
    check_inputs,
    disturb,
    frozen,
    in_one_precision,
    loss_and_grad,
)
from vitruvius.attacks.hopskipjump import HopSkipJump
from vitruvius.attacks.square import Square
from vitruvius.attention.base import Core, build_surrogate
from vitruvius.evaluation.base import Batch, check_judged, numbered
from vitruvius.evaluation.masking import DRAWS, IMAGES, RANDOMNESS, SLACK, Finding, look, share_of
from vitruvius.evaluation.straight_through import (
    InFloat64,
    StraightThrough,
    ZeroGradient,
    modules_without_gradient,
)
from vitruvius.surgery import survey
from vitruvius.surgery.base import Socket, inner
from vitruvius.surgery.vit import link_blocks

GRADIENT = 3  # passes that a gradient takes
SAMPLE = 8  # images of an unsuspicious model that long black-box searches are tried on
MOST = 64  # of a suspicious one
LONG = ("longer black box", "decision based")  # these searches
REFUSALS = (RuntimeError, TypeError, ValueError)  # of a model that cannot be run in some other way


def examine(
    model: nn.Module,
    loader: Iterable[Any],
    eps: float,
    *,
    norm: Norm | str = LINF,
    images: int = 256,
    seed: int = 0,
    progress: Progress = no_progress,
) -> list[Finding]:
    """Every check on the first images of a loader, through the surrogates of the model's attention too.

    model: in eval mode. loader: yields (images, labels, …).
    eps: the radius in pixels, in `norm`: linf, l2 or l1.
    images: how many are looked at. seed: that of the attacks.
    progress: told which check is being made.
    """
    batches: list[Batch] = []
    for batch in numbered(loader):
        batches.append(batch)
        if sum(len(y) for _, y, _ in batches) >= images:
            break
    if not batches:
        raise DataError("the loader yielded no images; nothing to look at.")
    x, y, ids = (torch.cat(column)[:images] for column in zip(*batches, strict=True))
    device = device_of(model)
    twins = make_twins(model, tuple(x.shape[1:]))
    sanity = Sanity(eps=eps, norm=as_norm(norm), seed=seed, twins=twins, batch_size=len(batches[0][1]))
    return sanity(model, x.to(device), y.to(device), ids=ids, progress=progress)


def read_ball(text: str | float | None) -> tuple[Norm, float] | None:
    """Norm and radius as a command writes them: 8/255 in linf, l2:0.5, l1:12; None for a `text` of None."""
    if text is None:
        return None
    norm, colon, radius = str(text).rpartition(":")
    value = parse_value(radius)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"--sanity {text} is not a number; write a strength in pixels such as 8/255, or with its norm, l2:0.5."
        )
    checks = Sanity(eps=float(value), norm=as_norm(norm if colon else "linf"))  # which refuses what is no radius
    return checks.norm, checks.eps


def save_findings(findings: Sequence[Finding], path: str | Path) -> None:
    """As JSON, one object per check."""
    atomic_write_text(path, json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")


def make_twins(model: nn.Module, input_size: tuple[int, ...] | None = None) -> dict[str, nn.Module]:
    """Copies of `model` to attack through, by name; none where its attention declares none."""
    twins: dict[str, nn.Module] = {}
    if any(part.surrogate is not None for core in _cores(model).values() for part in core.parts.values()):
        twins["plain"] = _twin(model, input_size)
    if any(p.is_floating_point() and p.dtype.itemsize < torch.float32.itemsize for p in model.parameters()):
        twins["float32"] = copy.deepcopy(model).float()
    return twins


def _cores(model: nn.Module) -> dict[str, Core]:
    sockets = {name: module for name, module in inner(model).named_modules() if isinstance(module, Socket)}
    return {name: socket.core for name, socket in sockets.items() if isinstance(socket.core, Core)}


def _twin(model: nn.Module, input_size: Any) -> nn.Module:
    """A copy in which every part that has a surrogate is replaced by it."""
    twin = copy.deepcopy(model)
    sites = survey(twin, input_size=input_size)
    for place, core in _cores(twin).items():
        if replaced := build_surrogate(core, sites[place]):
            socket: Any = inner(twin).get_submodule(place)
            weight = next(p for p in socket.parameters() if p.is_floating_point())
            socket.core = replaced.to(weight).train(socket.training)
    link_blocks(inner(twin))
    return twin


@dataclass(frozen=True, kw_only=True)
class Sanity(Ball):
    """How thoroughly to look: at radius `eps` of `norm`, with `steps` of APGD and `queries` of a black-box search.

    Through each of the `twins` (models by name) transfer and attacks with its gradients are tried too, and the worst
    case says who found it. A model that rounds, detaches or saturates is also attacked through itself, with gradients
    passed straight through (BPDA) and in float64. `eot_iterations` gradients are averaged where the model is random.
    `long_queries` are spent on images that nothing has broken: by a longer search over squares, and by `hops` rounds of
    HopSkipJump, which sees classes alone (linf and l2); on a few images, on more where a check is suspicious; 0 leaves
    either out. `batch_size` images are looked at at once (default all), `seed` is that of the attacks.
    """

    steps: int = 50
    queries: int = 500
    long_queries: int = 5000
    hops: int = 25
    eot_iterations: int = 20
    twins: Mapping[str, nn.Module] = field(default_factory=dict)
    batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps > 0:
            raise ConfigError(f"checks at eps={self.eps:g}; give a radius above 0, such as 8/255.")
        for name in ("long_queries", "hops"):
            if getattr(self, name):
                check_count(getattr(self, name), name)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, *, ids: Tensor | None = None, progress: Progress = no_progress
    ) -> list[Finding]:
        """All checks on these images; a few hundred say enough.

        model: in eval mode. x, y: images (B, C, H, W) in [0, 1] and labels (B,).
        ids: (B,) int64, name the images for the random numbers; default: a hash of their pixels.
        progress: told how much is done, in checks that take as long as the average, and which is being made.
        """
        check_judged(model)
        check_inputs(x, y)
        model, x = in_one_precision(model, x)
        return _Examination(self, model, x, y, image_ids(x) if ids is None else ids, progress).findings()


class Check(NamedTuple):
    """One check, and roughly how many passes of the model it takes for each image."""

    name: str
    passes: float
    run: Callable[[], object]
    attacks: int = 1  # that it runs, one after the other


@dataclass
class _Examination:
    """One model on one set of images."""

    plan: Sanity
    model: nn.Module
    x: Tensor
    y: Tensor
    ids: Tensor
    progress: Progress  # of all checks

    def __post_init__(self) -> None:
        self.attacked = ZeroGradient(self.model)  # so that a model without any gradient is a finding and not an error
        self.ids = self.ids.to(self.y.device)
        self.batch_size = self.plan.batch_size or len(self.y)
        self.batches = self._split(torch.arange(len(self.y), device=self.y.device))
        self.attack_progress: list[Progress] = []  # of the attacks that the check will still run
        self.attacks_run: dict[tuple[Threat, nn.Module], Tensor] = {}  # who is robust to it: some are asked for twice
        self.others: dict[str, Tensor] = {}  # which images are robust to what is no white-box attack, by check
        self.white = torch.ones_like(self.y, dtype=torch.bool)  # which are robust to white-box attacks
        self.found: list[Finding] = []
        self.spread = self._spread()
        self.passes = self.plan.eot_iterations if self.spread > 0 else 1  # averaged for a gradient
        self.draws = DRAWS if self.spread > 0 else 1  # answers to each x'

    def findings(self) -> list[Finding]:
        checks = self._checks()
        unit = sum(check.passes for check in checks) / len(checks)
        before = 0.0
        for check in checks:
            share = check.passes / unit
            progress = scaled(part_of(self.progress, before, len(checks) - before - share, check.name), share)
            progress(0, 1, self._in_words())
            parts = range(check.attacks)
            self.attack_progress = [scaled(part_of(progress, part, parts.stop - part - 1), 1) for part in parts]
            check.run()
            before += share
        return self.found

    def _report(self, name: str, passed: bool, sentence: str, numbers: dict[str, float]) -> None:
        self.found.append(Finding(name=name, passed=passed, sentence=sentence, numbers=numbers))

    def _in_words(self) -> str:
        """How many images withstand the white box, where that is known."""
        if not self.found:
            return ""
        return f"{int(self.white.sum())} of {len(self.y)} images robust to the white box"

    def _checks(self) -> list[Check]:
        """All checks in their order; those after the white box are compared with it."""
        ascent = GRADIENT * self.plan.steps
        checks = [
            Check("white box", 2 * ascent, self._white_box, attacks=2),
            Check("first look", 2 * GRADIENT, self._first_look),
            Check("randomness", 1, self._randomness),
            Check("zero gradients", GRADIENT, self._zero_gradients),
            Check("more steps", ascent / 2, self._steps, attacks=2),
            Check("larger radius", 2 * ascent, self._radius, attacks=2),
            Check("unbounded", 2 * ascent, self._unbounded, attacks=2),
            Check("black box", self.plan.queries, self._black_box),
        ]
        for name, twin in {**self.plan.twins, **self._twins_of_itself()}.items():
            checks.append(Check(f"transfer ({name})", ascent, partial(self._transfer, name, twin)))
            checks.append(Check(f"adaptive ({name})", 2 * ascent, partial(self._adaptive, name, twin), attacks=2))
        for name, attack in self._long_searches().items():
            passes = attack.cost().total * SAMPLE / max(len(self.y), SAMPLE)
            checks.append(Check(name, passes, partial(self._search_long, name, attack)))
        return [*checks, Check("worst case", 0, self._worst_case)]

    def _white_box(self) -> None:
        self.white = self._robust_to_both(self.plan.eps)

    def _first_look(self) -> None:
        """What the checks inside every evaluation find, but for randomness, which has a check of its own."""
        ball: dict[str, Any] = {"eps": self.plan.eps, "norm": self.plan.norm}
        found = look(self.model, self.x[:IMAGES], self.y[:IMAGES], **ball, batch_size=self.batch_size)
        self.found += [finding for finding in found if finding.name != RANDOMNESS]

    def _randomness(self) -> None:
        sentence = "two passes agree"
        if self.spread > 0:
            sentence = (
                f"two passes differ: the model is random; gradients here are means of {self.passes} passes, "
                "and AutoAttack must run as version='rand'"
            )
        self._report(RANDOMNESS, self.spread == 0, sentence, {"largest difference of logits": self.spread})

    def _zero_gradients(self) -> None:
        share = share_of(self._is_flat())
        passed = share <= SLACK
        sentence = "the loss has a slope at the images" if passed else "the loss is flat at some images"
        self._report("zero gradients", passed, sentence, {"share": share})

    def _steps(self) -> None:
        counts = [max(self.plan.steps // 10, 1), max(self.plan.steps // 3, 1), self.plan.steps]
        robust = [self._robust(self._apgd(self.plan.eps, steps=n)) for n in counts]
        self._falling("more steps", "with steps", counts, robust, "steps")

    def _radius(self) -> None:
        radii = [self.plan.eps * factor for factor in (0.5, 1.0, 2.0)]
        unit = f"{self.plan.norm} eps"
        if self.plan.norm == LINF:
            unit = "eps"
            radii = [min(radius, 1.0) for radius in radii]
        robust = [self._robust(self._apgd(radius)) for radius in radii]
        self._falling("larger radius", "with the radius", radii, robust, unit)

    def _unbounded(self) -> None:
        pixels = self.x[0].numel()
        left = self._robust_to_both({"linf": 1.0, "l2": pixels**0.5, "l1": float(pixels)}[self.plan.norm.name])
        passed = int(left.sum()) <= self._tolerated()
        sentence = "with every image allowed, " + ("none is robust" if passed else "some are still robust")
        self._report("unbounded", passed, sentence, {"accuracy": share_of(left)})

    def _black_box(self) -> None:
        square = self._square(self.plan.queries, self.plan.seed)
        self._not_stronger("black box", "a search without gradients", self._robust(square))

    def _transfer(self, name: str, twin: nn.Module) -> None:
        robust = self._robust(self._apgd(self.plan.eps, loss=MARGIN), twin)
        self._not_stronger(f"transfer ({name})", "an attack on the surrogate", robust)

    def _adaptive(self, name: str, twin: nn.Module) -> None:
        robust = self._robust_to_both(self.plan.eps, SurrogateGradient(self.model, twin))
        self._not_stronger(f"adaptive ({name})", "an attack with the surrogate's gradients", robust)

    def _search_long(self, name: str, attack: Attack) -> None:
        """A search without gradients on images that nothing has broken: a few, more where a check is suspicious."""
        suspicious = any(not finding.passed for finding in self.found if finding.name not in LONG)
        limit = MOST if suspicious else SAMPLE
        tried = self._left().nonzero().squeeze(1)[:limit]
        robust = torch.ones_like(self.white)
        if len(tried):
            robust[tried] = self._robust_among(attack, self.model, self._split(tried))
        self.others[name] = robust
        broken = int((~robust).sum())
        passed = broken <= self._tolerated()
        what = "nothing" if passed else "images"
        who = "HopSkipJump, which sees predicted classes alone,"
        if isinstance(attack, Square):
            who = f"a search over squares of {attack.queries} queries"
        numbers = {"images tried": float(len(tried)), "images only it breaks": float(broken)}
        self._report(name, passed, f"{who} breaks {what} that all others have left", numbers)

    def _worst_case(self) -> None:
        """What is left when each image meets the attack that breaks it, whoever found it."""
        left = self._left()
        gains = {name: int((self.white & ~robust).sum()) for name, robust in self.others.items()}
        best = max(gains, key=lambda name: gains[name])
        passed = int((self.white & ~left).sum()) <= self._tolerated()
        sentence = "nothing breaks more than the white-box attack"
        if not passed:
            sentence = f"{best} breaks most of what the white-box attack does not: report this accuracy"
        numbers = {"accuracy": share_of(left), "white-box accuracy": share_of(self.white)}
        self._report("worst case", passed, sentence, numbers)

    def _left(self) -> Tensor:
        """Images that nothing has broken."""
        return torch.stack([self.white, *self.others.values()]).all(0)

    def _twins_of_itself(self) -> dict[str, nn.Module]:
        """The model: its gradients passed straight through, without what has none, and in float64 where flat."""
        modules: tuple[str, ...] = ()
        with suppress(*REFUSALS):
            modules = modules_without_gradient(self.model, self.x[:2])
        straight = StraightThrough(self.model, modules)
        twins: dict[str, nn.Module] = {}
        if self._has_gradient(straight) and straight.replaced:
            twins["straight-through"] = straight
            smooth = StraightThrough(self.model, modules, smooth=True)
            if self._has_gradient(smooth):
                twins["smooth"] = smooth
        if bool(self._is_flat().any()):
            with suppress(*REFUSALS):
                double = InFloat64(copy.deepcopy(self.model))
                if self._has_gradient(double):
                    twins["float64"] = double
        return twins

    def _has_gradient(self, twin: nn.Module) -> bool:
        """Whether the model can be run this way on two images, and one of them then has a gradient."""
        with suppress(*REFUSALS), frozen(twin):
            return bool(loss_and_grad(twin, self.x[:2], lambda logits: MARGIN(logits, self.y[:2])).grad.any())
        return False

    def _long_searches(self) -> dict[str, Attack]:
        """By the name of the check."""
        searches: dict[str, Attack] = {}
        plan = self.plan
        together = max(self.batch_size // max(MOST, 1), 1)  # queries of an image at once
        if plan.long_queries:
            searches[LONG[0]] = self._square(plan.long_queries, plan.seed + 1)
        if plan.hops and plan.norm.name in HopSkipJump.norms:
            searches[LONG[1]] = HopSkipJump(
                eps=plan.eps, norm=plan.norm, steps=plan.hops, first_queries=40, group=together, seed=plan.seed
            )
        return searches

    def _falling(self, name: str, what: str, settings: Sequence[float], robust: Sequence[Tensor], unit: str) -> None:
        slack, accuracies = self._tolerated() / len(self.y), [share_of(rows) for rows in robust]
        passed = all(later <= earlier + slack for earlier, later in pairwise(accuracies))
        sentence = f"accuracy {'does not rise' if passed else 'rises'} {what}"
        names = [f"{unit} {format_number(setting)}" for setting in settings]
        self._report(name, passed, sentence, dict(zip(names, accuracies, strict=True)))

    def _not_stronger(self, name: str, who: str, robust: Tensor) -> None:
        self.others[name] = robust
        broken = int((self.white & ~robust).sum())
        passed = broken <= self._tolerated()
        sentence = f"{who} breaks {'nothing' if passed else 'images'} that the white-box attack does not"
        numbers = {"its accuracy": share_of(robust), "white-box accuracy": share_of(self.white)}
        self._report(name, passed, sentence, {**numbers, "images only it breaks": float(broken)})

    def _tolerated(self) -> int:
        """Images by which chance may spoil an order."""
        return max(1, int(SLACK * len(self.y)))

    def _apgd(self, eps: float, **settings: Any) -> APGD:
        chosen = {"steps": self.plan.steps, "seed": self.plan.seed, "eot_iterations": self.passes, **settings}
        return APGD(eps=eps, norm=self.plan.norm, **chosen)

    def _square(self, queries: int, seed: int) -> Square:
        """A search that never asks more rows at once than anybody else here."""
        plan = self.plan
        return Square(eps=plan.eps, norm=plan.norm, queries=queries, seed=seed, batch_size=self.batch_size)

    def _robust_to_both(self, eps: float, victim: nn.Module | None = None) -> Tensor:
        """Which images withstand APGD with either loss."""
        return self._robust(self._apgd(eps), victim) & self._robust(self._apgd(eps, loss=MARGIN), victim)

    def _robust(self, threat: Threat, victim: nn.Module | None = None) -> Tensor:
        """Which images the model has right after an attack on itself, or on a victim in its place."""
        key = (threat, victim or self.attacked)
        if key not in self.attacks_run:
            self.attacks_run[key] = self._robust_among(threat, key[1], self.batches)
        return self.attacks_run[key]

    def _robust_among(self, threat: Threat, victim: nn.Module, batches: Sequence[Batch]) -> Tensor:
        """(n,) whether the model is right about the images of these batches after an attack; in all draws."""
        robust = []
        progress = self.attack_progress.pop(0) if self.attack_progress else no_progress
        for number, (x, y, ids) in enumerate(batches, 1):
            place = f"batch {number} of {len(batches)}" if len(batches) > 1 else ""
            text = ", ".join(filter(None, [place, self._in_words()]))
            batch_progress = scaled(part_of(progress, number - 1, len(batches) - number, text), 1)
            moved = disturb(threat, victim, x, y, ids, batch_progress)
            with torch.no_grad():
                robust.append(torch.stack([self.model(moved).argmax(1) == y for _ in range(self.draws)]).all(0))
        return torch.cat(robust)

    def _split(self, rows: Tensor) -> list[Batch]:
        """Some images in batches, with their labels and ids."""
        return [(self.x[part], self.y[part], self.ids[part]) for part in rows.split(self.batch_size)]

    def _is_flat(self) -> Tensor:
        """(N,) whether cross-entropy has no slope at the image."""
        flat = []
        for x, y, _ in self.batches:
            with frozen(self.model):
                grad = loss_and_grad(self.attacked, x, lambda logits, y=y: CE(logits, y)).grad  # type: ignore[misc]
            flat.append(grad.flatten(1).abs().amax(1) < 1e-12)
        return torch.cat(flat)

    @torch.no_grad()
    def _spread(self) -> float:
        first, second = (torch.cat([self.model(x) for x, _, _ in self.batches]) for _ in range(2))
        spread = float((first - second).abs().max())
        return spread if spread > 1e-4 * (1 + float(first.abs().max())) else 0.0
