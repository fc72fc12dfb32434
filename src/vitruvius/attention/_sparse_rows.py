"""Blocks of queries and the keys they keep, for inference on a CPU: six calls of PyTorch a bucket, and few copies.

At 197 tokens dense attention takes a third of a millisecond, about as long as fifty small calls, so calls are saved:
rows are read from where one projection left q, k and v of a token side by side, and places are worked out before.
Images go through in groups, so that what is fetched stays in the processor's cache.
B batch, G images of a group, H heads, N queries, M keys, D width; S blocks of a bucket, T queries, U keys of a block
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from vitruvius.heads import Heads

FETCHED = 6144  # keys fetched at a time, about; with their values 3 MB at a width of 64
Places = tuple[Tensor, Tensor, Tensor]  # queries (S, T) in H·N, keys (S, U) in H·M, bias (S, T, U)


def fits(heads: Heads) -> bool:
    """Whether nothing but the result is wanted, on a CPU, by code that runs as it is written.

    `heads` are about to be attended.
    """
    q, k, v, bias, _, dropout = heads
    if q.device.type != "cpu" or bias is not None or dropout:
        return False
    if torch.compiler.is_compiling():  # groups of images would be fixed in what is exported
        return False
    return not torch.is_grad_enabled() or not (q.requires_grad or k.requires_grad or v.requires_grad)


class SparseRows(nn.Module):
    """Where the rows of every bucket lie: head after head, or token after token with q, k and v side by side.

    `buckets` hold places of queries (S, T) in H·N and of keys (S, U) in H·M, and the bias (S, T, U); `shape`: H, N, M.
    """

    def __init__(self, buckets: Sequence[Places], shape: tuple[int, int, int]) -> None:
        super().__init__()
        H, N, M = shape
        self.num_buckets = len(buckets)
        self.num_together = max(1, FETCHED // max((keys.numel() for _, keys, _ in buckets), default=FETCHED))
        self.shapes = [tuple(bias.shape) for _, _, bias in buckets]  # S, T, U
        self.whole = [not bias.any() for _, _, bias in buckets]  # every pair is kept, as in tiles: no bias is read
        for i, (queries, keys, bias) in enumerate(buckets):
            self.register_buffer(f"bias_{i}", bias[:1, :1, :1] if self.whole[i] else bias, persistent=False)
            for name, places, size in (("queries", queries.flatten(), N), ("keys", keys.flatten(), M)):
                self.register_buffer(f"{name}_by_head_{i}", places, persistent=False)
                side_by_side = places % size * 3 * H + places // size
                self.register_buffer(f"{name}_by_token_{i}", side_by_side, persistent=False)

    def groups(self, heads: Heads) -> list[Heads]:
        """As many images together as fetch what the cache takes. `heads` are those of the whole batch."""
        if len(heads.q) <= self.num_together:
            return [heads]
        parts = zip(*(x.split(self.num_together) for x in heads[:3]), strict=True)
        return [heads._replace(q=q, k=k, v=v) for q, k, v in parts]

    def forward(self, heads: Heads) -> list[Tensor]:
        """The outputs (G, S·T, E) of the buckets. `heads` are those of one group."""
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


def _in_each_image(places: Tensor, G: int, step: int) -> Tensor:
    """(G·P) of places (P) in an image, where those of the next image lie `step` rows further on."""
    if G == 1:
        return places
    return (torch.arange(0, G * step, step, device=places.device)[:, None] + places).view(-1)
