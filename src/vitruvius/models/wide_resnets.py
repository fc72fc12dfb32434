"""Wide ResNets for 32×32 images, as adversarial training uses them (Zagoruyko & Komodakis 2016, arXiv:1605.07146).

Depth 6 n + 4, widths 16, 16 w, 32 w, 64 w, norm and ReLU before each convolution. Keys are those of the code that
RobustBench shares with TRADES. Pooling is global, so images of other sizes are one prediction each.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from vitruvius.models._registry import models
from vitruvius.models.small import configured


class Block(nn.Module):
    """x + conv(relu(norm(conv(relu(norm x))))); where the width changes, the way around sees relu(norm x) too.

    `inputs` and `outputs` are channels; `stride` of the first convolution, 1 or 2; `drop_path` the probability that a
    sample skips the block in training.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, drop_path: float) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), conv(inputs, outputs, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), conv(outputs, outputs, 3)
        self.convShortcut = None
        if inputs != outputs:
            self.convShortcut = conv(inputs, outputs, 1, stride)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (B, inputs, H, W) goes in, (B, outputs, h, w) comes out."""
        ready = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(ready))))
        if self.convShortcut is not None:
            x = self.convShortcut(ready)
        around: Tensor = x + self.drop_path(out)
        return around


class Group(nn.Module):
    """Blocks of one width.

    `blocks` in order, of which the first may change size and width.
    """

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.layer = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (B, C, H, W) through all blocks."""
        out: Tensor = self.layer(x)
        return out


class WideResNet(nn.Module):
    """A wide ResNet with timm's methods.

    depth: of the network, 6 n + 4: n blocks in each of three groups.
    width: factor of the channels, 16 in the first convolution.
    num_classes: of the classifier; 0 leaves it out.
    in_chans: channels of the images.
    drop_rate: dropout before the classifier.
    drop_path_rate: probability that a sample skips a block, the same in all blocks.
    """

    def __init__(
        self,
        *,
        depth: int = 28,
        width: int = 10,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        count, widths = (depth - 4) // 6, [16, 16 * width, 32 * width, 64 * width]
        self.num_classes, self.num_features, self.drop_rate = num_classes, widths[3], drop_rate
        self.conv1 = conv(in_chans, widths[0], 3)
        for i in range(3):
            sizes = [(widths[i], 1 + (i > 0))] + [(widths[i + 1], 1)] * (count - 1)  # width that comes in, stride
            blocks = [Block(inputs, widths[i + 1], stride, drop_path_rate) for inputs, stride in sizes]
            setattr(self, f"block{i + 1}", Group(blocks))
        self.bn1 = nn.BatchNorm2d(widths[3])
        self.fc = head(widths[3], num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        """The last feature map (B, C, h, w) of normalised images `x` (B, 3, H, W)."""
        for layer in (self.conv1, self.block1, self.block2, self.block3, self.bn1):
            x = layer(x)  # type: ignore[operator]
        return F.relu(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of a feature map `x`; with `pre_logits` (default false) what the classifier would see."""
        x = F.dropout(x.mean((-2, -1)), self.drop_rate, self.training)
        if pre_logits:
            return x
        logits: Tensor = self.fc(x)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K) of normalised images `x` (B, C, H, W)."""
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier for `num_classes`; `global_pool` is there because timm passes it, and is not looked at."""
        self.num_classes, self.fc = num_classes, head(self.num_features, num_classes)


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the size up to its stride, with He's start.

    `inputs` and `outputs` are channels, `kernel` the side of the filter, `stride` 1 by default.
    """
    made = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.normal_(made.weight, std=math.sqrt(2 / (kernel**2 * outputs)))
    return made


def head(features: int, num_classes: int) -> nn.Module:
    """A linear classifier with zero bias, or nothing for no classes.

    `features` come in; `num_classes` logits go out.
    """
    if not num_classes:
        return nn.Identity()
    made = nn.Linear(features, num_classes)
    nn.init.zeros_(made.bias)
    return made


def _wide(depth: int, width: int) -> Any:
    def make(**kwargs: Any) -> nn.Module:
        size = kwargs.pop("img_size", 32)
        model = WideResNet(**{"depth": depth, "width": width, **kwargs})
        return configured(model, size, kwargs.get("in_chans", 3), "conv1", "fc")

    return make


for _depth, _width in ((28, 10), (34, 10), (34, 20), (70, 16), (106, 16)):
    models.add(
        f"vitruvius/wide_resnet{_depth}_{_width}",
        _wide(_depth, _width),
        f"WideResNet-{_depth}-{_width} for 32×32 images",
    )
