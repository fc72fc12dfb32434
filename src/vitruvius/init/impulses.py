"""What both impulse inits share: impulses on a grid of patches, and who gets which on which pseudo-input.

Zheng et al. 2024, arXiv:2404.01139: an impulse is a k×k convolution filter with a single tap.
Letters: N patches, H heads, D head width, C model width. An offset (r, c) leads from the patch in row y, column x to
(y + r, x + c).
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
from vitruvius.heads import Site
from vitruvius.init.base import Layer, truncated_normal, uniform

Offset = tuple[int, int]
Grid = tuple[int, int]
Order = Literal["distinct", "random", "cycle"]
Pseudo = Literal["P", "U", "G", "A", "B"]
Solution = tuple[Tensor, Tensor]  # q and k, each (H, D, C)
FILTERS = "Its depth-wise convolutions mix the tokens: init: impulse_filters starts those. "


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
    layer.site.require(name, "tokens", remedy=FILTERS if layer.site.attends == "channels" else "")
    layer.site.require_self_attention(name)
    rows, columns = check_kernel(kernel, layer.site)
    positions = layer.require_positions(name)
    if positions.shape != (rows * columns, layer.site.dim):
        raise UnsuitableSite(
            f"the position table for {layer.site.name!r} is {tuple(positions.shape)}; a {rows}×{columns} grid of "
            f"width {layer.site.dim} needs {(rows * columns, layer.site.dim)}."
        )
    if bool((positions == positions[0]).all()):
        raise UnsuitableSite(f"{name!r} needs positions that differ; those of {layer.site.name!r} are all the same.")


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


def check_kernel(kernel: int, site: Site) -> Grid:
    """The grid of a site, if an odd kernel of this size fits on it."""
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
    return rows, columns


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
