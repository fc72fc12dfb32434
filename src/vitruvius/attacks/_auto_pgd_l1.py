"""One ascent of Auto-PGD in the L1 ball, each image at its own iteration (Croce & Hein 2021, arXiv:2103.01208).

Steps are sparse: they move the pixels of largest gradient, as many as the best point found so far suggests; they
shrink while that number stays and return to full length when it falls. No momentum. B images, K classes, D pixels.

The projection onto the L1 ball within the image is exact, by sorting: each pixel may move by at most its room, 1 − x
upwards or x downwards, and all together by eps: the answer is sign(δ) · clip(|δ| − λ, 0, room) with the smallest λ ≥ 0
that fits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.attacks._models import loss_and_grad
from vitruvius.attacks.losses import Objective
from vitruvius.attacks.norms import L1, in_order, per_image

SHRINK = 1.5  # of steps, and of the number of pixels moved against the number already moved
SHORTEST = 0.1  # of steps, in eps
FIRST_SHARE = 0.2  # of pixels moved by the first steps from a random start


class SparseAscentState(NamedTuple):
    """How far the sparse ascents of B images have come."""

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
        return x + project_l1_box(x, point - x, safe_radius(x, self.eps))

    def begin(self, x: Tensor, y: Tensor, target: Tensor, start: Tensor) -> SparseAscentState:
        """Ascents at their start, not yet evaluated."""
        zero = x.new_zeros(len(x))
        off = y.new_zeros(len(x), dtype=torch.bool)
        if self.fresh:
            support = zero + 1
            share = zero + FIRST_SHARE
        else:
            support = moved_share(start - x)
            share = support / SHRINK
        return SparseAscentState(
            x=x, y=y, target=target,
            point=start, seen=start, best=start, best_grad=torch.zeros_like(x), best_loss=zero - torch.inf,
            support=support, share=share, step=zero + self.eps,
            iteration=torch.zeros_like(y), fooled=off, done=off,
        )  # fmt: skip

    def advance(self, model: Callable[[Tensor], Tensor], s: SparseAscentState) -> SparseAscentState:
        """Evaluate the points, remember the best ones, and make a step."""
        logits, loss, grad = loss_and_grad(
            model, s.point, lambda logits: self.objective(logits, s.y, s.target), self.passes
        )
        fooled = logits.argmax(1) != s.y
        better = loss > s.best_loss
        s = s._replace(
            seen=s.point,
            best=torch.where(per_image(better, s.x), s.point, s.best),
            best_grad=torch.where(per_image(better, s.x), grad, s.best_grad),
            best_loss=torch.where(better, loss, s.best_loss),
            fooled=fooled,
            done=(fooled & self.stops) | (s.iteration >= self.steps),
        )
        return self._move(*self._checkpoint(s, grad))

    def _checkpoint(self, s: SparseAscentState, grad: Tensor) -> tuple[SparseAscentState, Tensor]:
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

    def _move(self, s: SparseAscentState, grad: Tensor) -> SparseAscentState:
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
    threshold = in_order(sizes)[0].gather(1, rank[:, None]).squeeze(1)
    return torch.where(grad.abs() >= per_image(threshold, grad), grad.sign(), 0.0)


def safe_radius(x: Tensor, eps: float) -> float:
    """The radius that attacks use: x + delta rounds each of D pixels by half an ulp at most, and stays in the ball."""
    return max(eps * (1 - 1e-6) - x[:1].numel() * torch.finfo(x.dtype).eps / 4, 0.0)


def project_l1_box(x: Tensor, delta: Tensor, eps: float) -> Tensor:
    """The delta nearest to the given one with ‖delta‖₁ ≤ eps and 0 ≤ x + delta ≤ 1."""
    room = torch.where(delta > 0, 1 - x, x)
    threshold = _threshold(delta.abs().flatten(1), room.flatten(1), eps)
    sizes = torch.minimum((delta.abs() - per_image(threshold, delta)).clamp(min=0), room)
    shrink = (eps / L1.length(sizes).clamp(min=1e-30)).clamp(max=1)  # 1, except for rounding
    return delta.sign() * sizes * per_image(shrink, x)


def _threshold(sizes: Tensor, room: Tensor, eps: float) -> Tensor:
    """(B,) the λ at which Σ clip(sizes − λ, 0, room) comes down to eps; 0 where it never exceeds it.

    The sum is piecewise linear in λ: from λ = size − room on, a pixel shrinks, from λ = size on it is 0.
    Walking the sorted breakpoints upwards, `total` is the sum at each of them.
    """
    breaks, order = in_order(torch.cat([sizes - room, sizes], 1).clamp(min=0))  # (B, 2D)
    bends = torch.cat([torch.ones_like(sizes), -torch.ones_like(sizes)], 1)
    shrinking = bends.gather(1, order).cumsum(1)  # (B, 2D) pixels shrinking behind each breakpoint
    falls = shrinking[:, :-1] * breaks.diff(dim=1)
    at_zero = torch.minimum(sizes, room).sum(1, keepdim=True)
    total = torch.cat([at_zero, at_zero - falls.cumsum(1)], 1)  # (B, 2D), not increasing
    last = (total > eps).sum(1, keepdim=True).clamp(min=1) - 1  # the last breakpoint at which too much is left
    excess = (total.gather(1, last) - eps).clamp(min=0)
    threshold = breaks.gather(1, last) + excess / shrinking.gather(1, last).clamp(min=1)
    return _refined(threshold, sizes, room, eps).squeeze(1)


def _refined(threshold: Tensor, sizes: Tensor, room: Tensor, eps: float) -> Tensor:
    """(B, 1) after two Newton steps, which take away what the long sums of sorted pixels have lost to rounding."""
    for _ in range(2):
        left = sizes - threshold
        shrinking = ((left > 0) & (left < room)).sum(1, keepdim=True).clamp(min=1)
        total = torch.minimum(left.clamp(min=0), room).sum(1, keepdim=True)
        threshold = (threshold + (total - eps) / shrinking).clamp(min=0)
    return threshold
