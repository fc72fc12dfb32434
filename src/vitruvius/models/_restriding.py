"""Patch re-striding: smaller patches from the same weights.

The first convolutions of a stepwise patch embedding (XCiT's) lose their stride; kernels and weights stay, so
ImageNet weights of the 16-pixel model load unchanged (Debenedetti et al. 2023, arXiv:2209.07399).
"""

from __future__ import annotations

from typing import Any

from timm.models.xcit import ConvPatchEmbed
from torch import nn

from vitruvius._errors import ConfigError


def restride(model: nn.Module, patch: int) -> nn.Module:
    """Set the patch size of an XCiT by taking the stride from its first convolutions; weights stay."""
    embed: Any = getattr(model, "patch_embed", None)
    if not isinstance(embed, ConvPatchEmbed):
        raise ConfigError(
            f"{type(model).__name__} has no patch embedding of several strided convolutions, as XCiT has. "
            "For other transformers set model.kwargs.patch_size; weights are resampled when they are loaded."
        )
    halvings = [layer for layer in embed.proj if isinstance(layer, nn.Sequential)]  # conv + norm, stride 2 each
    wanted = {2**kept: len(halvings) - kept for kept in range(len(halvings) + 1)}
    if patch not in wanted:
        raise ConfigError(f"patch {patch} cannot be had by re-striding; possible: {sorted(wanted)}.")
    for i, layer in enumerate(halvings):
        conv = layer[0]
        assert isinstance(conv, nn.Conv2d)
        conv.stride = (1, 1) if i < wanted[patch] else (2, 2)
    embed.patch_size = patch
    embed.num_patches = (embed.img_size[0] // patch) * (embed.img_size[1] // patch)
    return model
