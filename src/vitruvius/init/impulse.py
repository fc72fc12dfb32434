"""Impulse by a closed form: each head begins by attending to one neighbour, found by ridge regression of rank D.

Zheng et al. 2024, arXiv:2404.01139: an impulse is a k×k convolution filter with a single tap, and its map T
(`impulse_map`), made a little wider, is the map of logits we want for a head. With X the normalised positions and σ the
size of the content that the network will add to them, the projections M = qᵀk that are best on average over that
content minimise

    E ‖(X + σE) M (X + σE′)ᵀ − T‖²  =  ‖X M Xᵀ − T‖² + Nσ² ‖M Xᵀ‖² + Nσ² ‖X M‖² + N²σ⁴ ‖M‖²

over all M of rank D, E and E′ being independent noise. In the singular basis X = U S Vᵀ and with
w = (s² + Nσ²)^−½ the answer is one truncated decomposition: M = V w · [w s Uᵀ T U s w]_D · w Vᵀ. Three remarks:
softmax ignores what is constant along a row, so keys are centred; among all factors of M the balanced ones have
the least ‖q‖·‖k‖, the sum of M's singular values; and for sin-cos positions a shift is a rotation of every
frequency plane, so that M comes out as those rotations, weighted.  σ = 0 is the pseudo-inverse (Zheng et al.
2025, arXiv:2505.19985), σ → ∞ the plain correlation Xᵀ T X.

Letters: N patches, H heads, D head width, C model width, R numerical rank of the positions. An offset (r, c) leads from
the patch in row y, column x to (y + r, x + c). What `impulse_optimised` shares stands below.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvius._errors import ConfigError, UnsuitableSite
from vitruvius.init.base import Layer, inits, truncated_normal, uniform

Offset = tuple[int, int]
Grid = tuple[int, int]
Order = Literal["distinct", "random", "cycle"]
Pseudo = Literal["P", "U", "G", "A", "B"]
Solution = tuple[Tensor, Tensor]  # q and k, each (H, D, C)
FILTERS = "Its depth-wise convolutions mix the tokens: init: impulse_filters starts those. "
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


class Task(NamedTuple):
    """What one fit is given."""

    inputs: Tensor  # (N, C), normalised as the layer will see it
    grid: Grid
    offsets: list[Offset]  # one per head
    head_dim: int  # D
    where: str  # name of the site, for messages


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings both impulse inits share."""

    kernel: int
    offsets: Order
    shared: bool
    first: Pseudo
    rest: Pseudo


def write_impulses(
    name: str, layers: Sequence[Layer], plan: Plan, solve: Callable[[Task], Solution], generator: torch.Generator
) -> None:
    """Draw offsets, fit, and write q and k: once per layer, or once for all layers that see the same pseudo-input."""
    for layer in layers:
        check_layer(name, layer, plan.kernel)
    taps = draw_offsets(plan.kernel, plan.offsets, generator)
    normalised: dict[int, Tensor] = {}
    solutions: list[tuple[list[Layer], Solution]] = []
    for kind, group in _groups(layers, plan):
        site, positions = group[0].site, group[0].require_positions(name)
        offsets = [offset_of(tap, plan.kernel) for tap in itertools.islice(taps, site.num_heads)]
        inputs = F.layer_norm(pseudo_input(kind, positions.detach(), generator), (site.dim,))
        if kind == "P":
            inputs = normalised.setdefault(id(positions), inputs)  # the same tensor every time, to be recognised
        assert site.grid is not None
        solutions.append((group, solve(Task(inputs, site.grid, offsets, group[0].weights.q.shape[1], site.name))))
    for group, (q, k) in solutions:
        for layer in group:
            layer.weights.q.copy_(q)
            layer.weights.k.copy_(k)


def check_layer(name: str, layer: Layer, kernel: int) -> None:
    """Refuse a layer that cannot hold an impulse."""
    site = layer.site
    site.require(name, "tokens", remedy=FILTERS if site.attends == "channels" else "")
    site.require_self_attention(name)
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"kernel={kernel}, expected an odd number, so that there is a middle: 1, 3, 5, …")
    if site.grid is None:
        raise UnsuitableSite(
            f"{site.name!r} ({site.family}) has {site.num_queries} tokens on no known grid; an impulse needs one."
        )
    rows, columns = site.grid
    if rows * columns + site.num_prefix_tokens != site.num_queries:
        raise UnsuitableSite(
            f"{site.name!r} has {site.num_queries} tokens, but a {rows}×{columns} grid and "
            f"{site.num_prefix_tokens} prefix tokens make {rows * columns + site.num_prefix_tokens}."
        )
    if kernel > min(rows, columns):
        raise ConfigError(f"kernel={kernel} does not fit on the {rows}×{columns} grid of {site.name!r}; choose less.")
    positions = layer.require_positions(name)
    if positions.shape != (rows * columns, site.dim):
        raise UnsuitableSite(
            f"the position table for {site.name!r} is {tuple(positions.shape)}; a {rows}×{columns} grid of width "
            f"{site.dim} needs {(rows * columns, site.dim)}."
        )
    if bool((positions == positions[0]).all()):
        raise UnsuitableSite(f"{name!r} needs positions that differ; those of {site.name!r} are all the same.")


def pseudo_input(kind: Pseudo, positions: Tensor, generator: torch.Generator) -> Tensor:
    """What the layer is imagined to see, before its layer norm: (N, C).

    P positions; U uniform noise in ±1; G truncated normal noise, std √½ cut at ±2; A = P + U; B = P + G.
    """
    match kind:
        case "P":
            return positions
        case "U":
            return uniform(positions, 1.0, generator).to(positions)
        case "G":
            return truncated_normal(positions, math.sqrt(0.5), 2.0, generator).to(positions)
        case "A":
            return positions + pseudo_input("U", positions, generator)
        case "B":
            return positions + pseudo_input("G", positions, generator)
    raise ConfigError(f"pseudo-input {kind!r}, expected one of P, U, G, A, B.")


def _groups(layers: Sequence[Layer], plan: Plan) -> list[tuple[Pseudo, list[Layer]]]:
    """Layers that receive the same solution."""
    if not plan.shared:
        kinds = [plan.first, *[plan.rest] * (len(layers) - 1)]
        return [(kind, [layer]) for kind, layer in zip(kinds, layers, strict=True)]
    if len({(layer.weights.q.shape, layer.site.grid) for layer in layers}) > 1:
        raise ConfigError("shared=true needs layers of one size; these differ. Say shared=false, or choose by where=…")
    if plan.first == plan.rest or len(layers) == 1:
        return [(plan.first, list(layers))]
    return [(plan.first, [layers[0]]), (plan.rest, list(layers[1:]))]


class Quality(NamedTuple):
    """How well an attention map keeps to its target; the first two over the rows that have one."""

    probability: float  # mean attention on the target
    hits: float  # share of rows whose largest entry is the target
    mse: float  # over all entries


def offset_of(index: int, kernel: int) -> Offset:
    """The offset of a tap, taps counted in reading order."""
    return index // kernel - kernel // 2, index % kernel - kernel // 2


def draw_offsets(kernel: int, order: Order, generator: torch.Generator) -> Iterator[int]:
    """An endless supply of taps: `random` with replacement; `distinct` shuffles all taps again and again;
    `cycle` starts in the middle and goes outwards, ties in reading order."""
    taps = kernel * kernel
    match order:
        case "random":
            while True:
                yield int(torch.randint(taps, (1,), generator=generator, device=generator.device))
        case "distinct":
            while True:
                yield from torch.randperm(taps, generator=generator, device=generator.device).tolist()
        case "cycle":
            yield from itertools.cycle(sorted(range(taps), key=lambda tap: sum(o * o for o in offset_of(tap, kernel))))
        case _:
            raise ConfigError(f"offsets={order!r}, expected 'distinct', 'random' or 'cycle'.")


def partners(grid: Grid, offset: Offset) -> tuple[Tensor, Tensor]:
    """For every patch, the index of the patch at the offset (N,) and whether that lies on the grid (N,)."""
    rows, columns = grid
    y, x = torch.arange(rows)[:, None] + offset[0], torch.arange(columns)[None, :] + offset[1]
    inside = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
    return (y * columns + x).flatten(), inside.flatten()


def impulse_map(grid: Grid, offset: Offset) -> Tensor:
    """The target (N, N): one where key = query + offset; rows that would leave the grid are all zero."""
    key, inside = partners(grid, offset)
    target = torch.zeros(len(key), len(key), dtype=torch.float64)
    target[inside.nonzero().flatten(), key[inside]] = 1.0
    return target


def quality(attention: Tensor, grid: Grid, offset: Offset) -> Quality:
    """Compare an attention map (N, N) of patches with its target."""
    target = impulse_map(grid, offset)
    key, inside = partners(grid, offset)
    attention = attention.detach().cpu().double()
    return Quality(
        probability=float((attention * target).sum(-1)[inside].mean()),
        hits=float((attention.argmax(-1) == key)[inside].double().mean()),
        mse=float((attention - target).square().mean()),
    )
