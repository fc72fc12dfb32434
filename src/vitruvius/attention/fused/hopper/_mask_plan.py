"""From a keep-mask to the lists of the Hopper kernel: a head's columns in one order, of which tiles read windows.

A tile is 64 similar rows; columns are ordered so that those it needs lie together, in few windows of 32. The densest
rows would need every window: these few are no part of a tile.     H heads, N rows, M columns, T tiles, P places
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from vitruvius.attention.fused._pattern import polarise, words_of

FEW, ROWS, KEYS, STEP = 8, 64, 32, 8  # dense rows of a head, rows of a tile, columns of a window, where windows begin
HALF = 128  # places; the dense rows see all of them, half by half
TRIED = 7  # groups of columns whose every order is tried: all there are with three tiles
SIZES = range(HALF + 1, 2 * HALF + 1)  # rows and columns of a mask; with fewer the general kernel is as fast


class Plan(NamedTuple):
    """Rows by tile, columns by place, and which of them a row keeps."""

    rows: Tensor  # (H, 64 · T + 8) int32: the row at each place of the tiles (spare ones repeat a row), the dense rows
    columns: Tensor  # (H, P) int32: the column at each place; spare ones repeat a column that nobody keeps there
    windows: Tensor  # (H, T) int64: how many (4 bits), then where each begins (5 bits each, in steps of 8 places)
    words: Tensor  # (H, T, windows, 64) int32: bit j: does the row keep place j of this window?
    dense: Tensor  # (H, 256) int32: bit j: does dense row j keep this place? First half, then last half of the places


def make_plan(keep: Tensor) -> Plan:
    """The lists of a bool mask (H, N, M), on its device. N and M are in SIZES."""
    heads = [_of_head(mask) for mask in keep.cpu()]
    rows, columns, windows, words, dense = (torch.stack(parts) for parts in zip(*heads, strict=True))
    lists = (rows.int(), columns.int(), windows, words, dense.int())
    return Plan(*(part.contiguous().to(keep.device) for part in lists))


def num_places(num_columns: int) -> int:
    """128 and one or two more powers of two, of 16 or more: so they are filled."""
    rest = -(-(num_columns - HALF) // 16) * 16
    return HALF + (HALF if rest == 112 else rest)


def _of_head(mask: Tensor) -> tuple[Tensor, ...]:
    """The five lists of one head's mask (N, M)."""
    N, M = mask.shape
    tiles, dense = _share_rows(mask)
    places = num_places(M)
    needed = torch.stack([mask[tile].any(0) for tile in tiles])  # (T, M)
    order = order_columns(needed, places)
    spare = order.new_full((places - M,), M)
    seen = torch.cat([mask, mask.new_zeros(N, 1)], 1)[:, torch.cat([order, spare])]  # (N, P)
    starts, counts = find_windows(torch.nn.functional.pad(needed[:, order], (0, places - M)))
    return (
        torch.cat([tiles.flatten(), dense]),
        torch.cat([order, order[-1:].expand(places - M)]),
        _pack(starts, counts),
        _window_words(seen[tiles], starts, counts),
        _dense_words(seen[dense]),
    )


def _share_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the tiles (T, 64), and the densest rows (8)."""
    by_weight = mask.sum(1).argsort(descending=True, stable=True)
    dense, rest = by_weight[:FEW], by_weight[FEW:].sort().values
    rest = rest[polarise(mask[rest], ROWS)]
    spare = -len(rest) % ROWS
    return torch.cat([rest, rest[-1:].expand(spare)]).view(-1, ROWS), dense


def order_columns(needed: Tensor, places: int) -> Tensor:
    """An order of the columns in which the tiles need few windows. needed: (T, M)

    Columns that the same tiles need stay together. Every order of the largest such groups is tried; the others are put
    in one by one, each where it costs least.
    """
    kind = (needed.long() << torch.arange(len(needed))[:, None]).sum(0)  # (M)
    sizes = torch.bincount(kind, minlength=1 << len(needed))
    by_size = (sizes[1:].argsort(descending=True, stable=True) + 1)[: int((sizes[1:] > 0).sum())]
    largest, others = by_size[:TRIED], by_size[TRIED:]
    order = _best(largest[_permutations(len(largest))], sizes, places)
    for new in others:
        tries = [torch.cat([order[:i], new[None], order[i:]]) for i in range(len(order) + 1)]
        order = _best(torch.stack(tries), sizes, places)
    rank = torch.full_like(sizes, len(sizes))
    rank[order] = torch.arange(len(order))
    return rank[kind].argsort(stable=True)


@functools.cache
def _permutations(length: int) -> Tensor:
    return torch.tensor(list(itertools.permutations(range(length))), dtype=torch.long)


def _best(orders: Tensor, sizes: Tensor, places: int) -> Tensor:
    """The order of groups that needs fewest windows. orders: (tries, groups)"""
    ends = sizes[orders].cumsum(1)
    begins = ends - sizes[orders]
    total = torch.zeros(len(orders), dtype=torch.long)
    for tile in range(len(sizes).bit_length() - 1):
        covered = torch.zeros_like(total)
        for begin, end, wanted in zip(begins.T, ends.T, (orders >> tile & 1).T, strict=True):
            start = (begin.maximum(covered) // STEP * STEP).clamp(max=places - KEYS).maximum(covered)
            more = wanted * ((end - start + KEYS - 1) // KEYS).clamp(min=0)
            covered = torch.where(more > 0, start + KEYS * more, covered)
            total += more
    return orders[total.argmin()]


def find_windows(needed: Tensor) -> tuple[Tensor, Tensor]:
    """Where windows begin that cover the needed places (T, P) of each tile, (T, windows), and how many there are."""
    T, P = needed.shape
    place, covered = torch.arange(P), torch.zeros(T, dtype=torch.long)
    starts, counts = [], torch.zeros(T, dtype=torch.long)
    for _ in range(-(-P // KEYS)):
        left = needed & (place >= covered[:, None])
        any_left = left.any(1)
        start = (left.int().argmax(1) // STEP * STEP).clamp(max=P - KEYS)
        starts.append(torch.where(any_left, start, 0))
        covered = torch.where(any_left, start + KEYS, covered)
        counts += any_left
    return torch.stack(starts, 1), counts


def _pack(starts: Tensor, counts: Tensor) -> Tensor:
    """(T) numbers: how many windows, then where each begins."""
    return ((starts // STEP) << (4 + 5 * torch.arange(starts.shape[1]))).sum(1) | counts


def _window_words(seen: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    """(T, windows, 64) words from the rows of the tiles, (T, 64, P). A place in two windows belongs to the first."""
    T, windows = starts.shape
    place = starts[:, :, None] + torch.arange(KEYS)  # (T, windows, 32)
    fresh = torch.arange(windows) < counts[:, None]
    before = torch.cat([starts.new_zeros(T, 1), starts[:, :-1] + KEYS], 1)
    fresh = fresh[:, :, None] & (place >= before[:, :, None])
    kept = seen[torch.arange(T)[:, None, None, None], torch.arange(ROWS)[:, None], place[:, :, None]]
    return words_of(kept & fresh[:, :, None])


def _dense_words(seen: Tensor) -> Tensor:
    """(256) words from the dense rows (8, P): first 128 places, last 128 places without what the first have."""
    last = seen[:, -HALF:].clone()
    last[:, : 2 * HALF - seen.shape[1]] = False
    return words_of(torch.cat([seen[:, :HALF], last], 1).T)
