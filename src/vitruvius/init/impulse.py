"""Impulse by a closed form: each head begins by attending to one neighbour, found by ridge regression of rank D.

The target map T of a head (Zheng et al. 2024, arXiv:2404.01139, `impulses.impulse_map`), made a little wider, is
the map of logits we want. With X the normalised positions and σ the size of the content that the network will
add to them, the projections M = qᵀk that are best on average over that content minimise

    E ‖(X + σE) M (X + σE′)ᵀ − T‖²  =  ‖X M Xᵀ − T‖² + Nσ² ‖M Xᵀ‖² + Nσ² ‖X M‖² + N²σ⁴ ‖M‖²

over all M of rank D, E and E′ being independent noise. In the singular basis X = U S Vᵀ and with
w = (s² + Nσ²)^−½ the answer is one truncated decomposition: M = V w · [w s Uᵀ T U s w]_D · w Vᵀ. Three remarks:
softmax ignores what is constant along a row, so keys are centred; among all factors of M the balanced ones have
the least ‖q‖·‖k‖, the sum of M's singular values; and for sin-cos positions a shift is a rotation of every
frequency plane, so that M comes out as those rotations, weighted.  σ = 0 is the pseudo-inverse (Zheng et al.
2025, arXiv:2505.19985), σ → ∞ the plain correlation Xᵀ T X.

Letters: N patches, H heads, D head width, C model width, R numerical rank of the positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, UnsuitableSite
from vitruvius.init.base import Layer, inits
from vitruvius.init.impulses import (
    Grid,
    Offset,
    Order,
    Plan,
    Pseudo,
    Solution,
    Task,
    impulse_map,
    partners,
    quality,
    write_impulses,
)

ENOUGH = 0.5  # share of patches that must attend most to their target


@inits.register("impulse")
@torch.no_grad()
def impulse(
    layers: Sequence[Layer],
    *,
    kernel: int = 3,
    offsets: Order = "distinct",
    shared: bool = False,
    content: float = 1.0,
    width: float = 0.5,
    norm: float | None = None,
    first: Pseudo = "P",
    rest: Pseudo = "P",
    generator: torch.Generator,
) -> None:
    """Each head attends to one neighbour, as a convolution with a one-tap filter: closed form, milliseconds.

    `kernel` is the size of the filter, odd. `offsets`: `distinct` taps until all are used, `random` with
    replacement, or `cycle` from the middle outwards; `shared` gives every layer the same. `content` is σ,
    in units of the normalised positions. `width` is that of the bump around the target, in patches.
    `norm` is ‖q‖·‖k‖ of a head, by default √(D C)/3, where the released optimisation keeps it.
    `first`, `rest`: pseudo-inputs of the first and of the other layers. Sets q and k and zeroes their
    biases; values, projections and all else stay as they are.
    """
    if content < 0 or width < 0 or (norm is not None and norm <= 0):
        raise ConfigError(f"content={content}, width={width}, norm={norm}: expected content, width ≥ 0 and norm > 0.")
    ridges: dict[int, Ridge] = {}

    def solve(task: Task) -> Solution:
        if id(task.inputs) not in ridges:
            ridges[id(task.inputs)] = Ridge(task, content=content, width=width, norm=norm)
        return ridges[id(task.inputs)].solve(task)

    plan = Plan(kernel=kernel, offsets=offsets, shared=shared, first=first, rest=rest)
    write_impulses("impulse", layers, plan, solve, generator)
    for layer in layers:
        for bias in (layer.weights.q_bias, layer.weights.k_bias):
            if bias is not None:
                bias.zero_()


class Ridge:
    """The regression of one pseudo-input; what it finds for an offset is remembered."""

    def __init__(self, task: Task, *, content: float, width: float, norm: float | None) -> None:
        self.inputs, self.grid = task.inputs, task.grid
        self.content, self.width, self.norm = content, width, norm
        self.x = task.inputs.cpu().double()  # (N, C)
        self.queries = Basis(self.x, content)
        self.keys = Basis(self.x - self.x.mean(0), content)
        self.solutions: dict[tuple[Offset, int], Solution] = {}

    def solve(self, task: Task) -> Solution:
        """q and k of all heads, each (H, D, C)."""
        q, k = zip(*(self.head(offset, task) for offset in task.offsets), strict=True)
        return torch.stack(q), torch.stack(k)

    def head(self, offset: Offset, task: Task) -> Solution:
        """q and k of one head, each (D, C), of equal norms."""
        if (offset, task.head_dim) not in self.solutions:
            q, k = self.factors(offset, task.head_dim)
            norm = self.norm if self.norm is not None else math.sqrt(task.head_dim * q.shape[1]) / 3
            q, k = math.sqrt(norm) * q, math.sqrt(norm) * k
            self.check(q, k, offset, task)
            self.solutions[offset, task.head_dim] = q, k
        return self.solutions[offset, task.head_dim]

    def factors(self, offset: Offset, rank: int) -> Solution:
        """The regression itself: q and k of norm 1."""
        wanted = bump(self.grid, offset, self.width)
        wanted = wanted - wanted.mean(-1, keepdim=True)  # softmax ignores what is constant along a row
        whitened = self.queries.whiten(self.keys.whiten(wanted).mT).mT  # (R, R)
        left, size, right = torch.linalg.svd(whitened, full_matrices=False)
        product = (
            self.queries.axes.mT @ (self.queries.weight[:, None] * left[:, :rank] * size[:rank]),  # (C, ≤D)
            self.keys.axes.mT @ (self.keys.weight[:, None] * right[:rank].mT),  # (C, ≤D)
        )
        return balanced(*product, rank)

    def check(self, q: Tensor, k: Tensor, offset: Offset, task: Task) -> None:
        """Refuse a head that, in single precision, cannot find its neighbour among bare positions."""
        queries, keys = self.x.float() @ q.float().mT, self.x.float() @ k.float().mT
        hits = quality((queries @ keys.mT / math.sqrt(task.head_dim)).softmax(-1), self.grid, offset).hits
        if hits < ENOUGH:
            rows, columns = self.grid
            raise UnsuitableSite(
                f"heads of width {task.head_dim} at {task.where!r} cannot hold an impulse on a {rows}×{columns} grid "
                f"with content={self.content:g}: at offset {offset} only {hits:.0%} of the patches attend most to "
                "their neighbour. Use wider heads (fewer of them), content near 1, or sin-cos positions."
            )


class Basis:
    """Singular directions of one side of the regression, and how far content lets us trust each."""

    def __init__(self, x: Tensor, content: float) -> None:
        u, s, axes = torch.linalg.svd(x, full_matrices=False)
        large = s > 1e-6 * s[0]
        self.u, self.s, self.axes = u[:, large], s[large], axes[large]  # (N, R), (R,), (R, C)
        self.weight = (self.s.square() + len(x) * content**2).rsqrt()  # (R,)

    def whiten(self, target: Tensor) -> Tensor:
        """Columns of (…, N) become (…, R)."""
        return target @ self.u * (self.s * self.weight)


def bump(grid: Grid, offset: Offset, width: float) -> Tensor:
    """The impulse, seen through a Gaussian of this `width` in patches: (N, N); rows without a partner stay zero."""
    if width == 0:
        return impulse_map(grid, offset)
    rows, columns = grid
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).double()  # (N, 2)
    away = torch.cdist(places + torch.tensor(offset), places)
    return torch.exp(-0.5 * (away / width).square()) * partners(grid, offset)[1][:, None]


def balanced(left: Tensor, right: Tensor, rank: int) -> Solution:
    """q and k, (rank, C) each and of norm 1, with qᵀ k ∝ left rightᵀ; rows to spare are zero."""
    left_axes, left_part = torch.linalg.qr(left)
    right_axes, right_part = torch.linalg.qr(right)
    u, size, v = torch.linalg.svd(left_part @ right_part.mT)
    root = (size / size.sum()).sqrt()[:, None]
    q, k = root * (left_axes @ u).mT, root * (v @ right_axes.mT)
    spare = q.new_zeros(rank - len(q), q.shape[1])
    return torch.cat([q, spare]), torch.cat([k, spare])
