"""Chance: Heads that share something with the observed ones and nothing else, drawn from (seed, image, site) alone.

B images (or windows), H heads, N tokens, D width
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitruvius._dice import Dice
from vitruvius.heads import Heads


def gaussian(heads: Heads, dice: Dice) -> Heads:
    """Independent normal numbers of the same shape and root mean square, head by head."""

    def draw(name: str, x: Tensor) -> Tensor:
        size = x.square().mean((-2, -1), keepdim=True).sqrt()
        return dice.normal(name, x.shape[1:]).to(x) * size

    return _each(heads, draw)


def spectrum(heads: Heads, dice: Dice) -> Heads:
    """The same singular values and the same directions in the width, turned at random over the tokens."""

    def draw(name: str, x: Tensor) -> Tensor:
        squares, right = torch.linalg.eigh(x.mT @ x)  # of the D × D matrix: cheaper than singular values of x
        rank = min(x.shape[-2:])
        sigma, right = squares[..., -rank:].clamp(min=0).sqrt(), right[..., -rank:]
        q, r = torch.linalg.qr(dice.normal(name, (*x.shape[1:-1], rank)).to(x))
        turned = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # uniform over orthonormal columns
        return (turned * sigma[..., None, :]) @ right.mT

    return _each(heads, draw)


def permuted(heads: Heads, dice: Dice) -> Heads:
    """The same vectors in another order: q, k and v shuffled over the tokens, each by itself, head by head."""

    def draw(name: str, x: Tensor) -> Tensor:
        order = dice.uniform(name, x.shape[1:-1]).argsort(-1)
        return x.gather(-2, order[..., None].expand_as(x))

    return _each(heads, draw)


Null = Callable[[Heads, Dice], Heads]
NULLS: dict[str, Null] = {"gaussian": gaussian, "spectrum": spectrum, "permuted": permuted}


def _each(heads: Heads, draw: Callable[[str, Tensor], Tensor]) -> Heads:
    """`draw` applied to q, k and v in float64; bias and scale stay."""
    q, k, v = (draw(name, getattr(heads, name).double()) for name in ("q", "k", "v"))
    return heads._replace(q=q, k=k, v=v)
