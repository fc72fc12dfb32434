"""ViT, DeiT and their many relatives: their attention, with relative positions too, and blocks that pass states on.

Such a block is timm's, subclassed so that its core may also reduce tokens before the MLP. Only blocks with a core that
needs it are swapped, and a run of them passes a Stream from one to the next; the last one gives plain tokens.
B batch, H heads, N tokens, D head width, C model width.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch.nn.functional as F
from timm.layers import Attention
from timm.layers.attention import resolve_self_attn_mask
from timm.models.vision_transformer import Block
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn

from vitruvius._errors import SurgeryError
from vitruvius.attention.base import Core
from vitruvius.heads import Heads
from vitruvius.surgery.base import Socket, gate_of, is_plain_linear, merge_heads, socket_of, split_heads


class ViTSocket(Socket, Attention):
    """ViT and DeiT, with q/k-norm, scale-norm and gates."""

    family = "vit"

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.leave(self.core(self.enter(x, attn_mask, is_causal), x), x)

    def enter(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Heads:
        """What comes before the core, for tokens (B, N, C)."""
        if not self.reads_queries() and is_plain_linear(self.qkv):  # queries that nobody looks at are not computed
            skipped = self.qkv.out_features // 3
            shift = None if self.qkv.bias is None else self.qkv.bias[skipped:]
            k, v = split_heads(F.linear(x, self.qkv.weight[skipped:], shift), 2, self.num_heads)
            like = q = k = self.k_norm(k)
        else:
            like, k, v = split_heads(self.qkv(x), 3, self.num_heads)  # each (B, H, N, D)
            q, k = self.q_norm(like), self.k_norm(k)
        bias = resolve_self_attn_mask(x.shape[1], like, attn_mask, is_causal)  # in the precision of the projection
        return Heads(q, k, v, bias, self.scale, self.dropout_now())

    def leave(self, out: Tensor, x: Tensor) -> Tensor:
        """What comes behind the core: its output (B, H, N, E), and the tokens that came in."""
        out = self.norm(merge_heads(out))
        gate = gate_of(self, x)
        return self.proj_drop(self.proj(out if gate is None else out * gate))

    def width(self: Any) -> int:
        return int(self.qkv.in_features)  # also where the projection makes no queries


class RelPosSocket(Socket, RelPosAttention):
    """ViTs with relative positions, of each block or shared by all."""

    family = "relpos"

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        q, k, v = split_heads(self.qkv(x), 3, self.num_heads)  # each (B, H, N, D)
        bias = shared_rel_pos if self.rel_pos is None else self.rel_pos.get_bias()
        x = self.core(Heads(self.q_norm(q), self.k_norm(k), v, bias, self.scale, self.dropout_now()), x)
        return self.proj_drop(self.proj(merge_heads(x)))


class Stream(NamedTuple):
    """What goes from one block to the next; code that takes it for tokens, as `forward_intermediates`, is refused."""

    tokens: Tensor  # (B, N, C)
    states: Mapping[str, Tensor]  # by the name of the part of the core

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple):
            raise _no_tokens()
        return tuple.__getitem__(self, key)

    def reshape(self, *shape: int) -> Tensor:
        """Refused: a Stream is not the tokens, whatever their `shape`."""
        raise _no_tokens()

    @classmethod
    def __torch_function__(cls, *call: Any) -> Any:
        """Refused: no function of torch takes a Stream for a tensor."""
        raise _no_tokens()


class BlockSocket(Block):
    """A ViT block that gives its core the states of the block before, and lets it reduce tokens before the MLP."""

    passes_on: bool

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        tokens, states = x if isinstance(x, Stream) else Stream(x, {})
        attention: Any = self.attn
        entering = self.norm1(tokens)
        heads = attention.enter(entering, attn_mask, is_causal)
        out = attention.leave(attention.core(heads, entering, states), entering)
        tokens = tokens + self.drop_path1(self.ls1(out))
        tokens, states = attention.core.after(tokens, heads, entering, states)
        tokens = tokens + self.drop_path2(self.ls2(self.mlp(self.norm2(tokens))))
        return cast(Tensor, Stream(tokens, states)) if self.passes_on else tokens


def _no_tokens() -> SurgeryError:
    return SurgeryError(
        "blocks whose attention passes states on (tome, value_residual, elliptical) give a Stream, not tokens, so "
        "timm's forward_intermediates and what else runs blocks one by one cannot read it. Use model(x) or "
        "forward_features(x), or a forward hook on a block, whose output has the tokens as output.tokens."
    )


def is_chained(root: nn.Module, site: str) -> bool:
    """Whether the block of a site can pass states on: a plain ViT block, around attention that runs in two halves."""
    parent, _, name = site.rpartition(".")
    is_block = name == "attn" and type(root.get_submodule(parent)) in (Block, BlockSocket)
    return is_block and hasattr(socket_of(root.get_submodule(site)), "enter")


def link_blocks(root: nn.Module) -> None:
    """Swap the blocks whose cores pass states on, give the others back to upstream, mark where a run of them ends."""
    for module in root.modules():
        if type(module) is Block and _passes_state(module):
            module.__class__ = BlockSocket
        elif type(module) is BlockSocket and not _passes_state(module):
            module.__class__ = Block
            del module.passes_on
    for container in root.modules():
        in_sequence = isinstance(container, nn.Sequential | nn.ModuleList)
        for child, following in itertools.pairwise([*container.children(), None]):
            if type(child) is BlockSocket:
                child.passes_on = in_sequence and type(following) is BlockSocket


def _passes_state(block: nn.Module) -> bool:
    attention: Any = block.attn
    return isinstance(attention, Socket) and isinstance(attention.core, Core) and attention.core.passes_state
