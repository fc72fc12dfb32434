"""Softmax attention that computes a fixed pattern only: blocks of queries meet the keys that any of them keeps.

Equal to `mask → softmax`. Neighbouring patches keep similar keys, so a block of them shares a short list of keys; the
few queries that keep most keys (class tokens, global ones) are computed densely.
B batch, H heads, N queries, M keys, E value width; S blocks of a bucket, T queries and U keys of a block; True = kept
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._errors import ConfigError, SurgeryError
from vitruvius._files import StrPath
from vitruvius.attention.base import Kernel, attentions
from vitruvius.attention.fused import can_run, wanted
from vitruvius.attention.fused.masked import attend_kept, make_pattern
from vitruvius.attention.mask import Mask
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site

NAMES = ("queries", "keys", "bias")
BLOCKS = (64, 32, 16)  # queries computed together, unless a number is asked for
BUCKET = 4096  # pairs that take about as long as the calls for one more bucket
KEY = 4  # pairs that take about as long as fetching a key and its value
FETCHED = 6144  # keys fetched at a time, about; with their values 3 MB at a width of 64


class Bucket(NamedTuple):
    """Blocks with about as many keys each."""

    queries: Tensor  # (S, T), index in H·N; the last may repeat
    keys: Tensor  # (S, U), index in H·M
    bias: Tensor  # (S, T, U), 0 where kept, -inf elsewhere


@attentions.register("sparse_softmax")
class SparseSoftmax(Kernel):
    """Softmax over a fixed pattern without computing what it removes, for inference (ViTCoD, arXiv:2210.09573).

    `file` and `keep` give the pattern as for `mask`; `block` is the number of queries that are computed together, by
    default the one of 16, 32 and 64 that computes least.
    """

    map_text = "the softmax of the pairs that are kept; removed ones are 0"
    discards = frozenset({"choice of keys"})
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
        if not is_plain_inference(heads):
            return self._put_back(self._attend_all(heads))
        done = [self._put_back(self._attend_group(group)) for group in self.rows.groups(heads)]
        return done[0] if len(done) == 1 else torch.cat(done)

    def last_softmax(self, heads: Heads) -> Heads:
        """The same with everything that the pattern removes hidden by the bias."""
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
        block_heads = Heads(
            q.index_select(1, rows).unflatten(1, (S, T)),
            k.index_select(1, columns).unflatten(1, (S, U)),
            v.index_select(1, columns).unflatten(1, (S, U)),
            bias,
            heads.scale,
            heads.dropout,
        )
        return (attend_blocks(block_heads) if given is None else attend(block_heads)).flatten(1, 2)

    def _attend_densely(self, heads: Heads, given: Tensor | None) -> Tensor:
        """The queries that keep most keys, (B, H·W, E)."""
        bias: Tensor | None = None
        if not self.wide_is_whole:
            kept = self.keep[:, self.wide]  # (H, W, M)
            bias = heads.q.new_zeros(kept.shape).masked_fill(~kept, -torch.inf)
        if given is not None:
            shown = given[..., self.wide, :]
            bias = shown if bias is None else bias + shown
        first = self.num_wide_first
        asking = heads.q[:, :, :first] if first else heads.q.index_select(2, self.wide)
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


def is_plain_inference(heads: Heads) -> bool:
    """Whether nothing but the result is wanted, on a CPU, by code that runs as it is written."""
    if heads.q.device.type != "cpu" or heads.bias is not None or heads.dropout:
        return False
    if torch.compiler.is_compiling():  # groups of images would be fixed in what is exported
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in heads[:3]))


class SparseRows(nn.Module):
    """The buckets for inference on a CPU: six calls of PyTorch a bucket, and few copies.

    At 197 tokens dense attention takes a third of a millisecond, as long as fifty small calls, so calls are saved: rows
    are read from where one projection left q, k and v of a token side by side, and indices are worked out before.
    Images go through in groups of G, so that what is fetched stays in the processor's cache. `shape` is H, N, M.
    """

    def __init__(self, buckets: Sequence[Bucket], shape: tuple[int, int, int]) -> None:
        super().__init__()
        H, N, M = shape
        self.num_buckets = len(buckets)
        self.num_together = max(1, FETCHED // max((keys.numel() for _, keys, _ in buckets), default=FETCHED))
        self.shapes = [tuple(bias.shape) for _, _, bias in buckets]  # S, T, U
        self.whole = [not bias.any() for _, _, bias in buckets]  # every pair is kept, as in tiles: no bias is read
        for i, (queries, keys, bias) in enumerate(buckets):
            self.register_buffer(f"bias_{i}", bias[:1, :1, :1] if self.whole[i] else bias, persistent=False)
            for name, indices, size in (("queries", queries.flatten(), N), ("keys", keys.flatten(), M)):
                self.register_buffer(f"{name}_by_head_{i}", indices, persistent=False)
                side_by_side = indices % size * 3 * H + indices // size
                self.register_buffer(f"{name}_by_token_{i}", side_by_side, persistent=False)

    def groups(self, heads: Heads) -> list[Heads]:
        """The whole batch, as many images together as fetch what the cache takes."""
        if len(heads.q) <= self.num_together:
            return [heads]
        parts = zip(*(x.split(self.num_together) for x in heads[:3]), strict=True)
        return [heads._replace(q=q, k=k, v=v) for q, k, v in parts]

    def forward(self, heads: Heads) -> list[Tensor]:
        """The outputs (G, S·T, E) of the buckets for one group."""
        (G, H, N, _), M = heads.q.shape, heads.k.shape[2]
        if _lie_side_by_side(heads):
            layout, steps = "by_token", (3 * H * N, 3 * H * M)
            rows = [_side_by_side(x) for x in heads[:3]]
        else:
            layout, steps = "by_head", (H * N, H * M)
            rows = [x.flatten(0, 2) for x in heads[:3]]
        return [self._attend(rows, i, layout, steps, heads.scale, G) for i in range(self.num_buckets)]

    def _attend(
        self, rows: list[Tensor], bucket: int, layout: str, steps: tuple[int, int], scale: float, G: int
    ) -> Tensor:
        """One bucket, (G, S·T, E)."""
        q, k, v = rows
        bias = self._get(f"bias_{bucket}").to(q.dtype)
        queries = _in_each_image(self._get(f"queries_{layout}_{bucket}"), G, steps[0])
        keys = _in_each_image(self._get(f"keys_{layout}_{bucket}"), G, steps[1])
        (S, T, U), D = self.shapes[bucket], q.shape[1]
        asking, asked = q.index_select(0, queries).view(G * S, T, D), k.index_select(0, keys).view(G * S, U, D)
        if self.whole[bucket]:
            scores = torch.baddbmm(bias, asking, asked.mT, alpha=scale, beta=0)  # (G·S, T, U)
        else:
            scores = torch.baddbmm(bias.repeat(G, 1, 1) if G > 1 else bias, asking, asked.mT, alpha=scale)
        return torch.bmm(scores.softmax(-1), v.index_select(0, keys).view(G * S, U, -1)).view(G, S * T, -1)

    def _get(self, name: str) -> Tensor:
        """A buffer; a module's `__getattr__` takes as long as a small operation."""
        return cast(Tensor, self._buffers[name])


def _lie_side_by_side(heads: Heads) -> bool:
    """Whether one projection made q, k and v of every token, head by head, and nothing moved them since."""
    _, H, N, D = heads.q.shape
    strides = (N * 3 * H * D, D, 3 * H * D, 1)
    return all(x.stride() == strides and x.shape == heads.q.shape for x in heads[:3])


def _side_by_side(x: Tensor) -> Tensor:
    """Rows of what that projection made, from the first of this tensor (G, H, N, D) to its last; no copy."""
    G, H, N, D = x.shape
    return x.as_strided(((G * N - 1) * 3 * H + H, D), (D, 1), x.storage_offset())


def _in_each_image(indices: Tensor, G: int, step: int) -> Tensor:
    """(G·P) of indices (P) in an image, where those of the next image lie `step` rows further on."""
    if G == 1:
        return indices
    return (torch.arange(0, G * step, step, device=indices.device)[:, None] + indices).view(-1)


def attend_blocks(heads: Heads) -> Tensor:
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
    """Blocks with as many keys as the widest of them: the last key of the others is repeated, and removed."""
    widest = max(len(keys) for _, keys, _ in members)
    queries = torch.stack([block_queries for block_queries, _, _ in members])
    keys = torch.stack([torch.cat([keys, keys[-1:].expand(widest - len(keys))]) for _, keys, _ in members])
    kept = torch.stack([F.pad(kept, (0, widest - kept.shape[1])) for _, _, kept in members])
    return Bucket(queries, keys, torch.zeros(kept.shape).masked_fill(~kept, -torch.inf))


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
