"""One ascent of Auto-PGD in the L1 ball, each image at its own iteration (Croce & Hein 2021, arXiv:2103.01208).

Steps are sparse: they move the pixels of largest gradient, as many as the best point found so far suggests; they
shrink while that number stays and return to full length when it falls. No momentum. B images, K classes, D pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vitruvius._dice import Dice
from vitruvius.attacks._ascent import Objective
from vitruvius.attacks._l1_box import inside, project_l1_box
from vitruvius.attacks._models import slope
from vitruvius.attacks._norms import per_image

SHRINK = 1.5  # of steps, and of the number of pixels moved against the number already moved
SHORTEST = 0.1  # of steps, in eps
FIRST_SHARE = 0.2  # of pixels moved by the first steps from a random start


class SparseClimb(NamedTuple):
    """Where the sparse ascents of B images stand."""

    x: Tensor
    y: Tensor  # (B,)
    target: Tensor  # (B,)
    point: Tensor  # evaluated next
    seen: Tensor  # evaluated last
    best: Tensor  # of highest loss
    best_grad: Tensor
    best_loss: Tensor  # (B,)
    support: Tensor  # (B,) share of pixels the best point moved, at the last checkpoint
    share: Tensor  # (B,) of pixels a step moves
    step: Tensor  # (B,)
    iteration: Tensor  # (B,)
    fooled: Tensor  # (B,) bool
    done: Tensor  # (B,) bool


class SparseAscent(NamedTuple):
    """The rules of an ascent of some length in an L1 ball."""

    eps: float
    steps: int
    objective: Objective
    passes: int = 1
    stops: bool = True
    fresh: bool = True  # from a random start, not from the end of another ascent

    def start(self, x: Tensor, dice: Dice, run: int | Tensor) -> Tensor:
        """Noise, brought into ball and image."""
        return self.restart(x, x + dice.normal("l1", x.shape[1:], run).to(x.dtype))

    def restart(self, x: Tensor, point: Tensor) -> Tensor:
        """The point of ball and image nearest to this one."""
        return x + project_l1_box(x, point - x, inside(x, self.eps))

    def begin(self, x: Tensor, y: Tensor, target: Tensor, start: Tensor) -> SparseClimb:
        """Ascents that stand at their start, not yet evaluated."""
        zero, off = x.new_zeros(len(x)), y.new_zeros(len(x), dtype=torch.bool)
        support = zero + 1 if self.fresh else moved_share(start - x)
        return SparseClimb(
            x=x, y=y, target=target,
            point=start, seen=start, best=start, best_grad=torch.zeros_like(x), best_loss=zero - torch.inf,
            support=support, share=zero + FIRST_SHARE if self.fresh else support / SHRINK, step=zero + self.eps,
            iteration=torch.zeros_like(y), fooled=off, done=off,
        )  # fmt: skip

    def advance(self, model: Callable[[Tensor], Tensor], s: SparseClimb) -> SparseClimb:
        """Evaluate the points, remember the best ones, and make a step."""
        logits, loss, grad = slope(model, s.point, lambda logits: self.objective(logits, s.y, s.target), self.passes)
        fooled, better = logits.argmax(1) != s.y, loss > s.best_loss
        s = s._replace(
            seen=s.point,
            best=torch.where(per_image(better, s.x), s.point, s.best),
            best_grad=torch.where(per_image(better, s.x), grad, s.best_grad),
            best_loss=torch.where(better, loss, s.best_loss),
            fooled=fooled,
            done=(fooled & self.stops) | (s.iteration >= self.steps),
        )
        return self._move(*self._checkpoint(s, grad))

    def _checkpoint(self, s: SparseClimb, grad: Tensor) -> tuple[SparseClimb, Tensor]:
        """Every few steps: follow the sparsity of the best point; where it rose, go back there with full steps."""
        due = (s.iteration > 0) & (s.iteration % max(int(0.04 * self.steps), 1) == 0)
        support = moved_share(s.best - s.x)
        sparser = support < 0.95 * s.support
        step = torch.where(sparser, self.eps, s.step / SHRINK).clamp(SHORTEST * self.eps, self.eps)
        back = per_image(due & sparser, s.x)
        moved = s._replace(
            point=torch.where(back, s.best, s.point),
            step=torch.where(due, step, s.step),
            share=torch.where(due, support / SHRINK, s.share),
            support=torch.where(due, support, s.support),
        )
        return moved, torch.where(back, s.best_grad, grad)

    def _move(self, s: SparseClimb, grad: Tensor) -> SparseClimb:
        signs = largest(grad, s.share)
        stride = per_image(s.step / (signs.flatten(1).abs().sum(1) + 1e-10), s.x)
        return s._replace(point=self.restart(s.x, s.point + stride * signs), iteration=s.iteration + 1)


def moved_share(delta: Tensor) -> Tensor:
    """(B,) share of pixels that moved at all."""
    return (delta != 0).flatten(1).to(delta.dtype).mean(1)


def largest(grad: Tensor, share: Tensor) -> Tensor:
    """Signs of the given share of entries of each gradient, those of largest size; 0 elsewhere."""
    sizes = grad.flatten(1).abs()
    rank = ((1 - share) * sizes.shape[1]).long().clamp(0, sizes.shape[1] - 1)
    threshold = sizes.sort(dim=1).values.gather(1, rank[:, None]).squeeze(1)
    return torch.where(grad.abs() >= per_image(threshold, grad), grad.sign(), 0.0)
