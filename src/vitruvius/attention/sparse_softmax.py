"""Softmax attention that computes a fixed pattern only: blocks of queries meet the keys that any of them keeps.

Equal to `mask → softmax`. Neighbouring patches keep similar keys, so a block of them shares a short list of keys; the
few queries that keep most keys (class tokens, global ones) are computed densely.
B batch, H heads, N queries, M keys, E value width; S blocks of a bucket, T queries and U keys of a block; True = kept
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius._files import StrPath
from vitruvius.attention.base import Kernel, attentions
from vitruvius.attention.fused import can_run, wanted
from vitruvius.attention.fused.masked import attend_kept, make_pattern
from vitruvius.attention.mask import Mask, hide_removed, require_size
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site

BLOCKS = (64, 32, 16)  # queries computed together, unless a number is asked for
BUCKET = 4096  # pairs that take about as long as the calls for one more bucket
KEY = 4  # pairs that take about as long as fetching a key and its value
FETCHED = 6144  # keys fetched at a time, about; with their values 3 MB at a width of 64


class Bucket(nn.Module):
    """Blocks of queries with about as many keys each, and softmax attention of theirs.

    `queries` (S, T) are indices in H·N, of which the last may repeat, `keys` (S, U) such in H·M; `kept` (S, T, U) are
    the pairs that count. `shape` is H, N, M. Indices are worked out before, and stay out of checkpoints.
    """

    bias: Tensor  # (S, T, U), 0 where kept, -inf elsewhere
    queries_by_head: Tensor  # (S·T), in H·N
    keys_by_head: Tensor  # (S·U), in H·M

    def __init__(self, queries: Tensor, keys: Tensor, kept: Tensor, shape: tuple[int, int, int]) -> None:
        super().__init__()
        H, N, M = shape
        self.shape = (*queries.shape, keys.shape[1])  # S, T, U
        self.whole = bool(kept.all())  # every pair is kept, as in tiles: no bias is read
        self.register_buffer("bias", torch.zeros(kept.shape).masked_fill(~kept, -torch.inf), persistent=False)
        for name, indices, size in (("queries", queries.flatten(), N), ("keys", keys.flatten(), M)):
            side_by_side = indices % size * 3 * H + indices // size
            self.register_buffer(f"{name}_by_head", indices, persistent=False)
            self.register_buffer(f"{name}_by_token", side_by_side, persistent=False)

    def forward(self, heads: Heads, given: Tensor | None) -> Tensor:
        """The output (B, S·T, E) for q (B, H·N, D), k (B, H·M, D) and v (B, H·M, E), differentiable.

        `given` is a bias of the whole map (…, H, N, M).
        """
        q, k, v, _, scale, dropout = heads
        (S, T, U), bias = self.shape, self.bias.to(q.dtype)
        if given is not None:
            M = given.shape[-1]
            rows, columns = self.queries_by_head.view(S, T, 1), self.keys_by_head.view(S, 1, U)
            pairs = (rows * M + columns % M).flatten()
            bias = bias + given.flatten(-3).index_select(-1, pairs).unflatten(-1, (S, T, U))
        asking = q.index_select(1, self.queries_by_head).unflatten(1, (S, T))
        asked, values = (x.index_select(1, self.keys_by_head).unflatten(1, (S, U)) for x in (k, v))
        if given is not None or dropout or q.device.type != "cpu":
            return attend(Heads(asking, asked, values, bias, scale, dropout)).flatten(1, 2)
        # PyTorch's attention with a bias looks for queries without keys, which takes longer than all of a small block
        return (((asking * scale) @ asked.mT + bias).softmax(-1) @ values).flatten(1, 2)

    def attend_rows(self, rows: list[Tensor], layout: str, steps: tuple[int, int], scale: float, G: int) -> Tensor:
        """The output (G, S·T, E) for rows of q, k and v of G images in this layout, by six calls and few copies."""
        q, k, v = rows
        (S, T, U), D = self.shape, q.shape[1]
        bias, by_layout = self._get("bias").to(q.dtype), [self._get(f"{name}_{layout}") for name in ("queries", "keys")]
        queries, keys = (_in_each_image(x, G, step) for x, step in zip(by_layout, steps, strict=True))
        asking, asked = q.index_select(0, queries).view(G * S, T, D), k.index_select(0, keys).view(G * S, U, D)
        if self.whole:
            scores = torch.baddbmm(bias[:1, :1, :1], asking, asked.mT, alpha=scale, beta=0)  # (G·S, T, U)
        else:
            scores = torch.baddbmm(bias.repeat(G, 1, 1) if G > 1 else bias, asking, asked.mT, alpha=scale)
        return torch.bmm(scores.softmax(-1), v.index_select(0, keys).view(G * S, U, -1)).view(G, S * T, -1)

    def _get(self, name: str) -> Tensor:
        """A buffer; a module's `__getattr__` takes as long as a small operation."""
        return cast(Tensor, self._buffers[name])


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
        self.site_name, self.block, self.grid = site.name, block, site.grid
        self.num_prefix_tokens = site.num_prefix_tokens
        self.register_buffer("keep", Mask(site, file=file, keep=keep).keep)
        self._plan()

    def forward(self, heads: Heads) -> Tensor:
        require_size(heads, self.keep, f"'sparse_softmax' at {self.site_name!r}")
        if self.num_lists and heads.bias is None and wanted(heads, part="sparse_softmax"):
            return attend_kept(heads, [self.get_buffer(f"list_{i}") for i in range(self.num_lists)])
        if not is_plain_inference(heads):
            return self._attend(heads)
        if len(heads.q) <= self.num_together:
            return self._attend_rows(heads)
        groups = zip(*(x.split(self.num_together) for x in heads[:3]), strict=True)
        return torch.cat([self._attend_rows(heads._replace(q=q, k=k, v=v)) for q, k, v in groups])

    def last_softmax(self, heads: Heads) -> Heads:
        """The same with everything that the pattern removes hidden by the bias."""
        return hide_removed(heads, self.keep, f"'sparse_softmax' at {self.site_name!r}")

    def _attend(self, heads: Heads) -> Tensor:
        """The output (B, H, N, E) for the whole batch, with whatever bias and gradients."""
        H, N, M = self.keep.shape
        given = None if heads.bias is None else heads.bias.expand(*heads.bias.shape[:-3], H, N, M)
        q, k, v = (x.flatten(1, 2) for x in heads[:3])
        flat = Heads(q, k, v, None, heads.scale, heads.dropout)
        return self._joined([bucket(flat, given) for bucket in self.buckets], heads, given)

    def _attend_rows(self, heads: Heads) -> Tensor:
        """The output (G, H, N, E) for one group of images, for inference on a CPU.

        At 197 tokens dense attention takes a third of a millisecond, as long as fifty small calls, so calls are saved:
        rows are read from where one projection left q, k and v of a token side by side.
        """
        (G, H, N, _), M = heads.q.shape, heads.k.shape[2]
        if _lie_side_by_side(heads):
            layout, steps = "by_token", (3 * H * N, 3 * H * M)
            rows = [_side_by_side(x) for x in heads[:3]]
        else:
            layout, steps = "by_head", (H * N, H * M)
            rows = [x.flatten(0, 2) for x in heads[:3]]
        done = [cast(Bucket, bucket).attend_rows(rows, layout, steps, heads.scale, G) for bucket in self.buckets]
        return self._joined(done, heads, None)

    def _joined(self, done: list[Tensor], heads: Heads, given: Tensor | None) -> Tensor:
        """(B, H, N, E) of what the buckets answer, (B, S·T, E) each, and the queries that keep most keys, densely.

        In memory (B, N, H, E), so that heads are joined without a copy.
        """
        if self.num_wide:
            bias: Tensor | None = None
            if not self.wide_is_whole:
                kept = self.keep[:, self.wide]  # (H, W, M)
                bias = heads.q.new_zeros(kept.shape).masked_fill(~kept, -torch.inf)
            if given is not None:
                shown = given[..., self.wide, :]
                bias = shown if bias is None else bias + shown
            first = self.num_wide_first
            asking = heads.q[:, :, :first] if first else heads.q.index_select(2, self.wide)
            done.append(attend(heads._replace(q=asking, bias=bias)).flatten(1, 2))
        H, N, _ = self.keep.shape
        return torch.cat(done, 1).index_select(1, self.inverse).unflatten(1, (N, H)).transpose(1, 2)

    def _plan(self) -> None:
        """Derive the lists from the pattern; they follow the model but stay out of checkpoints."""
        keep, device = self.keep.cpu(), self.keep.device
        H, N, M = keep.shape
        wide = (keep.sum(-1) > M / 2).any(0)  # (N)
        plans = []  # blocks of the number of queries asked for, or of the one that computes least
        for size in BLOCKS if self.block is None else (self.block,):
            order = tile_order(N, self.grid if N == M else None, self.num_prefix_tokens, size)
            plans.append(make_buckets(keep, order[~wide[order]], size))
        buckets = min(plans, key=lambda plan: sum(_cost(*bucket.shape) for bucket in plan))
        self.buckets = nn.ModuleList(buckets).to(device)
        self.num_together = max(1, FETCHED // max((len(each.keys_by_head) for each in buckets), default=FETCHED))
        lists = make_pattern(keep) if can_run() else []
        self.num_lists = len(lists)
        for i, tensor in enumerate(lists):
            self.register_buffer(f"list_{i}", tensor.to(device), persistent=False)
        chosen = wide.nonzero().flatten()
        self.num_wide, self.wide_is_whole = len(chosen), bool(keep[:, chosen].all())
        self.num_wide_first = self.num_wide if torch.equal(chosen, torch.arange(self.num_wide)) else 0
        dense = (torch.arange(H)[:, None] * N + chosen).flatten()
        by_head = torch.cat([*(bucket.queries_by_head for bucket in buckets), dense.to(device)])
        places = by_head % N * H + by_head // N  # in N·H
        inverse = torch.empty_like(places[: H * N]).scatter_(0, places, torch.arange(len(places), device=device))
        self.register_buffer("wide", chosen.to(device), persistent=False)
        self.register_buffer("inverse", inverse, persistent=False)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._plan()

    def extra_repr(self) -> str:
        computed = sum(math.prod(cast(Bucket, bucket).shape) for bucket in self.buckets)
        pairs = computed + len(self.wide) * self.keep[:, 0].numel()
        return f"{tuple(self.keep.shape)}, computes {pairs / self.keep.numel():.1%} of the pairs"


def is_plain_inference(heads: Heads) -> bool:
    """Whether nothing but the result is wanted, on a CPU, by code that runs as it is written."""
    if heads.q.device.type != "cpu" or heads.bias is not None or heads.dropout:
        return False
    if torch.compiler.is_compiling():  # groups of images would be fixed in what is exported
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in heads[:3]))


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
    """Blocks of `block` queries in this `order` (N), for each head of the mask `keep` (H, N, M), in buckets."""
    H, N, M = keep.shape
    blocks: list[Block] = []
    block = min(block, len(order))
    for queries in order.split(block) if block else ():
        padded = torch.cat([queries, queries[-1:].expand(block - len(queries))])  # (T)
        for head in range(H):
            rows = keep[head, padded]  # (T, M)
            keys = rows.any(0).nonzero().flatten()
            blocks.append((head * N + padded, head * M + keys, rows[:, keys]))
    buckets = []
    for members in _gathered(blocks):  # with as many keys as the widest: the last of the others is repeated, removed
        widest = len(members[-1][1])
        wide = [torch.cat([keys, keys[-1:].expand(widest - len(keys))]) for _, keys, _ in members]
        kept = [F.pad(pairs, (0, widest - pairs.shape[1])) for _, _, pairs in members]
        rows = torch.stack([block_queries for block_queries, _, _ in members])
        buckets.append(Bucket(rows, torch.stack(wide), torch.stack(kept), (H, N, M)))
    return buckets


Block = tuple[Tensor, Tensor, Tensor]  # queries (T), keys (U), kept (T, U)


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
    gathered = []
    for start, end in itertools.pairwise(cuts):  # in parts of about one size that fetch no more than the cache takes
        parts = -(-(end - start) * sizes[end - 1] // FETCHED)
        size = -(-(end - start) // parts)
        gathered += [blocks[first : min(first + size, end)] for first in range(start, end, size)]
    return gathered


def _cost(S: int, T: int, U: int) -> int:
    """Of a bucket, in pairs."""
    return S * U * (T + KEY) + BUCKET
