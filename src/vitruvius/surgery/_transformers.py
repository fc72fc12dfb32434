"""The attention of Hugging Face's ViT, DeiT and DINOv2: imported when such a model is first met (see `socket_of`).

Their classes are alike since transformers 5: four projections, and a function that attends. B batch, N tokens, H heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.deit.modeling_deit import DeiTAttention
from transformers.models.dinov2.modeling_dinov2 import Dinov2Attention
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersAttention
from transformers.models.vit.modeling_vit import ViTAttention

from vitruvius._errors import UnsuitableSite
from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery.base import Socket, merge_heads, separate_head_weights


class _Projected:
    """q, k, v and the output each by a projection of its own: what the four classes share."""

    def check(self: Any) -> None:
        if not hasattr(self, "q_proj"):
            raise UnsuitableSite(
                f"{type(self).__name__} is laid out as before transformers 5, without q_proj; update transformers to "
                "rewire this model."
            )

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        k, v = (self._heads(each(hidden_states)) for each in (self.k_proj, self.v_proj))
        q = self._heads(self.q_proj(hidden_states)) if self.reads_queries() else k
        heads = Heads(q, k, v, attention_mask, self.scaling, self.dropout_now())
        out: Tensor = self.o_proj(merge_heads(self.core(heads, hidden_states)))
        return out, None

    def _heads(self: Any, x: Tensor) -> Tensor:
        """(B, N, H·D) → (B, H, N, D)."""
        return x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)

    def dropout_now(self: Any) -> float:
        if not self.training:
            return 0.0
        return float(self.attention_dropout)

    def head_weights(self: Any) -> HeadWeights:
        return separate_head_weights(self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.num_attention_heads)


class TransformersViTSocket(_Projected, Socket, ViTAttention):
    """ViT of transformers."""

    family = "transformers_vit"


class TransformersDeiTSocket(_Projected, Socket, DeiTAttention):
    """DeiT of transformers."""

    family = "transformers_deit"


class TransformersDINOv2Socket(_Projected, Socket, Dinov2Attention):
    """DINOv2 of transformers."""

    family = "transformers_dinov2"


class TransformersDINOv2RegistersSocket(_Projected, Socket, Dinov2WithRegistersAttention):
    """DINOv2 with registers of transformers."""

    family = "transformers_dinov2_registers"
