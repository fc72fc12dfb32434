"""Impulse by optimisation, as the authors released it: Adam on the distance between attention and target.

Zheng et al. 2024, arXiv:2404.01139. For all heads of a layer together, A = softmax(X Q K Xᵀ / √D) with X the
normalised pseudo-input, loss = mean (A − T)², Adam. Every hundred steps, before the step, columns are brought
back to n, the mean norm the columns of Q began with.

The released code does this to vectors of Q over C and to vectors of K over D, so that K ends larger than Q;
`variant="symmetric"` treats both over C. It never stops early; `tolerance=0` does the same.

Letters: N patches, H heads, D head width, C model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.init.base import Layer, inits, uniform
from vitruvius.init.impulse import Order, Plan, Pseudo, Solution, Task, impulse_map, write_impulses

RENEW = 100  # steps between two renormalisations
WINDOW = 10  # renormalisations without progress that count as converged
Variant = Literal["released", "symmetric"]


@inits.register("impulse_optimised")
@torch.no_grad()
def impulse_optimised(
    layers: Sequence[Layer],
    *,
    kernel: int = 3,
    offsets: Order = "random",
    shared: bool = True,
    variant: Variant = "released",
    steps: int = 10_000,
    learning_rate: float = 1e-4,
    tolerance: float = 1e-3,
    first: Pseudo = "P",
    rest: Pseudo = "P",
    generator: torch.Generator,
) -> None:
    """Each head attends to one neighbour, by ten thousand steps of Adam as released: minutes on a CPU core.

    `kernel`, `offsets`, `shared`, `first`, `rest` as in `impulse`, with the released defaults. Stops when the
    loss has not fallen by the share `tolerance` within a thousand steps; 0 takes all `steps`. Runs where
    the weights are. Sets q and k alone: biases, values, projections and all else stay as they are.

    `variant`: "released" brings K's columns back to one norm as the published code does, "symmetric" its rows.
    """
    if variant not in ("released", "symmetric"):
        raise ConfigError(f"variant={variant!r}, expected 'released' or 'symmetric'.")
    if steps < 1 or learning_rate <= 0 or tolerance < 0:
        raise ConfigError(
            f"steps={steps}, learning_rate={learning_rate}, tolerance={tolerance}: expected steps ≥ 1, "
            "learning_rate > 0 and tolerance ≥ 0."
        )

    def solve(task: Task) -> Solution:
        targets = torch.stack([impulse_map(task.grid, offset) for offset in task.offsets]).to(task.inputs)
        q, k = start(task, generator)
        q, k, _ = optimise(
            task.inputs, targets, q, k, steps=steps, learning_rate=learning_rate, tolerance=tolerance, variant=variant
        )
        return q.mT, k

    plan = Plan(kernel=kernel, offsets=offsets, shared=shared, first=first, rest=rest)
    write_impulses("impulse_optimised", layers, plan, solve, generator)


def start(task: Task, generator: torch.Generator) -> Solution:
    """Q (H, C, D) and K (H, D, C), uniform within ±1/√(D H)."""
    num_heads, dim = len(task.offsets), task.inputs.shape[1]
    bound = (task.head_dim * num_heads) ** -0.5
    q = uniform(task.inputs.new_empty(num_heads, dim, task.head_dim), bound, generator)
    k = uniform(task.inputs.new_empty(num_heads, task.head_dim, dim), bound, generator)
    return q.to(task.inputs), k.to(task.inputs)


@torch.enable_grad()
def optimise(
    x: Tensor,  # (N, C)
    targets: Tensor,  # (H, N, N)
    q: Tensor,  # (H, C, D)
    k: Tensor,  # (H, D, C)
    *,
    steps: int,
    learning_rate: float = 1e-4,
    tolerance: float = 0.0,
    variant: Variant = "released",
    watch: Callable[[int, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor, float]:
    """Q, K and the last loss, from the ones given; `watch` is told every loss before its step is taken."""
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    size = q.detach().norm(dim=1).mean()
    adam = torch.optim.Adam([q, k], lr=learning_rate)
    best: list[float] = []
    for step in range(steps):
        if step % RENEW == 0:
            with torch.no_grad():  # columns of Q, and columns or rows of K, back to one norm
                q.mul_(size / q.norm(dim=1, keepdim=True))
                k.mul_(size / k.norm(dim=1 if variant == "released" else 2, keepdim=True))
        loss = (attention(x, q, k) - targets).square().mean()
        if watch is not None:
            watch(step, loss.detach())
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step % RENEW == RENEW - 1 and _converged(best, float(loss.detach()), tolerance):
            break
    return q.detach(), k.detach(), float(loss.detach())


def attention(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """softmax(X Q K Xᵀ / √D): (H, N, N)."""
    return (q.shape[-1] ** -0.5 * (x @ q) @ (k @ x.mT)).softmax(-1)


def _converged(best: list[float], loss: float, tolerance: float) -> bool:
    """Note the loss; true when the best of the last window is hardly below the best before it."""
    best.append(min(loss, best[-1]) if best else loss)
    return tolerance > 0 and len(best) > WINDOW and best[-1 - WINDOW] - best[-1] < tolerance * best[-1 - WINDOW]
