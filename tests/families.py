"""The tiny models: one of every family with a socket, small enough for a test, every number randomised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import timm
import torch
from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor, nn

SMALL = {"embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 10}
SWIN = {
    "embed_dim": 16,
    "depths": (2, 1),
    "num_heads": (2, 4),
    "window_size": 4,
    "drop_path_rate": 0.0,
    "num_classes": 10,
}
LEVIT = {
    "embed_dim": (32, 48),
    "depth": (1, 1),
    "num_heads": (2, 3),
    "key_dim": 8,
    "num_classes": 10,
    "stem_type": "s8",
    "act_layer": "hard_swish",
}
MAXXVIT = {
    "embed_dim": (32, 64),
    "depths": (1, 1),
    "stem_width": 8,
    "num_classes": 10,
    "pretrained_cfg_overlay": {"input_size": (3, 32, 32)},  # which timm 1.0.29 does not take from img_size
}


@dataclass(frozen=True)
class Family:
    """A tiny model of one family: `build()` makes it, images of `size` go in."""

    name: str
    build: Callable[[], nn.Module]
    size: int = 32  # rows and columns
    noise: float = 0.2  # LeViT grows large numbers from less

    @property
    def input_size(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    def __str__(self) -> str:
        return self.name

    def randomised(self, seed: int = 0) -> tuple[nn.Module, Tensor]:
        """The model in eval mode with every weight, bias and buffer randomised, and two images."""
        torch.manual_seed(seed)
        model = self.build().eval()
        randomise(model, self.noise)
        return model, torch.randn(2, *self.input_size)


@torch.no_grad()
def randomise(model: nn.Module, noise: float) -> None:
    """Move every number: zeros become something, biases count, index tables point elsewhere."""
    for parameter in model.parameters():
        parameter.add_(noise * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
        elif buffer.is_floating_point():
            buffer.add_(0.1 * torch.randn_like(buffer))
        elif name.endswith(("index", "idxs")):
            buffer.random_(0, int(buffer.max()) + 1)


def vit(name: str = "test_vit", **settings: object) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, **{"img_size": 32, "patch_size": 8, **SMALL, **settings})


def eva(**settings: object) -> Callable[[], nn.Module]:
    return vit("eva02_tiny_patch14_224", **settings)


def with_attention(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """test_vit or EVA with other attention modules in its blocks, for options its builder does not offer."""

    def build() -> nn.Module:
        sample = make()
        model = (vit() if isinstance(sample, Attention) else eva())()
        for block in model.blocks:
            block.attn = make()
        return model

    return build


NORMS = {"qk_norm": True, "scale_norm": True, "norm_layer": nn.LayerNorm}

FAMILIES = [
    Family("vit", vit()),
    Family("vit_qk_norm", vit(qk_norm=True, scale_attn_norm=True)),
    Family("vit_gated", with_attention(lambda: Attention(32, 2, qkv_bias=True, gated=True, **NORMS))),
    Family("vit_narrow", with_attention(lambda: Attention(32, 2, attn_head_dim=8))),
    Family("vit_registers", vit(class_token=False, reg_tokens=4, global_pool="avg")),
    Family("deit_distilled", vit("deit_tiny_distilled_patch16_224")),
    Family("vit_map_pool", vit("test_vit3", patch_size=8)),
    Family("differential", vit(attn_layer="diff")),
    Family("differential_norms", vit(attn_layer="diff", qk_norm=True, scale_attn_norm=True)),
    Family("rope", vit("vit_small_patch16_rope_224")),
    Family("rope_mixed", vit("vit_small_patch16_rope_mixed_ape_224")),
    Family("rope_separate", vit("vit_pe_core_tiny_patch16_384", qkv_fused=False, attn_pool_num_heads=2)),
    Family("rope_gated", with_attention(lambda: AttentionRope(32, 2, gated=True, qkv_fused=False, **NORMS))),
    Family("eva", eva()),
    Family("eva_fused", eva(qkv_fused=True, scale_attn_inner=True)),
    Family("eva_gated", with_attention(lambda: EvaAttention(32, 2, gated=True, qkv_bias_separate=True, **NORMS))),
    Family("dinov3", vit("vit_small_patch16_dinov3")),
    Family("beit", vit("beit_base_patch16_224")),
    Family("beit_shared", vit("beit_base_patch16_224", use_rel_pos_bias=False, use_shared_rel_pos_bias=True)),
    Family("relpos", vit("vit_relpos_small_patch16_224")),
    Family("relpos_shared", vit("vit_srelpos_small_patch16_224")),
    Family("swin", lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=32, **SWIN)),
    Family("swin_v2", lambda: timm.create_model("swinv2_tiny_window8_256", img_size=32, **SWIN)),
    Family(
        "swin_v2_cr",
        lambda: timm.create_model("swinv2_cr_tiny_224", img_size=32, **{**SWIN, "depths": (2, 2)}),
    ),
    Family("xcit", vit("xcit_nano_12_p16_224", num_heads=2, cls_attn_layers=1)),
    Family("cait", vit("cait_xxs24_224", depth_token_only=1)),
    Family("levit", lambda: timm.create_model("levit_128s", img_size=32, **LEVIT), noise=0.1),
    Family("levit_conv", lambda: timm.create_model("levit_conv_128s", img_size=32, **LEVIT), noise=0.1),
    Family(
        "crossvit",
        lambda: timm.create_model(
            "crossvit_tiny_240",
            img_size=32,
            img_scale=(1.0, 0.5),
            patch_size=(8, 8),
            embed_dim=(16, 32),
            num_heads=(2, 2),
            depth=((1, 1, 0),),
            num_classes=10,
        ),
    ),
    Family("maxvit", lambda: timm.create_model("maxvit_pico_rw_256", img_size=32, block_type=("M", "M"), **MAXXVIT)),
    Family("maxvit_tf", lambda: timm.create_model("maxvit_tiny_tf_224", img_size=32, block_type=("C", "M"), **MAXXVIT)),
    Family("coatnet", lambda: timm.create_model("coatnet_pico_rw_224", img_size=32, block_type=("C", "T"), **MAXXVIT)),
]
