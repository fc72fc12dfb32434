"""Carry what fixes the number of tokens (masks, the matrix of scaled attention) to another image size.

H heads, N queries, M keys; the first `num_prefix_tokens` stay as they are, the grid behind them is resampled.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvius._errors import SurgeryError
from vitruvius.heads import Site

Grid = tuple[int, int]  # rows and columns
RESAMPLED = ("core.mask.keep", "core.scaled.matrix")  # keys of a site that depend on its number of tokens


def interpolate(pattern: Tensor, old: Site, new: Site) -> Tensor:
    """A mask (bool) or a matrix S (floating), (H, N, M), made for site `old`, for the same site at another size.

    Masks: a pair is kept if any pair it stands for was kept, so no query loses its last key.
    Matrices: bilinear, with the columns shared out so that S of a constant image stays the same. `survey` describes the
    sites at both sizes.
    """
    same_size = old.num_keys == new.num_keys and old.grid == new.grid
    _check(pattern, old, new, same_size)
    if same_size:
        return pattern.clone()
    across_queries = pattern.shape[-2] == old.num_keys  # class attention has one query and no grid of them
    is_mask = pattern.dtype == torch.bool
    assert old.grid is not None
    assert new.grid is not None
    patches = _nearest(old.grid, new.grid) if is_mask else _bilinear(old.grid, new.grid)
    spread = torch.block_diag(torch.eye(old.num_prefix_tokens, dtype=torch.float64), patches)  # (M', M)
    rows = spread @ pattern.double() if across_queries else pattern.double()
    if is_mask:
        return rows @ spread.mT > 0
    return (rows @ (spread / spread.sum(0)).mT).to(pattern.dtype)


def interpolate_state(
    state: Mapping[str, Tensor], old: Mapping[str, Site], new: Mapping[str, Site]
) -> dict[str, Tensor]:
    """A checkpoint that fits the same model at another image size; `old` and `new` are its sites (`survey`) at both."""
    changed = dict(state)
    for name in old.keys() & new.keys():
        for key in (f"{name}.{ending}" for ending in RESAMPLED):
            if key in state:
                changed[key] = interpolate(state[key], old[name], new[name])
    return changed


def _check(pattern: Tensor, old: Site, new: Site, same_size: bool) -> None:
    if pattern.shape[-1] != old.num_keys or pattern.shape[-2] not in (old.num_keys, old.num_queries):
        raise SurgeryError(
            f"a pattern of shape {tuple(pattern.shape)} is not of {old.name!r}, which has {old.num_queries} queries "
            f"and {old.num_keys} keys."
        )
    if pattern.shape[-2] not in (1, old.num_keys):
        raise SurgeryError(f"{old.name!r} attends from one grid to another; such a pattern cannot be resampled.")
    if same_size:
        return
    for site in (old, new):
        if site.grid is None:
            raise SurgeryError(f"{site.name!r} ({site.family}) has no grid of patches to resample over.")
    if old.num_prefix_tokens != new.num_prefix_tokens:
        raise SurgeryError(
            f"{old.name!r} had {old.num_prefix_tokens} prefix tokens and now has {new.num_prefix_tokens}; "
            "only the grid can be resampled."
        )


def _bilinear(old: Grid, new: Grid) -> Tensor:
    """(new patches, old patches): each new one as a mean of old ones."""
    images = torch.eye(old[0] * old[1], dtype=torch.float64).view(-1, 1, *old)
    return F.interpolate(images, size=new, mode="bilinear", antialias=True).flatten(1).mT


def _nearest(old: Grid, new: Grid) -> Tensor:
    """The same, 1 where a new patch and an old one stand for each other: nearest in either direction."""
    forth, back = _nearest_index(old, new), _nearest_index(new, old)
    pairs = torch.zeros(len(forth), len(back), dtype=torch.float64)
    pairs[torch.arange(len(forth)), forth] = 1
    pairs[back, torch.arange(len(back))] = 1
    return pairs


def _nearest_index(old: Grid, new: Grid) -> Tensor:
    """For each patch of the new grid the nearest patch of the old one."""
    axes = [((torch.arange(n) + 0.5) * o / n).long().clamp(max=o - 1) for o, n in zip(old, new, strict=True)]
    return (axes[0][:, None] * old[1] + axes[1]).flatten()
