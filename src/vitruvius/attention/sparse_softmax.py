"""Softmax attention that computes a fixed pattern only: blocks of queries meet the keys that any of them keeps.

Equal to `mask → softmax`. Neighbouring patches keep similar keys, so a block of them shares a short list of keys; the
few queries that keep most keys (class tokens, global ones) are computed densely.
B batch, H heads, N queries, M keys, E value width; S blocks of a bucket, T queries and U keys of a block; True = kept
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvius._errors import ConfigError, SurgeryError
from vitruvius._files import StrPath
from vitruvius.attention._core import Kernel, attentions
from vitruvius.attention.fused import can_run, wanted
from vitruvius.attention.fused.masked import attend_kept, make_pattern
from vitruvius.attention.mask import Mask
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site

NAMES = ("queries", "keys", "bias")
BLOCKS = (64, 32, 16)  # queries computed together, unless a number is asked for
BUCKET = 4096  # pairs that take about as long as the calls for one more bucket


class Bucket(NamedTuple):
    """Blocks with about as many keys each."""

    queries: Tensor  # (S, T), place in H·N; the last may repeat
    keys: Tensor  # (S, U), place in H·M
    bias: Tensor  # (S, T, U), 0 where kept, -inf elsewhere


@attentions.register("sparse_softmax")
class SparseSoftmax(Kernel):
    """Softmax over a fixed pattern without computing what it removes, for inference (ViTCoD, arXiv:2210.09573).

    `file` and `keep` give the pattern as for `mask`; `block` is the number of queries that are computed together, by
    default the one of 16, 32 and 64 that computes least.
    """

    shows = "the softmax of the pairs that are kept; removed ones are 0"
    keep: Tensor
    wide: Tensor
    inverse: Tensor

    def __init__(
        self,
        site: Site,
        *,
        file: StrPath | None = None,
        keep: Tensor | Literal["all"] | None = None,
        block: int | None = None,
    ) -> None:
        super().__init__()
        if block is not None and block < 1:
            raise ConfigError(f"sparse_softmax.block = {block}, expected the number of queries computed together.")
        self.site_name, self.block, self.grid, self.num_buckets = site.name, block, site.grid, 0
        self.num_prefix_tokens, self.num_lists = site.num_prefix_tokens, 0
        self.wide_is_whole = False
        self.register_buffer("keep", Mask(site, file=file, keep=keep).keep)
        self._plan()

    def forward(self, heads: Heads) -> Tensor:
        H, N, M = self.keep.shape
        self._require_size(heads)
        if self.num_lists and heads.bias is None and wanted(heads, part="sparse_softmax"):
            return attend_kept(heads, [self.get_buffer(f"list_{i}") for i in range(self.num_lists)])
        q, k, v = (x.flatten(1, 2) for x in heads[:3])  # (B, H·N, D), (B, H·M, D), (B, H·M, E)
        given = None if heads.bias is None else heads.bias.expand(*heads.bias.shape[:-3], H, N, M)
        done = [self._attend(q, k, v, given, heads, bucket) for bucket in self._buckets()]
        if len(self.wide):
            done.append(self._attend_densely(heads, given))
        return torch.cat(done, 1).index_select(1, self.inverse).unflatten(1, (H, N))

    def last_softmax(self, heads: Heads) -> Heads:
        """The same with everything that the pattern removes hidden by the bias.

        `heads` are those that enter the kernel.
        """
        self._require_size(heads)
        hidden = heads.q.new_zeros(self.keep.shape).masked_fill(~self.keep, -torch.inf)  # (H, N, M)
        return heads._replace(bias=hidden if heads.bias is None else heads.bias + hidden)

    def _require_size(self, heads: Heads) -> None:
        _, N, M = self.keep.shape
        if (heads.q.shape[-2], heads.k.shape[-2]) != (N, M):
            raise SurgeryError(
                f"'sparse_softmax' at {self.site_name!r} is for {N} queries and {M} keys and met "
                f"{heads.q.shape[-2]} and {heads.k.shape[-2]}. Resample it with vitruvius.attention.interpolate."
            )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, given: Tensor | None, heads: Heads, bucket: Bucket) -> Tensor:
        """One bucket, (B, S·T, E)."""
        (S, T), U = bucket.queries.shape, bucket.keys.shape[1]
        bias = bucket.bias.to(q.dtype)
        if given is not None:
            M = self.keep.shape[-1]
            pairs = bucket.queries[:, :, None] * M + bucket.keys[:, None, :] % M  # (S, T, U)
            bias = bias + given.flatten(-3).index_select(-1, pairs.flatten()).unflatten(-1, (S, T, U))
        rows, columns = bucket.queries.flatten(), bucket.keys.flatten()
        few = Heads(
            q.index_select(1, rows).unflatten(1, (S, T)),
            k.index_select(1, columns).unflatten(1, (S, U)),
            v.index_select(1, columns).unflatten(1, (S, U)),
            bias,
            heads.scale,
            heads.dropout,
        )
        if given is None:
            return attend_few(few).flatten(1, 2)
        return attend(few).flatten(1, 2)

    def _attend_densely(self, heads: Heads, given: Tensor | None) -> Tensor:
        """The queries that keep most keys, (B, H·W, E)."""
        bias: Tensor | None = None
        if not self.wide_is_whole:
            kept = self.keep[:, self.wide]  # (H, W, M)
            bias = heads.q.new_zeros(kept.shape).masked_fill(~kept, -torch.inf)
        if given is not None:
            shown = given[..., self.wide, :]
            bias = shown if bias is None else bias + shown
        return attend(heads._replace(q=heads.q.index_select(2, self.wide), bias=bias)).flatten(1, 2)

    def _buckets(self) -> Iterator[Bucket]:
        for i in range(self.num_buckets):
            yield Bucket(*(self.get_buffer(f"{name}_{i}") for name in NAMES))

    def _plan(self) -> None:
        """Derive the lists from the pattern; they follow the model but stay out of checkpoints."""
        for i in range(self.num_buckets):
            for name in NAMES:
                delattr(self, f"{name}_{i}")
        keep, device = self.keep.cpu(), self.keep.device
        H, N, M = keep.shape
        wide = (keep.sum(-1) > M / 2).any(0)  # (N)
        buckets = self._best_buckets(keep, wide)
        self.num_buckets = len(buckets)
        for i, bucket in enumerate(buckets):
            for name, tensor in zip(NAMES, bucket, strict=True):
                self.register_buffer(f"{name}_{i}", tensor.to(device), persistent=False)
        lists = make_pattern(keep) if can_run() else []
        self.num_lists = len(lists)
        for i, tensor in enumerate(lists):
            self.register_buffer(f"list_{i}", tensor.to(device), persistent=False)
        chosen = wide.nonzero().flatten()
        self.wide_is_whole = bool(keep[:, chosen].all())
        dense = (torch.arange(H)[:, None] * N + chosen).flatten()
        places = torch.cat([*(bucket.queries.flatten() for bucket in buckets), dense])
        inverse = torch.empty(H * N, dtype=torch.long).scatter_(0, places, torch.arange(len(places)))
        self.register_buffer("wide", chosen.to(device), persistent=False)
        self.register_buffer("inverse", inverse.to(device), persistent=False)

    def _best_buckets(self, keep: Tensor, wide: Tensor) -> list[Bucket]:
        """Blocks of the number of queries asked for, or of the one that computes least."""
        sizes = BLOCKS if self.block is None else (self.block,)
        _, N, M = keep.shape
        grid = self.grid if N == M else None
        orders = {size: tile_order(N, grid, self.num_prefix_tokens, size) for size in sizes}
        plans = [make_buckets(keep, order[~wide[order]], size) for size, order in orders.items()]
        return min(plans, key=lambda plan: sum(bucket.bias.numel() + BUCKET for bucket in plan))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._plan()

    def extra_repr(self) -> str:
        pairs = sum(bucket.bias.numel() for bucket in self._buckets()) + len(self.wide) * self.keep[:, 0].numel()
        return f"{tuple(self.keep.shape)}, computes {pairs / self.keep.numel():.1%} of the pairs"


def attend_few(heads: Heads) -> Tensor:
    """Softmax attention of blocks (B, S, T, D) with a few keys (B, S, U, D) each, (B, S, T, E).

    `heads` have a bias (S, T, U) that leaves every query a key. On a CPU it is written out: PyTorch's attention with a
    bias looks for queries without keys, which takes longer than the rest of a small block.
    """
    q, k, v, bias, scale, dropout = heads
    if q.device.type != "cpu" or dropout or bias is None:
        return attend(heads)
    if len(q) == 1:
        scores = torch.baddbmm(bias, q[0], k[0].transpose(-2, -1), alpha=scale)  # (S, T, U)
        return torch.bmm(scores.softmax(-1), v[0])[None]
    scores = torch.matmul(q * scale, k.transpose(-2, -1)) + bias
    return torch.matmul(scores.softmax(-1), v)


def tile_order(num_queries: int, grid: tuple[int, int] | None, prefix: int, block: int) -> Tensor:
    """Queries so that neighbours on the grid follow each other: square tiles of about `block` patches, (N).

    `num_queries` counts all tokens, of which the first `prefix` lie on no grid; `grid` is (rows, columns), or None for
    tokens in the order they have.
    """
    if grid is None or prefix + grid[0] * grid[1] != num_queries:
        return torch.arange(num_queries)
    side = max(1, round(block**0.5))
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    tile = (rows // side) * -(-grid[1] // side) + columns // side
    return torch.cat([torch.arange(prefix), tile.flatten().argsort(stable=True) + prefix])


def make_buckets(keep: Tensor, order: Tensor, block: int) -> list[Bucket]:
    """Blocks of `block` queries in this order, for each head; together with others that need about as many keys.

    `keep` is the mask (H, N, M), True = kept; `order` (N) lists the queries.
    """
    H, N, M = keep.shape
    groups: dict[int, list[Block]] = {}
    block = min(block, len(order))
    for queries in order.split(block) if block else ():
        padded = torch.cat([queries, queries[-1:].expand(block - len(queries))])  # (T)
        for head in range(H):
            rows = keep[head, padded]  # (T, M)
            keys = rows.any(0).nonzero().flatten()
            size = min(_round_up(len(keys)), M)
            filled = torch.cat([keys, keys[-1:].expand(size - len(keys))])
            kept = rows[:, filled]
            kept[:, len(keys) :] = False
            groups.setdefault(size, []).append((head * N + padded, head * M + filled, kept))
    buckets = []
    for members in _merged(groups):
        queries, keys, kept = (torch.stack(column) for column in zip(*members, strict=True))
        buckets.append(Bucket(queries, keys, torch.zeros(kept.shape).masked_fill(~kept, -torch.inf)))
    return buckets


Block = tuple[Tensor, Tensor, Tensor]  # queries (T), keys (U), kept (T, U)


def _merged(groups: dict[int, list[Block]]) -> list[list[Block]]:
    """Blocks by their number of keys; few blocks are padded to the next larger number rather than computed apart."""
    merged: list[list[Block]] = []
    waiting: list[Block] = []
    sizes = sorted(groups)
    for place, size in enumerate(sizes):
        waiting = [_padded(block, size) for block in waiting] + groups[size]
        last = place == len(sizes) - 1
        if last or len(waiting) * len(waiting[0][0]) * (sizes[place + 1] - size) >= BUCKET:
            merged.append(waiting)
            waiting = []
    return merged


def _padded(block: Block, size: int) -> Block:
    """A block with its last key repeated, and removed."""
    queries, keys, kept = block
    missing = size - len(keys)
    return queries, torch.cat([keys, keys[-1:].expand(missing)]), F.pad(kept, (0, missing))


def _round_up(number: int) -> int:
    """To a multiple of a quarter of the power of two below: at most a quarter of the keys of a block is padding."""
    step = max(16, 2 ** (number.bit_length() - 3))
    return -(-number // step) * step
