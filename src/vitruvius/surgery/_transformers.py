"""The attention of Hugging Face's ViT, DeiT, DINOv2, ViTMAE, Swin and SigLIP.

Imported when such a model is first met (see `socket_of`).

Their classes are alike since transformers 5: four projections, and a function that attends. B batch, N tokens, H heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.deit.modeling_deit import DeiTAttention
from transformers.models.dinov2.modeling_dinov2 import Dinov2Attention
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersAttention
from transformers.models.siglip.modeling_siglip import SiglipAttention
from transformers.models.swin.modeling_swin import SwinAttention
from transformers.models.vit.modeling_vit import ViTAttention
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEAttention

from vitruvius._errors import UnsuitableSite
from vitruvius.attention.base import Core
from vitruvius.heads import Heads, HeadWeights, RecordedHeads
from vitruvius.surgery.base import Socket, merge_heads, separate_head_weights
from vitruvius.surgery.swin import windowed


class _Projected:
    """q, k, v and the output each by a projection of its own: what these classes share."""

    def check(self: Any) -> None:
        if not hasattr(self, "q_proj"):
            raise UnsuitableSite(
                f"{type(self).__name__} is laid out as before transformers 5, without q_proj; update transformers to "
                "rewire this model."
            )

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **asked: Any
    ) -> tuple[Tensor, Tensor | None]:
        k, v = (self._heads(each(hidden_states)) for each in (self.k_proj, self.v_proj))
        q = self._heads(self.q_proj(hidden_states)) if self.reads_queries() else k
        heads = Heads(q, k, v, self._bias(attention_mask, len(k)), self.head_dim**-0.5, self.dropout_now())
        out: Tensor = self._project(merge_heads(self.core(heads, hidden_states)))
        maps_wanted = asked.get("output_attentions", getattr(self.config, "output_attentions", False))
        if not (maps_wanted and isinstance(self.core, Core)):
            return out, None
        recorded = RecordedHeads(*heads)
        recorded.x = hidden_states
        return out, self.core.map_of(recorded, type(self).__name__)

    def _heads(self: Any, x: Tensor) -> Tensor:
        """(B, N, H·D) → (B, H, N, D)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _bias(self, mask: Tensor | None, num_items: int) -> Tensor | None:
        """What is added to the scores."""
        return mask

    def _project(self: Any, x: Tensor) -> Tensor:
        return self.o_proj(x)

    def dropout_now(self: Any) -> float:
        return float(self.attention_dropout) if self.training else 0.0

    def head_weights(self: Any) -> HeadWeights:
        return separate_head_weights(self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.num_attention_heads)


class TransformersViTSocket(_Projected, Socket, ViTAttention):
    """ViT of transformers."""

    family = "transformers_vit"


class TransformersViTMAESocket(_Projected, Socket, ViTMAEAttention):
    """ViTMAE of transformers, encoder and decoder."""

    family = "transformers_vit_mae"


class TransformersDeiTSocket(_Projected, Socket, DeiTAttention):
    """DeiT of transformers."""

    family = "transformers_deit"


class TransformersDINOv2Socket(_Projected, Socket, Dinov2Attention):
    """DINOv2 of transformers."""

    family = "transformers_dinov2"


class TransformersDINOv2RegistersSocket(_Projected, Socket, Dinov2WithRegistersAttention):
    """DINOv2 with registers of transformers."""

    family = "transformers_dinov2_registers"


class TransformersSwinSocket(_Projected, Socket, SwinAttention):
    """Swin of transformers, plain and shifted windows."""

    family = "transformers_swin"
    attends = "windows"

    def _bias(self: Any, mask: Tensor | None, num_items: int) -> Tensor:
        return windowed(self.relative_position_bias(), mask, num_items)

    def grid(self: Any) -> tuple[int, int] | None:
        return tuple(self.relative_position_bias.window_size)


class TransformersSigLIPSocket(_Projected, Socket, SiglipAttention):
    """The towers of SigLIP of transformers."""

    family = "transformers_siglip"

    def _project(self: Any, x: Tensor) -> Tensor:
        return self.out_proj(x)

    def dropout_now(self: Any) -> float:
        return float(self.dropout) if self.training else 0.0

    def head_weights(self: Any) -> HeadWeights:
        return separate_head_weights(self.q_proj, self.k_proj, self.v_proj, self.out_proj, self.num_heads)
