"""ResNet-50 with GELU and eight ghost batch norms at every place, for the weights of Bai et al. 2021, arXiv:2111.05464.

A ghost batch norm (Hoffer et al. 2017, arXiv:1705.08741) normalises a part of the batch by its own statistics. Here
image b belongs to part b mod 2, and what is learned, weight and bias of each channel, is a depth-wise 1×1 convolution
behind the norm. Of the eight norms the light recipe's model uses the first, in training too; the other seven are there
for the keys of the published file. B batch, C channels, H height, W width
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._errors import ConfigError

PARTS = 2  # of a training batch
NORMS = 8


class GhostNorm(nn.Module):
    """Training normalises each part of a batch by itself, evaluation all images by the statistics of the first part."""

    def __init__(
        self, num_features: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.proxy_bn = nn.BatchNorm2d(PARTS * num_features, affine=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (B, C, H, W) normalised; in training B must be a multiple of the parts."""
        if not self.training:
            statistics = (self.proxy_bn.running_mean, self.proxy_bn.running_var)  # (2 · C,) each
            mean, variance = (both[: self.num_features] for both in statistics if both is not None)
            return F.batch_norm(x, mean, variance, eps=self.proxy_bn.eps)
        if len(x) % PARTS:
            raise ConfigError(
                f"a ghost batch norm takes batches of {len(x)} images apart into {PARTS}; "
                f"choose a batch_size that {PARTS} divides."
            )
        parts = x.unflatten(0, (-1, PARTS)).flatten(1, 2)  # (B / 2, 2 · C, H, W)
        normalised: Tensor = self.proxy_bn(parts)
        return normalised.unflatten(1, (PARTS, -1)).flatten(0, 1)


class EightNorms(nn.Module):
    """Eight ghost batch norms, of which the first is used, and one weight and bias for each channel."""

    bn0: GhostNorm

    def __init__(
        self, num_features: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        for number in range(NORMS):
            self.add_module(f"bn{number}", GhostNorm(num_features, **place))
        convolution = nn.Conv2d(num_features, num_features, 1, groups=num_features, **place)
        self.aff = nn.Sequential(OrderedDict(bnconv=convolution))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights one, biases zero."""
        for name, parameter in self.aff.named_parameters():
            nn.init.constant_(parameter, float(name.endswith("weight")))

    def forward(self, x: Tensor) -> Tensor:
        return self.aff(self.bn0(x))


def resnet50_gelu_adv(**kwargs: Any) -> nn.Module:
    """timm's ResNet-50 with these norms; every residual branch begins at its full strength, as in the original."""
    made: nn.Module = timm.create_model("resnet50", act_layer="gelu", norm_layer=EightNorms, **kwargs)
    for module in made.modules():
        if isinstance(module, EightNorms):
            module.reset_parameters()  # timm has just begun them as it begins any convolution
    return made
