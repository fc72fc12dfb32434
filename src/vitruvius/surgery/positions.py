"""The position tables of timm's models: read them, or replace them by fixed sines and cosines.

Letters: N patches, C model width.
"""

from __future__ import annotations

import math
from typing import Any

from timm.layers import build_sincos2d_pos_embed
from torch import Tensor, nn

from vitruvius._errors import SurgeryError
from vitruvius.heads import Site
from vitruvius.surgery.base import inner


def use_sincos_positions(model: nn.Module, *, temperature: float = 10_000.0) -> nn.Module:
    """Replace the learned positions of a ViT by the fixed 2-D sin-cos table; in place, returns the model.

    The table stays a parameter named `pos_embed`, without gradient: it keeps upstream's state-dict key and
    shape, is saved, and moves with the model. Class and register tokens that have rows in it get zeros. It is
    made for the grid the model is built for: after `set_input_size`, call this again. `temperature` is the base of the
    wavelengths, as in timm.
    """
    root: Any = inner(model)
    old = _table(root)
    (rows, columns), prefix = _layout(root, old)
    dim = old.shape[-1]
    if dim % 4:
        raise SurgeryError(f"sin-cos positions need a width that 4 divides; {type(root).__name__} has width {dim}.")
    table = old.new_zeros(old.shape)
    table[0, prefix:] = build_sincos2d_pos_embed([rows, columns], dim=dim, temperature=temperature)
    root.pos_embed = nn.Parameter(table, requires_grad=False)
    return model


def position_table(model: nn.Module, site: Site) -> tuple[Tensor | None, str]:
    """What is added to the patches that a site of `model` attends over, (N, C); or nothing, and why."""
    root: Any = inner(model)
    module = root.get_submodule(site.name)
    if getattr(root, "rope", None) is not None:
        return None, f"{type(root).__name__} turns queries and keys by rotary positions after they are projected"
    if hasattr(module, "proj_l"):
        return None, f"{type(module).__name__} mixes the logits of its heads"
    try:
        table = _table(root)
        (rows, columns), prefix = _layout(root, table)
    except SurgeryError as error:
        return None, str(error).rstrip(".")
    if site.grid != (rows, columns):
        seen = "no grid" if site.grid is None else "a {}×{} grid".format(*site.grid)
        return None, f"the table is made for a {rows}×{columns} grid, the site sees {seen}"
    return table[0, prefix:], ""


def _table(root: Any) -> Tensor:
    """The parameter `pos_embed` of shape (1, tokens, C)."""
    table = getattr(root, "pos_embed", None)
    if not isinstance(table, Tensor):
        kind = "none" if table is None else f"a module, {type(table).__name__}"
        raise SurgeryError(f"{type(root).__name__} has no table of absolute positions (its pos_embed is {kind}).")
    if table.ndim != 3 or table.shape[0] != 1:
        raise SurgeryError(f"the positions of {type(root).__name__} are {tuple(table.shape)}, not (1, tokens, width).")
    return table.detach()


def _layout(root: Any, table: Tensor) -> tuple[tuple[int, int], int]:
    """The grid of the table, and how many of its rows belong to class and register tokens."""
    grid = getattr(getattr(root, "patch_embed", None), "grid_size", None)
    tokens = int(getattr(root, "num_prefix_tokens", 0))
    if grid is None:
        raise SurgeryError(f"{type(root).__name__} does not say what grid its patches make.")
    prefix = table.shape[1] - math.prod(grid)
    if prefix not in (0, tokens):
        raise SurgeryError(
            f"the positions of {type(root).__name__} have {table.shape[1]} rows; a {grid[0]}×{grid[1]} grid "
            f"needs {math.prod(grid)}, or {math.prod(grid) + tokens} with its prefix tokens."
        )
    return (grid[0], grid[1]), prefix
