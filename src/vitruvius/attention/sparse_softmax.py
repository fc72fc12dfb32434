"""Softmax attention that computes a fixed pattern only: blocks of queries meet the keys that any of them keeps.

Equal to `mask → softmax`. Neighbouring patches keep similar keys, so a block of them shares a short list of keys; the
few queries that keep most keys (class tokens, global ones) are computed densely.
B batch, H heads, N queries, M keys, E value width; S blocks of a bucket, T queries and U keys of a block; True = kept
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvius._errors import ConfigError, SurgeryError
from vitruvius._files import StrPath
from vitruvius.attention._core import Kernel, attentions
from vitruvius.attention._sparse_rows import FETCHED, SparseRows, fits
from vitruvius.attention.fused import can_run, wanted
from vitruvius.attention.fused.masked import attend_kept, make_pattern
from vitruvius.attention.mask import Mask
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site

NAMES = ("queries", "keys", "bias")
BLOCKS = (64, 32, 16)  # queries computed together, unless a number is asked for
BUCKET = 4096  # pairs that take about as long as the calls for one more bucket
KEY = 4  # pairs that take about as long as fetching a key and its value


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
    hides = True
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
        self.num_wide, self.num_wide_first = 0, 0
        self.wide_is_whole = False
        self.register_buffer("keep", Mask(site, file=file, keep=keep).keep)
        self._plan()

    def forward(self, heads: Heads) -> Tensor:
        self._require_size(heads)
        if self.num_lists and heads.bias is None and wanted(heads, part="sparse_softmax"):
            return attend_kept(heads, [self.get_buffer(f"list_{i}") for i in range(self.num_lists)])
        if not fits(heads):
            return self._put_back(self._attend_all(heads))
        done = [self._put_back(self._attend_group(group)) for group in self.rows.groups(heads)]
        return done[0] if len(done) == 1 else torch.cat(done)

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

    def _attend_all(self, heads: Heads) -> list[Tensor]:
        """The same for the whole batch, with whatever bias and gradients, (B, S·T, E)."""
        H, N, M = self.keep.shape
        q, k, v = (x.flatten(1, 2) for x in heads[:3])  # (B, H·N, D), (B, H·M, D), (B, H·M, E)
        given = None if heads.bias is None else heads.bias.expand(*heads.bias.shape[:-3], H, N, M)
        done = [self._attend(q, k, v, given, heads, bucket) for bucket in self._buckets()]
        if self.num_wide:
            done.append(self._attend_densely(heads, given))
        return done

    def _attend_group(self, heads: Heads) -> list[Tensor]:
        """The buckets' outputs (G, S·T, E), then those of queries that keep most keys."""
        done: list[Tensor] = self.rows(heads)
        if self.num_wide:
            done.append(self._attend_densely(heads, None))
        return done

    def _put_back(self, done: list[Tensor]) -> Tensor:
        """(B, H, N, E) of the parts' outputs; in memory (B, N, H, E), so that heads are joined without a copy."""
        H, N, _ = self.keep.shape
        return torch.cat(done, 1).index_select(1, self.inverse).unflatten(1, (N, H)).transpose(1, 2)

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
        if self.num_wide_first:
            asking = heads.q[:, :, : self.num_wide_first]
        else:
            asking = heads.q.index_select(2, self.wide)
        return attend(heads._replace(q=asking, bias=bias)).flatten(1, 2)

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
        self.rows = SparseRows(buckets, (H, N, M)).to(device)
        lists = make_pattern(keep) if can_run() else []
        self.num_lists = len(lists)
        for i, tensor in enumerate(lists):
            self.register_buffer(f"list_{i}", tensor.to(device), persistent=False)
        chosen = wide.nonzero().flatten()
        self.num_wide, self.wide_is_whole = len(chosen), bool(keep[:, chosen].all())
        self.num_wide_first = self.num_wide if torch.equal(chosen, torch.arange(self.num_wide)) else 0
        dense = (torch.arange(H)[:, None] * N + chosen).flatten()
        by_head = torch.cat([*(bucket.queries.flatten() for bucket in buckets), dense])
        places = by_head % N * H + by_head // N  # in N·H
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
        return min(plans, key=lambda plan: sum(_cost(*bucket.bias.shape) for bucket in plan))

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
    if not torch.compiler.is_compiling() and len(q) == 1:  # which would fix the number of images of an export
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
    blocks: list[Block] = []
    block = min(block, len(order))
    for queries in order.split(block) if block else ():
        padded = torch.cat([queries, queries[-1:].expand(block - len(queries))])  # (T)
        for head in range(H):
            rows = keep[head, padded]  # (T, M)
            keys = rows.any(0).nonzero().flatten()
            blocks.append((head * N + padded, head * M + keys, rows[:, keys]))
    return [_bucket(members) for members in _gathered(blocks)]


Block = tuple[Tensor, Tensor, Tensor]  # queries (T), keys (U), kept (T, U)


def _bucket(members: list[Block]) -> Bucket:
    """Blocks with as many keys as the widest of them."""
    most = max(len(keys) for _, keys, _ in members)
    filled = [_padded(block, most) for block in members]
    queries, keys, kept = (torch.stack(column) for column in zip(*filled, strict=True))
    return Bucket(queries, keys, torch.zeros(kept.shape).masked_fill(~kept, -torch.inf))


def _padded(block: Block, size: int) -> Block:
    """A block with its last key repeated, and removed."""
    queries, keys, kept = block
    missing = size - len(keys)
    return queries, torch.cat([keys, keys[-1:].expand(missing)]), F.pad(kept, (0, missing))


def _gathered(blocks: list[Block]) -> list[list[Block]]:
    """Blocks in buckets, narrow ones first, so that padding and calls together cost least."""
    blocks = sorted(blocks, key=lambda block: len(block[1]))
    sizes = [len(keys) for _, keys, _ in blocks]
    ends = [end for end in range(1, len(sizes) + 1) if end == len(sizes) or sizes[end] > sizes[end - 1]]
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}  # of the blocks before: cost, and where buckets end
    for end in ends:
        T, U = blocks[end - 1][2].shape
        best[end] = min((cost + _cost(end - start, T, U), [*cuts, end]) for start, (cost, cuts) in best.items())
    _, cuts = best[len(blocks)]
    return [part for start, end in itertools.pairwise(cuts) for part in _split(blocks[start:end])]


def _cost(S: int, T: int, U: int) -> int:
    """Of a bucket, in pairs."""
    return S * U * (T + KEY) + BUCKET


def _split(blocks: list[Block]) -> list[list[Block]]:
    """Parts of about the same size that fetch no more keys each than the cache takes."""
    fetched = len(blocks) * len(blocks[-1][1])
    size = -(-len(blocks) // -(-fetched // FETCHED))
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]
