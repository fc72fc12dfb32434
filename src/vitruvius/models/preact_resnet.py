"""ResNet-18 with norm and ReLU before each convolution, for 32×32 images (He et al. 2016, arXiv:1603.05027).

Keys are RobustBench's; like there, no norm stands before the head. Pooling is global.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from vitruvius.models._registry import models
from vitruvius.models.small import configured
from vitruvius.models.wide_resnets import conv, head


class Block(nn.Module):
    """Two 3×3 convolutions; where size or width changes, the way around is a 1×1 convolution of relu(norm x).

    `inputs` and `outputs` are channels; `stride` of the first convolution, 1 or 2; `drop_path` the probability that a
    sample skips the block in training.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, drop_path: float) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), conv(inputs, outputs, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), conv(outputs, outputs, 3)
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (B, inputs, H, W)."""
        ready = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(ready))))
        if self.shortcut is not None:
            x = self.shortcut(ready)
        around: Tensor = x + self.drop_path(out)
        return around


class PreActResNet(nn.Module):
    """Four stages of two blocks, with timm's methods.

    num_classes: of the classifier; 0 leaves it out.
    in_chans: channels of the images.
    drop_rate: dropout before the classifier.
    drop_path_rate: probability that a sample skips a block, the same in all blocks.
    """

    def __init__(
        self, *, num_classes: int = 10, in_chans: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
    ) -> None:
        super().__init__()
        self.num_classes, self.num_features, self.drop_rate = num_classes, 512, drop_rate
        self.conv1 = conv(in_chans, 64, 3)
        widths = (64, 64, 128, 256, 512)
        for i in range(4):
            first = Block(widths[i], widths[i + 1], 1 + (i > 0), drop_path_rate)
            setattr(self, f"layer{i + 1}", nn.Sequential(first, Block(widths[i + 1], widths[i + 1], 1, drop_path_rate)))
        self.linear = head(512, num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        """The last feature map (B, 512, h, w) of normalised images `x` (B, C, H, W)."""
        for layer in (self.conv1, self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)  # type: ignore[operator]
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of a feature map `x`; with `pre_logits` (default false) what the classifier would see."""
        x = F.dropout(x.mean((-2, -1)), self.drop_rate, self.training)
        if pre_logits:
            return x
        logits: Tensor = self.linear(x)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K) of normalised images `x` (B, C, H, W)."""
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.linear

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier for `num_classes`; `global_pool` is there because timm passes it, and is not looked at."""
        self.num_classes, self.linear = num_classes, head(self.num_features, num_classes)


def _preact(**kwargs: Any) -> nn.Module:
    size = kwargs.pop("img_size", 32)
    return configured(PreActResNet(**kwargs), size, kwargs.get("in_chans", 3), "conv1", "linear")


models.add("vitruvius/preact_resnet_18", _preact, "PreAct ResNet-18 for 32×32 images")
