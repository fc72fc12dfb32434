"""Can AutoAttack's figure be believed? Cheap checks inside every evaluation by an ensemble of attacks.

They look at the first images for what makes gradient attacks fail without making a model robust (Athalye et al. 2018,
arXiv:1802.00420; Carlini et al. 2019, arXiv:1902.06705): a few passes of the model, whatever the attack costs. What
they find is an open question about the figure and is shown beside it. `--sanity` looks longer. B images, K classes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.random import fork_rng
from torch.utils._python_dispatch import TorchDispatchMode

from vitruvius._checks import check_labels, check_logits
from vitruvius._errors import ConfigError
from vitruvius._files import atomic_write_text, read_text
from vitruvius._processes import Process
from vitruvius.attacks.adapters import FromAutoAttack
from vitruvius.attacks.base import (
    LINF,
    MARGIN,
    Ensemble,
    Norm,
    frozen,
    full_precision,
    in_one_precision,
    loss_and_grad,
)
from vitruvius.evaluation.again import BATCH, MEMORY, ROUNDING, differ
from vitruvius.evaluation.base import DRAWS_RIGHT, Columns
from vitruvius.evaluation.ledger import AFTER

SLACK = 0.01  # share of images by which an order may be missed, and one image always
IMAGES = 64  # looked at, of the first batches
DRAWS = 10  # answers of a random model to each x'
VANISHING = 0.01  # of the margin: a gradient that promises less for all pixels moved by 1 has vanished
STEPS = (0.5, 0.125)  # parts of eps that the gradient's promise is tried at
PROMISE = 0.3  # part of the gradient's promise that a step must keep
# Share of images that may withstand a step that does not. Honest models: 0 on digits (MLP, CNN, ViT, hardened or not),
# 0.02 to 0.3 on an ImageNet classifier; inputs shattered by a sine, where eps is longer than its wave: 0.55 to 1.
MISLED = 0.45
RANDOMNESS = "randomness"
SENTENCES = {  # of open findings by name, in the order in which they matter
    RANDOMNESS: f"two passes over the same images differ, so the model is random; x' is judged over {DRAWS} draws",
    "probabilities": (
        "the model returns probabilities instead of logits, whose losses have vanishing gradients; "
        "evaluate it without its softmax"
    ),
    "gradient in the forward pass": (
        "the model computes gradients in its forward pass, through which attacks do not differentiate; "
        "a defence that adapts to its input needs an attack made for it"
    ),
    "vanishing gradients": (
        "the margin has no gradient, or next to none, at images that gradient attacks are to break"
    ),
    "shattered gradients": (
        f"a step along the gradient raises the margin by less than {PROMISE:g} of what the gradient says"
    ),
    "memory": (
        "a copy of the model, taken before the attack, classifies images otherwise: the model remembers what it was "
        "asked; x' counts as broken where it fools the copy"
    ),
    "depends on the batch": (
        "a copy of the model, asked in other batches, classifies images otherwise; x' counts as broken where it fools "
        "the copy"
    ),
    "other answers with gradients": (
        "the model answers otherwise when gradients are asked for, so that attacks follow another function"
    ),
    "jumps": (
        "a hundredth of eps moves the margin far more than its gradient says, as where noise is drawn from the image"
    ),
    "ties": "the two largest logits are equal in float32, so the class is decided by their order",
    "saturation": (
        "the logits are so far apart that softmax is exactly one-hot in float32 and cross-entropy has no gradient; "
        "divide them by a constant"
    ),
    "black box": "Square, which uses no gradients, breaks images that the gradient attacks before it left robust",
}
KINDS = {"memory": MEMORY, "depends on the batch": BATCH}
JUMP = 0.05  # of the margin
Numbers = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check of a model's robustness saw, in a sentence and numbers."""

    name: str
    passed: bool
    sentence: str
    numbers: Numbers = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{'ok        ' if self.passed else 'suspicious'}  {self._in_words()}"

    def remark(self) -> str:
        """What it says of a figure, in one sentence."""
        return f"{self._in_words()}."

    def _in_words(self) -> str:
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in self.numbers.items())
        return f"{self.name}: {self.sentence}" + (f" ({numbers})" if numbers else "")


def _open(name: str, numbers: Numbers) -> Finding:
    return Finding(name=name, passed=False, sentence=SENTENCES[name], numbers=numbers)


def is_checked(threat: object) -> bool:
    """Whether the figure of a threat is one that is believed: that of an ensemble."""
    return isinstance(threat, Ensemble | FromAutoAttack)


class MaskingChecks:
    """The checks of one evaluation: its first images are looked at, once for each ensemble.

    threats: by their descriptions; those that are no ensembles are not checked. folder: where findings are kept, so
    that an evaluation that goes on does not look again. rank: of this process, whose images are looked at.
    """

    def __init__(self, threats: Mapping[str, Any], folder: str | Path | None = None, rank: int = 0) -> None:
        whole, own = "findings.json", f"findings.{rank}.json"  # own: of other processes, while they are not together
        self.files = [] if folder is None else [Path(folder) / name for name in ([whole, own] if rank else [whole])]
        self.found: dict[str, list[Finding]] = {}  # by the threat's description; open findings only
        for file in self.files:
            if file.exists():
                written = json.loads(read_text(file)).items()
                self._join({spec: [Finding(**one) for one in findings] for spec, findings in written})
        self.waiting = {
            spec: threat for spec, threat in threats.items() if is_checked(threat) and spec not in self.found
        }
        self.images: list[tuple[Tensor, Tensor]] = []

    @property
    def has_enough(self) -> bool:
        return sum(len(y) for _, y in self.images) >= IMAGES

    def collect(self, x: Tensor, y: Tensor) -> None:
        """Keep images `x` (B, …) with labels `y` (B,) to look at, until there are enough."""
        if self.waiting and not self.has_enough:
            self.images.append((x, y))

    def look(self, model: nn.Module) -> list[Finding]:
        """Check `model` on what was collected, unless that was done before. The findings that are new."""
        if not self.waiting or not self.images:
            return []
        x, y = (torch.cat(parts)[:IMAGES] for parts in zip(*self.images, strict=True))
        news: dict[str, Finding] = {}
        for spec, threat in self.waiting.items():
            ball: dict[str, Any] = {"eps": getattr(threat, "eps", None), "norm": getattr(threat, "norm", LINF)}
            findings = look(model, x, y, **ball, batch_size=len(self.images[0][1]))
            if getattr(threat, "version", "") != "rand":  # another version of AutoAttack is for random models
                findings = [_advise(finding) for finding in findings]
            self.found[spec] = findings
            news |= {finding.name: finding for finding in findings}
        self.waiting = {}
        self.images = []
        self._save()
        return list(news.values())

    def draws(self, spec: str) -> int:
        """How often the model is asked about each x' of a threat: several times where it is random."""
        return DRAWS if any(finding.name == RANDOMNESS for finding in self.found.get(spec, [])) else 1

    def say(self, spec: str) -> str:
        """What is put behind a threat's figure: the names of its findings, or nothing."""
        names = ", ".join(finding.name for finding in self.found.get(spec, []))
        return f", doubtful: {names}" if names else ""

    def gather(self, process: Process) -> dict[str, list[Finding]]:
        """What all processes have found, of each name the first; kept in one file. Call it on all processes."""
        every = process.gather(self.found)
        self.found = {}
        for found in every:
            self._join(found)
        process.on_first(self._save)
        for file in self.files[1:]:
            file.unlink(missing_ok=True)
        return self.found

    def _join(self, other: Mapping[str, Sequence[Finding]]) -> None:
        for spec, findings in other.items():
            mine = self.found.setdefault(spec, [])
            names = {finding.name for finding in mine}
            mine += [finding for finding in findings if finding.name not in names]

    def _save(self) -> None:
        if self.files and self.found:
            plain = {spec: [asdict(finding) for finding in findings] for spec, findings in self.found.items()}
            atomic_write_text(self.files[-1], json.dumps(plain, indent=1, ensure_ascii=False) + "\n")


def look(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float | None = None,
    norm: Norm = LINF,
    batch_size: int | None = None,
) -> list[Finding]:
    """What speaks against believing gradient attacks on a model; empty if nothing does.

    model: in eval mode. x: images (B, …) in [0, 1]. y: labels (B,).
    eps, norm: of the attack; without a finite eps the gradient's direction is not tried.
    batch_size: images in one pass of the model; default all.
    Nothing is drawn from torch's global random streams.
    """
    forked = fork_rng([]) if x.device.type == "cpu" else fork_rng([x.device], device_type=x.device.type)
    with forked, torch.inference_mode(False), torch.no_grad(), frozen(model):
        model, x = in_one_precision(model, x.clone())
        return _Look(model, x, y.clone(), eps, norm, batch_size or max(len(x), 1)).findings()


@dataclass
class _Look:
    """One model on a few images."""

    model: nn.Module
    x: Tensor
    y: Tensor
    eps: float | None
    norm: Norm
    batch_size: int
    precision: float = 0.0  # of what the model returns
    logits_with_grad: Tensor | None = None  # (n, K) of the images that are right

    def __post_init__(self) -> None:
        self.logits = self._answer(self.x)  # (B, K)
        check_logits(self.logits, len(self.x))
        check_labels(self.y, self.logits.shape[1])
        self.spread = self._spread()
        self.rows = (self.logits.argmax(1) == self.y).nonzero().squeeze(1)  # what is wrong already needs no gradient
        self.grad = self._margin_gradient()
        eps = math.inf if self.eps is None else self.eps
        self.can_step = self.spread == 0 and math.isfinite(eps) and len(self.rows) > 0

    def findings(self) -> list[Finding]:
        """Open findings, in the order in which they matter."""
        probabilities = (self.logits >= 0).all() & ((self.logits.sum(1) - 1).abs() <= 1e-2).all()
        flat = self._flat()
        zero = self.grad.flatten(1).abs().amax(1) == 0
        top = self.logits.topk(2, dim=1).values
        one_hot = (self.logits.float().softmax(1) > 0).sum(1) == 1
        numbers = {
            RANDOMNESS: {"largest difference of logits": self.spread} if self.spread > 0 else None,
            "probabilities": {"smallest output": float(self.logits.min())} if probabilities else None,
            "gradient in the forward pass": {} if calls_autograd(self.model, self.x[:2]) else None,
            "vanishing gradients": _shares(flat, {"exactly zero": share_of(zero)}),
            "shattered gradients": self._shattered(),
            "jumps": self._jumps(),
            "other answers with gradients": self._otherwise_with_gradients(),
            "ties": _shares(top[:, 0] == top[:, 1]),
            "saturation": _shares(one_hot),
        }
        return [_open(name, number) for name, number in numbers.items() if number is not None]

    def _shattered(self) -> Numbers | None:
        """Does a step along the gradient raise the margin by what the gradient says, or else fool the model?"""
        share = max(share_of(self._misled(part)) for part in STEPS) if self.can_step else 0.0
        return {"share of images": share} if share > MISLED else None

    def _jumps(self) -> Numbers | None:
        """Does a hundredth of the radius move the margin much more than its gradient says?"""
        if not self.can_step:
            return None
        change, promised, before = self._step(0.01)
        share = share_of((change - promised).abs() > 10 * promised.abs() + JUMP * before.abs())
        return {"share of images": share} if share > MISLED else None

    def _otherwise_with_gradients(self) -> Numbers | None:
        """Are the logits of a pass that is recorded for a gradient the same as without?"""
        if self.spread > 0 or self.logits_with_grad is None:
            return None
        logits = self.logits[self.rows]
        rounding = max(ROUNDING, 4 * self.precision)
        if not differ(self.logits_with_grad, logits, rounding).any():
            return None
        logits = self._answer(self.x[self.rows])  # in the same batches: images beside it may matter too
        others = differ(self.logits_with_grad, logits, rounding)
        return {"share of images": share_of(others)} if others.any() else None

    def _misled(self, part: float) -> Tensor:
        """Images that withstand a step of this part of the ball's radius, and hardly notice it."""
        change, promised, before = self._step(part)
        return ~self._flat() & (before + change < 0) & (change < PROMISE * promised)

    def _step(self, part: float) -> tuple[Tensor, Tensor, Tensor]:
        """(n,) how a step along the gradient changes the margin, how it should by the gradient, and the margin before.

        `part` of the ball's radius is how far it goes.
        """
        start, label = self.x[self.rows], self.y[self.rows]
        moved = (start + part * self._dense_radius() * self.grad.sign()).clamp(0, 1)
        before = MARGIN(self.logits[self.rows], label)
        promised = (self.grad * (moved - start)).flatten(1).sum(1)
        return MARGIN(self._answer(moved), label) - before, promised, before

    def _flat(self) -> Tensor:
        """Images where, by the gradient, no change of the pixels would move the margin by a hundredth of itself."""
        reach = self.grad.flatten(1).abs().sum(1)
        margin = MARGIN(self.logits[self.rows], self.y[self.rows]).abs()
        return (reach == 0) | (reach < VANISHING * margin)

    def _margin_gradient(self) -> Tensor:
        """Of the images that are right; zero where the output does not depend on the image for autograd."""
        x = self.x[self.rows]
        if not len(x):
            return x
        parts = zip(x.split(self.batch_size), self.y[self.rows].split(self.batch_size), strict=True)
        try:
            found = [loss_and_grad(lambda x: _as_numbers(self.model(x)), x, partial(MARGIN, y=y)) for x, y in parts]
        except ConfigError:
            return torch.zeros_like(x)
        self.logits_with_grad = torch.cat([each.logits for each in found])
        return torch.cat([each.grad for each in found])

    def _answer(self, x: Tensor) -> Tensor:
        """(B, K) logits, a batch at a time; how finely the model writes them is noted."""
        parts = [_as_numbers(self.model(part)) for part in x.split(self.batch_size)]
        self.precision = torch.finfo(parts[0].dtype).eps
        return torch.cat([full_precision(part) for part in parts])

    def _dense_radius(self) -> float:
        """How far all pixels can move together inside the ball."""
        pixels = self.x[:1].numel()
        shares = {"l2": pixels**0.5, "l1": float(pixels)}
        return (self.eps or 0.0) / shares.get(self.norm.name, 1.0)

    def _spread(self) -> float:
        """The largest difference of logits between two passes; 0 if it is rounding."""
        spread = float((self._answer(self.x) - self.logits).abs().max())
        return spread if spread > max(1e-4, 4 * self.precision) * (1 + float(self.logits.abs().max())) else 0.0


def _as_numbers(logits: Tensor) -> Tensor:
    """Classes written as whole numbers or truth values are judged as numbers."""
    return logits if logits.is_floating_point() else logits.float()


def calls_autograd(model: nn.Module, x: Tensor) -> bool:
    """Whether the forward pass asks autograd for gradients, however it came by that function."""
    with _BackwardWatch() as watch:
        model(x)
    return watch.seen


class _BackwardWatch(TorchDispatchMode):
    """Notes whether an operation runs inside autograd's engine."""

    seen = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or torch._C._current_graph_task_id() != -1
        return func(*args, **(kwargs or {}))


def stage_findings(rows: Columns) -> list[Finding]:
    """What an ensemble's own stages say, from its `rows` in a ledger: Square breaks what gradients did not."""
    stages = {name.removeprefix(AFTER): robust for name, robust in rows.items() if name.startswith(AFTER)}
    number = len(rows["id"])
    broken = 0
    by_gradient = False  # whether an attack with gradients has come before
    for before, name in pairwise(stages):  # the first is `clean`
        if not name.startswith("square"):
            by_gradient = True
        elif by_gradient:
            broken += int((stages[before] & ~stages[name]).sum())
    if broken <= max(1, SLACK * number):
        return []
    return [_open("black box", {"images": broken, "share of images": broken / number})]


def again_findings(parts: Sequence[Columns], *columns: str) -> list[Finding]:
    """Whether a copy of the model has answered otherwise, from rows in a ledger and those `columns` of them."""
    said = [torch.stack([rows[name] for name in columns]) for rows in parts if all(name in rows for name in columns)]
    numbers = {name: sum(int((column == kind).any(0).sum()) for column in said) for name, kind in KINDS.items()}
    return [_open(name, {"images": number}) for name, number in numbers.items() if number]


def draw_remarks(spec: str, rows: Columns) -> list[str]:
    """Worst and mean of the draws over which a threat on a random model was judged, from its rows in a ledger."""
    if DRAWS_RIGHT not in rows:
        return []
    worst, mean = (float(rows[name].double().mean()) for name in ("correct", DRAWS_RIGHT))
    return [
        f"{spec} is judged over {DRAWS} draws of a random model: worst {100 * worst:.2f} % (the accuracy given: an "
        f"image counts if it is right in all draws and no stage has broken it), mean {100 * mean:.2f} %."
    ]


def _advise(finding: Finding) -> Finding:
    advice = "; run AutoAttack as version=rand, which averages gradients" if finding.name == RANDOMNESS else ""
    return replace(finding, sentence=f"{finding.sentence}{advice}")


def _shares(rows: Tensor, others: Numbers | None = None) -> Numbers | None:
    """The share of images, and other numbers beside it, if it is more than chance; None otherwise."""
    return {"share of images": share_of(rows), **(others or {})} if int(rows.sum()) > SLACK * len(rows) else None


def share_of(rows: Tensor) -> float:
    """How many of (n,) truth values are true; 0 where there are none."""
    return float(rows.double().mean()) if len(rows) else 0.0
