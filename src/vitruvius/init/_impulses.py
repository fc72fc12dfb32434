"""The frame of both impulse inits: whose turn it is, on which pseudo-input, at which offsets; the fit is theirs.

Letters: N patches, H heads, D head width, C model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvius._errors import ConfigError, UnsuitableSite
from vitruvius.init._base import Layer
from vitruvius.init._modules import truncated_normal, uniform
from vitruvius.init._offsets import Grid, Offset, Order, check_kernel, draw_offsets, offset_of

FILTERS = "Its depth-wise convolutions mix the tokens: init: impulse_filters starts those. "

Pseudo = Literal["P", "U", "G", "A", "B"]


class Task(NamedTuple):
    """What one fit is given."""

    inputs: Tensor  # (N, C), normalised as the layer will see it
    grid: Grid
    offsets: list[Offset]  # one per head
    head_dim: int  # D
    where: str  # name of the site, for messages


Solution = tuple[Tensor, Tensor]  # q and k, each (H, D, C)


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
        chosen = [offset_of(tap, plan.kernel) for tap in islice(taps, group[0].site.num_heads)]
        inputs = _normalised(group[0], kind, normalised, generator)
        solutions.append((group, solve(_task(group[0], inputs, chosen))))
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


def _normalised(layer: Layer, kind: Pseudo, seen: dict[int, Tensor], generator: torch.Generator) -> Tensor:
    """The pseudo-input after a layer norm without weights; for plain positions the same tensor every time."""
    assert layer.positions is not None
    inputs = F.layer_norm(pseudo_input(kind, layer.positions.detach(), generator), (layer.site.dim,))
    if kind == "P":
        return seen.setdefault(id(layer.positions), inputs)
    return inputs


def _task(layer: Layer, inputs: Tensor, offsets: list[Offset]) -> Task:
    assert layer.site.grid is not None
    return Task(inputs, layer.site.grid, offsets, layer.weights.q.shape[1], layer.site.name)
