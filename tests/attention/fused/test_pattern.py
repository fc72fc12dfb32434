"""The lists of a mask say exactly what the mask says, and squares and likeness make them short."""

import pytest
import torch
from heads_and_oracles import make_keep

from vitruvius.attention.fused._pattern import in_squares, make_lists, polarise


def unpack(lists, N, M, rows, keys):
    """The mask again, entry by entry."""
    H = len(lists.order)
    keep = torch.zeros(H, N, M, dtype=torch.bool)
    tiles = lists.order.view(H, -1, rows)
    for place in range(H * tiles.shape[1]):
        head, tile = divmod(place, tiles.shape[1])
        for block in range(int(lists.first[place]), int(lists.first[place + 1])):
            for i, row in enumerate(tiles[head, tile].tolist()):
                word = int(lists.bits[block * rows + i])
                for j in range(keys):
                    if word >> j & 1:
                        keep[head, row, int(lists.columns[block * keys + j])] = True
    return keep


@pytest.mark.parametrize(("N", "M", "rows", "keys"), [(17, 17, 16, 16), (10, 70, 16, 32), (40, 9, 16, 64)])
def test_the_lists_are_the_mask(N, M, rows, keys):
    keep = make_keep(2, N, M, kept=0.3)
    lists = make_lists(keep, rows=rows, keys=keys)
    torch.testing.assert_close(unpack(lists, N, M, rows, keys), keep)
    assert lists.bits.dtype == (torch.int64 if keys > 32 else torch.int32)


def test_polarisation_orders_every_row_once_with_dense_rows_first():
    mask = make_keep(1, 50)[0]
    order = polarise(mask, 16)
    assert sorted(order.tolist()) == list(range(50))
    assert order[0] == 0


def test_squares_make_a_local_mask_cheap():
    side = 16
    y, x = torch.arange(side * side) // side, torch.arange(side * side) % side
    near = ((y[:, None] - y).abs() <= 2) & ((x[:, None] - x).abs() <= 2)
    order = in_squares(side * side, 64)
    in_rows, in_patches = (sum(int(tile.any(0).sum()) for tile in near[o].split(64)) for o in (slice(None), order))
    assert in_patches == 4 * 10 * 10  # patches of 8 × 8 see two more on their two inner sides
    assert in_patches < in_rows


def test_of_a_tile_mask_only_what_64_neighbours_keep_is_computed():
    side, heads = 28, 2
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)) // 4  # tiles of 4 × 4 patches
    near = (places[:, None] - places).abs().amax(-1) <= 1
    keep = torch.ones(heads, side * side + 1, side * side + 1, dtype=torch.bool)
    keep[:, 1:, 1:] = near
    lists = make_lists(keep, rows=64, keys=32)
    computed = len(lists.columns) * 64 / keep.numel()
    kept = float(keep.double().mean())
    assert kept < 0.16
    assert computed < 3 * kept  # the union of four tiles, and the class token's row among 63 others


def test_likeness_finds_groups_that_are_scattered():
    mask = torch.zeros(32, 32, dtype=torch.bool)
    groups = torch.arange(32).view(16, 2).T  # even rows keep one half of the columns, odd rows the other
    for half, rows in enumerate(groups):
        mask[rows[:, None], torch.arange(8) + 16 * half] = True
    order = polarise(mask, 16)
    assert {frozenset(tile.tolist()) for tile in order.split(16)} == {frozenset(rows.tolist()) for rows in groups}
