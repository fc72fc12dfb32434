"""ConvMixers for 32×32 images with chosen filters: trainable, or frozen as random, impulse or box filters.

Zheng et al. 2024, arXiv:2401.12511. Names say width, depth and kernel; patches are 2×2. The filter choice is a
buffer, so a reloaded model is the model that was saved.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.convmixer import ConvMixer
from torch import nn

from vitruvius.models.base import configured, models
from vitruvius.surgery.convmixer import use_filters


def _convmixer(**defaults: Any) -> Any:
    def make(**kwargs: Any) -> nn.Module:
        settings = {"patch_size": 2, "img_size": 32, "filters": "random", "trainable": True, **defaults, **kwargs}
        size, kind = settings.pop("img_size"), settings.pop("filters")
        shared = {key: settings.pop(key) for key in ("trainable", "num_filters", "taps", "variance") if key in settings}
        model = ConvMixer(**settings)
        seed = int(torch.randint(2**31, (), device="cpu"))  # from the dice that create_model seeds
        use_filters(model, kind, generator=torch.Generator().manual_seed(seed), **shared)
        return configured(model, size, settings.get("in_chans", 3), "stem.0", "head")

    return make


models.add(
    "vitruvius/convmixer",
    _convmixer(dim=256, depth=8, kernel_size=3),
    "ConvMixer of any size: dim, depth, kernel_size, patch_size, filters, num_filters, taps, variance, trainable",
)
for _dim, _depth, _kernel in ((256, 8, 3), (512, 6, 3), (512, 6, 5)):
    _sizes = {"dim": _dim, "depth": _depth, "kernel_size": _kernel}
    _kinds: dict[str, dict[str, Any]] = {
        "train": {"filters": "random"},
        "random": {"filters": "random", "trainable": False},
        "impulse": {"filters": "impulse", "trainable": False},
        "box": {"filters": "box", "taps": _kernel**2, "trainable": False},
    }
    for _name, _filters in _kinds.items():
        models.add(
            f"vitruvius/convmixer_{_dim}_{_depth}_{_kernel}_{_name}",
            _convmixer(**_sizes, **_filters),
            f"ConvMixer {_dim}/{_depth}, {_kernel}×{_kernel} filters: {_name}",
        )
