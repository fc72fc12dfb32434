"""What of Heads is real: padded tokens are taken out, windows are put back together, broken images are set aside.

B rows of Heads, H heads, M keys, W windows of an image
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius.analysis._registry import Statistics
from vitruvius.heads import Heads

MASKED = -1e4  # a bias below this hides a key
Group = tuple[Tensor, Heads]  # rows of a batch, and their Heads


def real_groups(heads: Heads) -> list[Group]:
    """The rows whose q, k and v are finite, without the tokens that padding hides; rows of one pattern together."""
    rows = finite_rows(heads).nonzero().squeeze(1)
    if not len(rows):
        return []
    if len(rows) < len(heads.q):
        part = rows_of(heads, rows)
    else:
        part = heads
    if has_padding(part):
        return [(rows[own], real) for own, real in without_padding(part)]
    return [(rows, part)]


def finite_rows(heads: Heads) -> Tensor:
    """(B,) bool."""
    return torch.stack([x.flatten(1).isfinite().all(1) for x in heads[:3]]).all(0)


def has_padding(heads: Heads) -> bool:
    """Whether some key is hidden from every query."""
    return heads.bias is not None and bool((_four(heads.bias).amax((1, 2)) < MASKED).any())


def without_padding(heads: Heads) -> list[Group]:
    """Cropped Heads; where queries and keys are the same items, both are cropped."""
    assert heads.bias is not None
    batch, queries, keys = heads.k.shape[0], heads.q.shape[-2], heads.k.shape[-2]
    bias = _four(heads.bias).expand(batch, -1, -1, keys)
    real = bias.amax((1, 2)) >= MASKED  # (B, M)
    patterns, owner = real.unique(dim=0, return_inverse=True)
    groups = []
    for place, keep in enumerate(patterns):
        rows = (owner == place).nonzero().squeeze(1)
        if queries == keys:
            asks = keep
        else:
            asks = keep.new_ones(queries)
        groups.append((rows, _cropped(rows_of(heads._replace(bias=bias), rows), asks, keep)))
    return groups


def rows_of(heads: Heads, rows: Tensor) -> Heads:
    """Some rows of the batch."""
    bias = heads.bias
    if bias is not None and bias.dim() == 4 and bias.shape[0] > 1:
        bias = bias[rows]
    return heads._replace(q=heads.q[rows], k=heads.k[rows], v=heads.v[rows], bias=bias)


def gather_rows(answers: list[tuple[Tensor, Statistics]], batch: int) -> Statistics:
    """The answers of groups as one batch, NaN in rows nobody answered for.

    answers: rows of the batch, and the statistics of each of them; curves whose length differs from group to group are
        left out.
    batch: how many rows there are.
    """
    if len(answers) == 1 and len(answers[0][0]) == batch:
        return answers[0][1]
    found: Statistics = {}
    for name in answers[0][1]:
        shapes = {tuple(answer[name].shape[1:]) for _, answer in answers}
        if len(shapes) == 1:
            whole = answers[0][1][name].new_full((batch, *shapes.pop()), torch.nan)
            for rows, answer in answers:
                whole[rows] = answer[name]
            found[name] = whole
    return found


def over_windows(values: Tensor, images: int) -> Tensor:
    """(B · W, H, …) → (B, H, …): the mean over the windows of each image."""
    if len(values) == images:
        return values
    return values.unflatten(0, (images, -1)).mean(1)


def _four(bias: Tensor) -> Tensor:
    """A bias as (B or 1, H or 1, N or 1, M or 1)."""
    return bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))


def _cropped(heads: Heads, asks: Tensor, keep: Tensor) -> Heads:
    assert heads.bias is not None
    bias = heads.bias[..., keep]
    if bias.shape[-2] > 1:
        bias = bias[..., asks, :]
    return heads._replace(q=heads.q[..., asks, :], k=heads.k[..., keep, :], v=heads.v[..., keep, :], bias=bias)
