"""Can AutoAttack's figure be believed? Cheap checks inside every evaluation by an ensemble of attacks.

They look at the first images for what makes gradient attacks fail without making a model robust (Athalye et al. 2018,
arXiv:1802.00420; Carlini et al. 2019, arXiv:1902.06705): a few passes of the model, whatever the attack costs. What
they find is an open question about the figure and is shown beside it. `--sanity` looks longer. B images, K classes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import check_labels, check_logits
from vitruvius._errors import ConfigError
from vitruvius._files import atomic_write_text, read_text
from vitruvius.attacks import LINF, MARGIN, Ensemble, Norm, frozen, full_precision, loss_and_grad
from vitruvius.attacks.adapters import FromAutoAttack
from vitruvius.evaluation.ledger import AFTER, DRAWS_RIGHT, FINDINGS, Columns
from vitruvius.evaluation.sanity import SLACK, Finding

IMAGES = 64  # looked at, of the first batch
DRAWS = 10  # answers of a random model to each x'
VANISHING = 0.01  # of the margin: a gradient that promises less for all pixels moved by 1 has vanished
STEPS = (0.5, 0.125)  # parts of eps that the gradient's promise is tried at
PROMISE = 0.3  # part of the gradient's promise that a step must keep
MISLED = 0.25  # share of images that may withstand a step that does not
RANDOMNESS = "randomness"


class MaskingChecks:
    """The checks of one evaluation: the first images it judges are looked at, once for each ensemble.

    threats: by their descriptions; those that are no ensembles are not checked.
    """

    def __init__(self, threats: Mapping[str, Any]) -> None:
        self.checked = {
            spec: threat for spec, threat in threats.items() if isinstance(threat, Ensemble | FromAutoAttack)
        }
        self.found: dict[str, list[Finding]] = {}  # by the threat's description; open findings only

    def look(self, model: nn.Module, x: Tensor, y: Tensor) -> list[Finding]:
        """Check the model on images `x` (B, …) with labels `y` (B,); nothing after the first time. New findings."""
        news: dict[str, Finding] = {}
        for spec, threat in self.checked.items():
            if spec in self.found:
                continue
            eps = getattr(threat, "eps", None)
            norm = getattr(threat, "norm", LINF)
            findings = look(model, x[:IMAGES], y[:IMAGES], eps=eps, norm=norm)
            self.found[spec] = [_advise(finding, threat) for finding in findings]
            for finding in self.found[spec]:
                news.setdefault(finding.name, finding)
        return list(news.values())

    def draws(self, spec: str) -> int:
        """How often the model is asked about each x' of a threat: several times where it is random."""
        if any(finding.name == RANDOMNESS for finding in self.found.get(spec, [])):
            return DRAWS
        return 1

    def join(self, others: list[dict[str, list[Finding]]]) -> None:
        """What all processes have found on their images, in their order; one finding of each name is kept."""
        self.found = {}
        for other in others:
            for spec, findings in other.items():
                mine = self.found.setdefault(spec, [])
                names = {finding.name for finding in mine}
                mine += [finding for finding in findings if finding.name not in names]


def look(model: nn.Module, x: Tensor, y: Tensor, *, eps: float | None = None, norm: Norm = LINF) -> list[Finding]:
    """What speaks against believing gradient attacks on a model; empty if nothing does.

    model: in eval mode. x: images (B, …) in [0, 1]. y: labels (B,). eps, norm: of the attack; without a finite eps the
    gradient's direction is not tried. Draws nothing from torch's global random streams.
    """
    with _forked_rng(x.device), torch.inference_mode(False), torch.no_grad(), frozen(model):
        return _Look(model, x.clone(), y.clone(), eps, norm).findings()


def _forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Inside, random models draw from copies of the global streams of the CPU and of this device."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


class _Look:
    """One model on a few images."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, eps: float | None, norm: Norm) -> None:
        self.model = model
        self.x = x
        self.y = y
        self.eps = eps
        self.norm = norm
        self.logits = full_precision(model(x))  # (B, K)
        check_logits(self.logits, len(x))
        check_labels(y, self.logits.shape[1])
        self.spread = self._spread()
        right = self.logits.argmax(1) == y
        self.rows = right.nonzero().squeeze(1)  # what is wrong already needs no gradient
        self.grad = self._margin_gradient()

    def findings(self) -> list[Finding]:
        """Open findings, in the order in which they matter."""
        every = [
            self._randomness(),
            self._probabilities(),
            self._gradient_in_forward(),
            self._vanishing(),
            self._shattered(),
            self._ties(),
            self._saturation(),
        ]
        return [finding for finding in every if finding is not None]

    def _randomness(self) -> Finding | None:
        if self.spread == 0:
            return None
        return _open(
            RANDOMNESS,
            f"two passes over the same images differ, so the model is random; x' is judged over {DRAWS} draws",
            {"largest difference of logits": self.spread},
        )

    def _probabilities(self) -> Finding | None:
        sums = self.logits.sum(1)
        if bool((self.logits < 0).any()) or bool(((sums - 1).abs() > 1e-3).any()):
            return None
        return _open(
            "probabilities",
            "the model returns probabilities instead of logits, whose losses have vanishing gradients; "
            "evaluate it without its softmax",
            {"smallest output": float(self.logits.min())},
        )

    def _gradient_in_forward(self) -> Finding | None:
        if not calls_autograd(self.model, self.x[:2]):
            return None
        return _open(
            "gradient in the forward pass",
            "the model computes gradients in its forward pass, through which attacks do not differentiate; "
            "a defence that adapts to its input needs an attack made for it",
        )

    def _vanishing(self) -> Finding | None:
        flat = self._flat()
        if not self._many(flat):
            return None
        zero = self.grad.flatten(1).abs().amax(1) == 0
        return _open(
            "vanishing gradients",
            "the margin has no gradient, or next to none, at images that gradient attacks are to break",
            {"share of images": _share(flat), "exactly zero": _share(zero)},
        )

    def _shattered(self) -> Finding | None:
        """Does a step along the gradient raise the margin by what the gradient says, or else fool the model?"""
        if self.spread > 0 or self.eps is None or not math.isfinite(self.eps) or not len(self.rows):
            return None
        share = max(_share(self._misled(part)) for part in STEPS)
        if share <= MISLED:
            return None
        return _open(
            "shattered gradients",
            f"a step along the gradient raises the margin by less than {PROMISE:g} of what the gradient says",
            {"share of images": share},
        )

    def _misled(self, part: float) -> Tensor:
        """Images that withstand a step of this part of the ball's radius, and hardly notice it."""
        delta = part * self._dense_radius() * self.grad.sign()
        start = self.x[self.rows]
        moved = (start + delta).clamp(0, 1)
        label = self.y[self.rows]
        before = MARGIN(self.logits[self.rows], label)
        after = MARGIN(full_precision(self.model(moved)), label)
        promised = (self.grad * (moved - start)).flatten(1).sum(1)
        return ~self._flat() & (after < 0) & (after - before < PROMISE * promised)

    def _ties(self) -> Finding | None:
        top = self.logits.topk(2, dim=1).values
        tied = top[:, 0] == top[:, 1]
        if not self._many(tied):
            return None
        return _open(
            "ties",
            "the two largest logits are equal in float32, so the class is decided by their order",
            {"share of images": _share(tied)},
        )

    def _saturation(self) -> Finding | None:
        one_hot = (self.logits.float().softmax(1) > 0).sum(1) == 1
        if not self._many(one_hot):
            return None
        return _open(
            "saturation",
            "the logits are so far apart that softmax is exactly one-hot in float32 and cross-entropy has no gradient; "
            "divide them by a constant",
            {"share of images": _share(one_hot)},
        )

    def _many(self, rows: Tensor) -> bool:
        return int(rows.sum()) > SLACK * len(rows)

    def _flat(self) -> Tensor:
        """Images where, by the gradient, no change of the pixels would move the margin by a hundredth of itself."""
        reach = self.grad.flatten(1).abs().sum(1)
        margin = MARGIN(self.logits[self.rows], self.y[self.rows]).abs()
        return (reach == 0) | (reach < VANISHING * margin)

    def _margin_gradient(self) -> Tensor:
        """Of the images that are right; zero where the output does not depend on the image for autograd."""
        x = self.x[self.rows]
        y = self.y[self.rows]
        if not len(x):
            return x
        try:
            return loss_and_grad(self.model, x, lambda logits: MARGIN(logits, y)).grad
        except ConfigError:
            return torch.zeros_like(x)

    def _dense_radius(self) -> float:
        """How far all pixels can move together inside the ball."""
        pixels = self.x[:1].numel()
        shares = {"l2": pixels**0.5, "l1": float(pixels)}
        return (self.eps or 0.0) / shares.get(self.norm.name, 1.0)

    def _spread(self) -> float:
        """The largest difference of logits between two passes; 0 if it is rounding."""
        again = full_precision(self.model(self.x))
        spread = float((again - self.logits).abs().max())
        if spread > 1e-4 * (1 + float(self.logits.abs().max())):
            return spread
        return 0.0


def calls_autograd(model: nn.Module, x: Tensor) -> bool:
    """Whether the forward pass asks autograd for gradients, however it came by that function."""
    functions = {torch.autograd.grad.__code__, torch.autograd.backward.__code__}
    called = False

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal called
        called = called or (event == "call" and frame.f_code in functions)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        model(x)
    finally:
        sys.setprofile(before)
    return called


def stage_findings(rows: Columns) -> list[Finding]:
    """What an ensemble's own stages say, from its rows in a ledger: Square breaks what gradients did not."""
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
    return [
        _open(
            "black box",
            "Square, which uses no gradients, breaks images that the gradient attacks before it left robust",
            {"images": broken, "share of images": broken / number},
        )
    ]


def draw_remarks(spec: str, rows: Columns) -> list[str]:
    """Worst and mean of the draws over which a threat on a random model was judged, from its rows in a ledger."""
    if DRAWS_RIGHT not in rows:
        return []
    worst = float(rows["correct"].double().mean())
    mean = float(rows[DRAWS_RIGHT].double().mean())
    return [
        f"{spec} is judged over {DRAWS} draws of a random model: worst {100 * worst:.2f} % (the accuracy given: an "
        f"image counts if it is right in all draws and no stage has broken it), mean {100 * mean:.2f} %."
    ]


def save_found(folder: Path, found: Mapping[str, list[Finding]]) -> dict[str, list[Finding]]:
    """Keep findings in a folder beside those of other threats evaluated there before; all of them."""
    file = folder / FINDINGS
    every: dict[str, list[Finding]] = {}
    if file.exists():
        known = json.loads(read_text(file))
        every = {spec: [Finding(**finding) for finding in findings] for spec, findings in known.items()}
    every |= found
    plain = {spec: [finding.to_dict() for finding in findings] for spec, findings in every.items()}
    if plain:
        atomic_write_text(file, json.dumps(plain, indent=1, ensure_ascii=False) + "\n")
    return every


def _advise(finding: Finding, threat: Any) -> Finding:
    """Randomness is answered by another version of AutoAttack, unless that is the one that runs."""
    if finding.name != RANDOMNESS or getattr(threat, "version", "") == "rand":
        return finding
    advice = f"{finding.sentence}; run AutoAttack as version=rand, which averages gradients"
    return Finding(name=finding.name, passed=False, sentence=advice, numbers=finding.numbers)


def _open(name: str, sentence: str, numbers: dict[str, float] | None = None) -> Finding:
    return Finding(name=name, passed=False, sentence=sentence, numbers=numbers or {})


def _share(rows: Tensor) -> float:
    if not len(rows):
        return 0.0
    return float(rows.double().mean())
