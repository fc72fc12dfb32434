"""Single-step adversarial training: RS-FGSM (Wong et al. 2020, arXiv:2001.03994) and N-FGSM (de Jorge et al. 2022,
arXiv:2202.01181), with gradient alignment against catastrophic overfitting (Andriushchenko & Flammarion 2020,
arXiv:2007.02617) if asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitruvius._config import key
from vitruvius._errors import ConfigError
from vitruvius._random import Dice
from vitruvius.attacks.base import CE, Attack, Model, Norm, hard_labels, loss_and_grad
from vitruvius.tasks.adversarial import AdversarialObjective
from vitruvius.tasks.base import tasks
from vitruvius.tasks.inner import Spec

# radius of the random start and length of the step, in eps; and whether x' is projected back into the ball
METHODS: dict[str, dict[str, Any]] = {
    "rs_fgsm": {"noise": 1.0, "step": 1.25, "project": True},
    "n_fgsm": {"noise": 2.0, "step": 1.0, "project": False},
}


@dataclass(frozen=True, kw_only=True)
class NoisyFGSM(Attack):
    """One step from a random start, which may lie outside the ball and stay there: for training alone."""

    radius_may_be_tensor: ClassVar[bool] = True

    noise: float = 1.0  # radius of the start, in eps
    step: float = 1.25  # in eps
    project: bool = True  # back into the ball

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        start = (x + self.norm.random(x, self.noise * self.eps, dice)).clamp(0, 1)
        grad = loss_and_grad(model, start, lambda logits: CE(logits, y)).grad
        delta = start - x + self.step * self.eps * self.norm.steepest(grad)
        return (x + (self.norm.project(delta, self.eps) if self.project else delta)).clamp(0, 1)


@tasks.register("fast")
@dataclass(eq=False, repr=False, kw_only=True)
class Fast(AdversarialObjective):
    """Cross-entropy at x' of a single step; `align` weighs the guard against catastrophic overfitting."""

    method: Literal["rs_fgsm", "n_fgsm"] = key("n_fgsm", "Wong et al.'s or de Jorge et al.'s single step")
    noise: float | None = key(None, "radius of the random start, in eps; null: the method's")
    step: float | None = key(None, "length of the step, in eps; null: the method's")
    align: float = key(0.0, "weight of gradient alignment, the guard against catastrophic overfitting; 0: none")
    attack: Spec = field(init=False)  # the method's one step
    coupled: bool = field(default=True, init=False)

    def __post_init__(self, model: nn.Module) -> None:
        if self.align < 0:
            raise ConfigError(f"task.align = {self.align}, expected 0 for no guard, or a weight such as 0.2.")
        chosen = {key: value for key, value in {"noise": self.noise, "step": self.step}.items() if value is not None}
        self.attack = partial(NoisyFGSM, **{**METHODS[self.method], **chosen})
        super().__post_init__(model)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        attacked = self.disturb(input, target)
        numbers = self.numbers(input, target)
        (output,), penalty = self.call_model(attacked)
        loss = self.criterion(output, target)
        if self.align:
            misaligned = self.gradient_misalignment(input, target)
            loss = loss + self.align * misaligned
            numbers["misalignment"] = misaligned.detach()
        return self.total(loss, output, penalty, **numbers)

    def gradient_misalignment(self, x: Tensor, y: Tensor) -> Tensor:
        """How far the gradients at x and at a random point of its ball point apart; 0 where the loss is linear."""
        if self.inner.eps == 0:  # both points are one
            return x.new_zeros(())
        model = self.passes().model
        with self.inner.model_mode(model), self.silence():
            dice = Dice(self.draws.keys(x), owner="alignment")
            return misalignment(model, x, y, norm=self.inner.norm, eps=self.inner.radius, dice=dice)


def misalignment(model: nn.Module, x: Tensor, y: Tensor, *, norm: Norm, eps: float | Tensor, dice: Dice) -> Tensor:
    """1 − cosine of the gradients at x and at a point that `dice` draw in its ball: mean over the images.

    Differentiable with respect to the parameters of `model`, whose gradient is taken twice.
    """
    with sdpa_kernel(SDPBackend.MATH):
        here = _gradient(model, x, y)
        there = _gradient(model, (x + norm.random(x, eps, dice)).clamp(0, 1), y)
    return 1 - F.cosine_similarity(here.flatten(1), there.flatten(1)).mean()


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """(B, C, H, W), with a graph of its own."""
    x = x.detach().requires_grad_()
    loss = CE(model(x).float() if x.dtype == torch.float32 else model(x), hard_labels(y)).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return grad
