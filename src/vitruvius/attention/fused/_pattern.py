"""From a keep-mask to lists a GPU likes: similar rows share a tile, a tile names the columns that any of them keeps.

You et al. 2023, "ViTCoD", arXiv:2210.09573, polarises maps likewise: tokens are reordered until what is kept is dense.
Here the order lives in index lists, so nothing outside the kernel moves.      H heads, N rows, M columns
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

MANY = 1024  # rows; comparing more of them with each other takes minutes


class Lists(NamedTuple):
    """Rows by tile and the columns each tile needs."""

    order: Tensor  # (H, tiles · rows) int32: the row at each place, N where a tile has places to spare
    first: Tensor  # (H · tiles + 1) int32: where the blocks of a tile begin
    columns: Tensor  # (blocks · keys) int32: the columns of each block, M where a block has places to spare
    bits: Tensor  # (blocks · rows) int32 or int64: bit j of a word: does this row keep column j of this block?


def make_lists(keep: Tensor, *, rows: int, keys: int) -> Lists:
    """The lists of a bool mask (H, N, M), on its device."""
    heads = [_of_head(mask, rows, keys) for mask in keep.cpu()]
    order, counts, columns, bits = (torch.cat(parts) for parts in zip(*heads, strict=True))
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    lists = (order.view(len(keep), -1).int(), first.int(), columns.int(), bits)
    return Lists(*(part.to(keep.device) for part in lists))


def _of_head(mask: Tensor, rows: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(order, blocks of each tile, columns, bits) of one head's mask (N, M)."""
    N, M = mask.shape
    places = -(-N // rows) * rows
    order = torch.full((places,), N)
    order[:N] = polarise(mask, rows)
    padded = torch.cat([mask, mask.new_zeros(1, M)])
    counts, columns, bits = [], [], []
    for tile in order.view(-1, rows):
        needed = padded[tile].any(0).nonzero()[:, 0]
        blocks = -(-len(needed) // keys)
        slots = torch.full((blocks * keys,), M)
        slots[: len(needed)] = needed
        kept = torch.cat([padded, padded.new_zeros(N + 1, 1)], 1)[tile][:, slots]  # (rows, blocks · keys)
        counts.append(blocks)
        columns.append(slots)
        bits.append(words_of(kept.view(rows, blocks, keys)).T.flatten())
    return order, torch.tensor(counts), torch.cat(columns), torch.cat(bits)


def words_of(kept: Tensor) -> Tensor:
    """Bools (…, 64 or fewer) as the bits of one signed number each, of 32 bits where they suffice."""
    number = (kept.long() << torch.arange(kept.shape[-1])).sum(-1)
    return number if kept.shape[-1] > 32 else torch.where(number >= 2**31, number - 2**32, number).int()


def polarise(mask: Tensor, size: int) -> Tensor:
    """An order of the rows in which `size` neighbours need few columns together; dense rows come first.

    The best of: as they come, in squares (should the rows be a square picture behind some tokens), by likeness.
    """
    dense = mask.sum(1) > mask.shape[1] / 2
    sparse = (~dense).nonzero()[:, 0]
    squares = in_squares(len(mask), size)
    orders = [sparse, squares[~dense[squares]]]
    if len(mask) <= MANY:
        orders.append(sparse[gather_similar(mask[sparse], size)])
    best = min(orders, key=lambda order: _columns_needed(mask[order], size))
    return torch.cat([dense.nonzero()[:, 0], best])


def in_squares(number: int, size: int) -> Tensor:
    """Tokens of a square picture in patches of `size`, after the tokens that are no part of it."""
    side = math.isqrt(number)
    height = 1 << (size.bit_length() - 1) // 2
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    patch = (y // height) * side + x // (size // height)
    prefix = number - side * side
    return torch.cat([torch.arange(prefix), patch.flatten().argsort(stable=True) + prefix])


def gather_similar(mask: Tensor, size: int) -> Tensor:
    """Greedy: a group begins with the lightest row left, and takes the row that adds fewest columns, until full."""
    weight, columns = mask.sum(1).float(), mask.T.float().contiguous()
    left = torch.ones(len(mask), dtype=torch.bool)
    order = []
    for place in range(len(mask)):
        if place % size == 0:
            union, overlap = torch.zeros(mask.shape[1], dtype=torch.bool), torch.zeros(len(mask))
        row = int((weight - overlap).masked_fill(~left, torch.inf).argmin())
        new = mask[row] & ~union
        overlap += columns[new].sum(0)
        union |= new
        left[row] = False
        order.append(row)
    return torch.tensor(order, dtype=torch.long)


def _columns_needed(mask: Tensor, size: int) -> int:
    return sum(int(tile.any(0).sum()) for tile in mask.split(size))
