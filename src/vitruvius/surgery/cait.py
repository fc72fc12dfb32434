"""Class attention, one query to all tokens, of CaiT, XCiT and CrossViT; and CaiT's talking heads.

Touvron et al. 2021, arXiv:2103.17239; Chen et al. 2021, arXiv:2103.14899.

B batch, H heads (g before mixing, h after), N tokens, D head width.

Talking heads mix the maps of all heads, W before and W' after the softmax. Both mixings are linear, so
they can be moved into what the softmax sees:

    logits  Σ_g W[h,g] q_g·k_g + w[h]  =  [W[h,g] q_g]_g · [k_g]_g   + a constant of the row, which softmax ignores
    output  Σ_g (W'[h,g] A_g + w'[h]) v_h  =  Σ_g W'[h,g] (A_g [v_h]_h)_h  +  w'[h] Σ_m v_h[m]
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.cait import ClassAttn, TalkingHeadAttn
from timm.models.crossvit import CrossAttention
from torch import Tensor

from vitruvius._errors import UnsuitableSite
from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import Socket, merge_heads, separate_head_weights, split_heads


class ClassSocket(Socket, ClassAttn):
    """CaiT and XCiT: the class token looks at all tokens."""

    family = "cait_class"
    attends = "class"

    def forward(self, x: Tensor) -> Tensor:
        (q,) = split_heads(self.q(x[:, :1]), 1, self.num_heads)  # (B, H, 1, D)
        (k,) = split_heads(self.k(x), 1, self.num_heads)  # (B, H, N, D)
        (v,) = split_heads(self.v(x), 1, self.num_heads)
        x = self.core(Heads(q, k, v, None, self.scale, self.dropout_now()), x[:, :1])
        return self.proj_drop(self.proj(merge_heads(x)))

    def head_weights(self: Any) -> HeadWeights:
        return separate_head_weights(self.q, self.k, self.v, self.proj, self.num_heads)


class CrossSocket(Socket, CrossAttention):
    """CrossViT: one branch's class token looks at the other branch."""

    family = "crossvit"
    attends = "class"

    def forward(self, x: Tensor) -> Tensor:
        (q,) = split_heads(self.wq(x[:, :1]), 1, self.num_heads)  # (B, H, 1, D)
        (k,) = split_heads(self.wk(x), 1, self.num_heads)  # (B, H, N, D)
        (v,) = split_heads(self.wv(x), 1, self.num_heads)
        x = self.core(Heads(q, k, v, None, self.scale, self.dropout_now()))
        return self.proj_drop(self.proj(merge_heads(x)))

    def head_weights(self: Any) -> HeadWeights:
        return separate_head_weights(self.wq, self.wk, self.wv, self.proj, self.num_heads)


class TalkingHeadsSocket(Socket, TalkingHeadAttn):
    """CaiT: heads mixed before and after the softmax, which sees queries, keys and values H times as wide."""

    family = "cait"

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x), 3, self.num_heads)  # each (B, H, N, D)
        queries = torch.einsum("hg,bgnd->bhngd", self.proj_l.weight, q).flatten(3)  # (B, H, N, H·D)
        keys, values = (merge_heads(y)[:, None].expand(-1, self.num_heads, -1, -1) for y in (k, v))
        x = self.core(Heads(queries, keys, values, None, self.scale, 0.0))
        x = x.unflatten(-1, (self.num_heads, -1))  # (B, g, N, h, D)
        x = torch.einsum("hg,bgnhd->bnhd", self.proj_w.weight, x)
        x = x + self.proj_w.bias[:, None] * v.sum(-2)[:, None]
        x = x + 0.0 * self.proj_l.bias.sum()  # ignored by softmax; a gradient of zeros, as upstream's, for DDP
        return self.proj_drop(self.proj(x.flatten(2)))

    def check(self: Any) -> None:
        if self.attn_drop.p > 0:
            raise UnsuitableSite(
                f"attention dropout is {self.attn_drop.p}, which upstream applies to the mixed maps; "
                "the core comes before that mixing. Build the model with attn_drop_rate=0."
            )
