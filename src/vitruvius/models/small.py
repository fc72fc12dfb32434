"""Models for small images, under our own prefix: the papers' 32-pixel ViTs and XCiTs, and one for the digits."""

from __future__ import annotations

from typing import Any

import timm
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit
from torch import nn

from vitruvius.models.base import configured, models, restride


def _vit(size: int, patch: int, **defaults: Any) -> Any:
    def make(**kwargs: Any) -> nn.Module:
        settings = {"img_size": size, "patch_size": patch, **defaults, **kwargs}
        model = VisionTransformer(**settings)
        return configured(model, settings["img_size"], settings.get("in_chans", 3), "patch_embed.proj", "head")

    return make


def _xcit(patch: int, name: str = "", sizes: dict[str, Any] | None = None) -> Any:
    def make(**kwargs: Any) -> nn.Module:
        size = kwargs.pop("img_size", 32)
        if name:
            model = timm.create_model(name, **kwargs)
        else:
            model = Xcit(patch_size=16, **{**(sizes or {}), **kwargs})
        restride(model, patch)
        return configured(model, size, kwargs.get("in_chans", 3), "patch_embed.proj.0.0", "head")

    return make


POOLED = {"class_token": False, "global_pool": "avg"}
TINY = {"embed_dim": 192, "depth": 12, "num_heads": 3}
DIGITS = {"embed_dim": 48, "depth": 4, "num_heads": 3, "mlp_ratio": 2.0, "num_classes": 10, **POOLED}
SMALL_XCIT = "xcit_small_12_p16_224"
MEDIUM_XCIT = {"embed_dim": 512, "depth": 12, "num_heads": 8, "tokens_norm": True}
LARGE_XCIT = {"embed_dim": 768, "depth": 12, "num_heads": 16, "tokens_norm": True}

models.add(
    "vitruvius/vit_digits", _vit(8, 2, **DIGITS), "ViT for the embedded 8×8 digits: 16 patches, 80 thousand parameters"
)
models.add("vitruvius/vit_tiny_patch2_32", _vit(32, 2, **TINY), "ViT-Tiny on 32×32 images, 256 tokens")
models.add("vitruvius/vit_tiny_patch4_32", _vit(32, 4, **TINY), "ViT-Tiny on 32×32 images, 64 tokens")
models.add("vitruvius/vit_base_patch2_32", _vit(32, 2), "ViT-Base on 32×32 images, 256 tokens")
for _patch in (1, 2, 4, 8):
    models.add(
        f"vitruvius/xcit_small_12_p{_patch}_32", _xcit(_patch, SMALL_XCIT), f"XCiT-S12, re-strided to patch {_patch}"
    )
models.add("vitruvius/xcit_medium_12_p4_32", _xcit(4, sizes=MEDIUM_XCIT), "XCiT-M12 on 32×32 images")
models.add("vitruvius/xcit_large_12_p4_32", _xcit(4, sizes=LARGE_XCIT), "XCiT-L12 on 32×32 images")
