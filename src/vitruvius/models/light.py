"""Models of the light recipe that timm does not name, built by timm (Debenedetti et al. 2023, arXiv:2209.07399).

XCiTs of 12 blocks, CaiT-S12, PoolFormer-M12, ResNets with GELU (one of them with eight norms at every place), and
ResNet-50 for 32×32 images: a 3×3 first convolution without stride and no pooling after it. ConvNeXt-T, XCiT-N12 and
XCiT-S12 are timm's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
from timm.layers import GroupNorm1
from timm.models.metaformer import MetaFormer
from timm.models.resnet import Bottleneck, ResNet
from torch import nn

from vitruvius.models.base import configured, models
from vitruvius.models.resnet_gelu_adv import resnet50_gelu_adv
from vitruvius.models.small import LARGE_XCIT, MEDIUM_XCIT

Make = Callable[..., nn.Module]
PHOTOGRAPH = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
POOLFORMER: dict[str, Any] = {
    "depths": (2, 2, 6, 2),
    "dims": (96, 192, 384, 768),
    "downsample_norm": None,
    "mlp_act": nn.GELU,
    "mlp_bias": True,
    "norm_layers": GroupNorm1,
    "layer_scale_init_values": 1e-5,
    "res_scale_init_values": None,
    "use_mlp_head": False,
}


def _resnet50_32(**kwargs: Any) -> nn.Module:
    model: Any = timm.create_model("resnet50", **kwargs)
    old = model.conv1
    model.conv1 = nn.Conv2d(old.in_channels, old.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as timm begins the others
    model.maxpool = nn.Identity()
    assert isinstance(model, nn.Module)
    return model


def _add(
    name: str,
    doc: str,
    make: Make,
    ends: tuple[str, str],
    size: int = 224,
    colours: dict[str, Any] = PHOTOGRAPH,
    **settings: Any,
) -> None:
    """Register a model: how it is made, its first and last layer, and the preprocessing that is not the usual."""
    sized = "resnet" not in name and "resnext" not in name and "poolformer" not in name  # the others see any size

    def build(**kwargs: Any) -> nn.Module:
        wanted = kwargs.get("img_size", size)
        channels = kwargs.get("in_chans", 3)
        if not sized:
            kwargs.pop("img_size", None)
        chosen = {**colours, **settings} if channels == 3 and size > 32 else dict(settings)
        return configured(make(**kwargs), wanted, channels, *ends, **chosen)

    models.add(f"vitruvius/{name}", build, doc)


_XCIT, _CAIT = ("patch_embed.proj.0.0", "head"), ("patch_embed.proj", "head")
_RESNET = ("conv1", "fc")
_medium = partial(timm.create_model, "xcit_medium_24_p16_224", **{**MEDIUM_XCIT, "eta": 1.0})
_large = partial(timm.create_model, "xcit_large_24_p16_224", **{**LARGE_XCIT, "eta": 1.0})
_cait = partial(timm.create_model, "cait_s24_224", depth=12, init_values=1.0)
_resnext = partial(ResNet, Bottleneck, (3, 4, 36, 3), cardinality=32, base_width=8, act_layer="silu")

_add("xcit_medium_12_p16_224", "XCiT-M12", _medium, _XCIT)
_add("xcit_large_12_p16_224", "XCiT-L12", _large, _XCIT)
_add("xcit_large_12_h8_p16_224", "XCiT-L12 with 8 heads", partial(_large, num_heads=8), _XCIT)
_add("cait_s12_224", "CaiT-S12", _cait, _CAIT)
_add("poolformer_m12", "PoolFormer-M12", partial(MetaFormer, **POOLFORMER), ("stem.conv", "head.fc"), crop_pct=0.95)
for _depth, _seen in (
    (18, {"crop_pct": 0.875, "interpolation": "bilinear"}),
    (50, {"crop_pct": 0.95}),
    (152, {"crop_pct": 0.95}),
):
    _make = partial(timm.create_model, f"resnet{_depth}", act_layer="gelu")
    _add(f"resnet{_depth}_gelu", f"ResNet-{_depth} with GELU everywhere", _make, _RESNET, **_seen)
_add(
    "resnet50_gelu_adv",
    "ResNet-50 with GELU and eight ghost batch norms (Bai et al. 2021)",
    resnet50_gelu_adv,
    _RESNET,
    colours={},
    crop_pct=0.875,
    interpolation="bilinear",
)
_add("resnet50_32", "ResNet-50 for 32×32 images: 3×3 first convolution, no pooling after it", _resnet50_32, _RESNET, 32)
_add("resnext152_32x8d", "ResNeXt of 3-4-36-3 blocks, 32×8d, SiLU", _resnext, _RESNET, 380, crop_pct=0.95)
