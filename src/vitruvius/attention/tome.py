"""Token merging: after attention, each block merges its `r` most similar pairs of patches into one token each.

Bolya et al. 2023, "Token Merging: Your ViT But Faster", arXiv:2210.09461. Patches are split in two alternating sets;
each of the one is tied to the most similar of the other, by the cosine of their keys (mean over heads), and the r
most similar ties are merged, weighted by how many patches a token stands for. Attention knows these sizes: + log size
on each key.
B batch, H heads, N tokens, P prefix tokens, A and S patches of the two sets, D key width, C model width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.attention.base import Stage, attentions
from vitruvius.heads import Context, Heads, Site


@attentions.register("tome")
class ToMe(Stage):
    """Merge the r most similar pairs of tokens in every block, without training (Bolya et al. 2023, arXiv:2210.09461).

    `r` tokens go in each block, at most half of the patches there are; 0 changes nothing. proportional=False leaves
    the sizes of tokens out of attention. Prefix tokens (class, distillation, registers) are never merged.
    """

    map_text = "the softmax over the tokens that are left, sizes included"
    surrogate = ()  # which tokens are merged has no gradient

    def __init__(self, site: Site, *, r: int = 8, proportional: bool = True) -> None:
        super().__init__()
        if r < 0:
            raise ConfigError(f"'tome' got r={r}; it is the number of tokens that go in each block, 0 or more.")
        self.r, self.proportional, self.num_prefix_tokens = r, proportional, site.num_prefix_tokens

    def forward(self, heads: Heads, context: Context = Context()) -> Heads:  # noqa: B008
        if context.prev_state is None or not self.proportional:
            return heads
        bias = context.prev_state.log().to(heads.q.dtype)[:, None, None]  # (B, 1, 1, N)
        return heads.add_bias(bias)

    def reduce(self, tokens: Tensor, heads: Heads, context: Context) -> tuple[Tensor, Tensor]:
        """Merged tokens (B, N − r, C), and of how many each consists (B, N − r)."""
        sizes = context.prev_state
        if sizes is None:
            sizes = torch.ones(tokens.shape[:2], dtype=torch.float32, device=tokens.device)
        return merge(tokens, sizes, heads.k.mean(1), self.r, self.num_prefix_tokens)


def merge(tokens: Tensor, sizes: Tensor, keys: Tensor, r: int, prefix: int) -> tuple[Tensor, Tensor]:
    """Tokens (B, N, C) and `sizes` (B, N) with `r` fewer, by `keys` (B, N, D); the first `prefix` are left alone."""
    r = min(r, (tokens.shape[1] - prefix) // 2)
    if r <= 0:
        return tokens, sizes
    with torch.no_grad():
        directions = F.normalize(keys[:, prefix:].float(), dim=-1)
        similar = directions[:, 1::2] @ directions[:, ::2].mT  # (B, A, S)
        best, target = similar.max(-1)
        order = best.argsort(-1, descending=True)
        gone, staying = order[:, :r], order[:, r:].sort(-1).values
        target = target.gather(-1, gone)  # (B, r), among the other set
    weights = sizes[..., None].to(tokens.dtype)
    weighed = torch.cat([tokens * weights, weights], -1)  # (B, N, C + 1)
    first, second = weighed[:, prefix + 1 :: 2], weighed[:, prefix::2]
    second = second.scatter_add(1, _wide(target, second), first.gather(1, _wide(gone, first)))
    merged = torch.cat([weighed[:, :prefix], first.gather(1, _wide(staying, first)), second], 1)
    total = merged[..., -1:]
    return merged[..., :-1] / total, total[..., 0].float()


def _wide(index: Tensor, like: Tensor) -> Tensor:
    """(B, K) as (B, K, C)."""
    return index[..., None].expand(-1, -1, like.shape[-1])
