"""ResNets with norm and ReLU before each convolution, for 32×32 images: wide ones, and ResNet-18.

Zagoruyko & Komodakis 2016, arXiv:1605.07146; He et al. 2016, arXiv:1603.05027. Keys are those of the code that
RobustBench shares with TRADES. Pooling is global, so images of other sizes are one prediction each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from vitruvius.models.base import configured, models


class Block(nn.Module):
    """x + conv(relu(norm(conv(relu(norm x))))), of which a sample skips the second term with probability `drop_path`.

    Where size or width changes, the way around is a 1×1 convolution of relu(norm x).
    """

    shortcut_name: ClassVar[str] = "shortcut"

    def __init__(self, inputs: int, outputs: int, stride: int, drop_path: float) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), conv(inputs, outputs, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), conv(outputs, outputs, 3)
        if stride != 1 or inputs != outputs:
            self.add_module(self.shortcut_name, self.make_shortcut(inputs, outputs, stride))
        self.drop_path = DropPath(drop_path)

    def make_shortcut(self, inputs: int, outputs: int, stride: int) -> nn.Module:
        return nn.Sequential(conv(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, h, w)."""
        ready = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(ready))))
        shortcut = getattr(self, self.shortcut_name, None)
        around: Tensor = x if shortcut is None else shortcut(ready)
        return around + self.drop_path(out)


class WideBlock(Block):
    """The same, with the wide ResNets' key for the shortcut."""

    shortcut_name = "convShortcut"

    def make_shortcut(self, inputs: int, outputs: int, stride: int) -> nn.Module:
        return conv(inputs, outputs, 1, stride)


class Group(nn.Module):
    """Blocks of one width, with the key of the wide ResNets."""

    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.layer = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class PreActivated(nn.Module):
    """What both ResNets are: a convolution, stages of `count` blocks, a classifier; with timm's methods."""

    stages: ClassVar[tuple[str, ...]]
    classifier: ClassVar[str]
    make_block: ClassVar[type[Block]] = Block
    make_stage: ClassVar[type[nn.Module]] = nn.Sequential

    def __init__(
        self, widths: Sequence[int], count: int, *, in_chans: int, drop_rate: float, drop_path_rate: float
    ) -> None:
        super().__init__()
        self.num_features, self.drop_rate = widths[-1], drop_rate
        self.conv1 = conv(in_chans, widths[0], 3)
        for i, name in enumerate(self.stages):
            sizes = [(widths[i], 1 + (i > 0))] + [(widths[i + 1], 1)] * (count - 1)  # width that comes in, stride
            blocks = [self.make_block(inputs, widths[i + 1], stride, drop_path_rate) for inputs, stride in sizes]
            self.add_module(name, self.make_stage(*blocks))

    def forward_features(self, x: Tensor) -> Tensor:
        """The last feature map (B, C, h, w) of normalised images (B, C, H, W)."""
        for name in ("conv1", *self.stages):
            x = self.get_submodule(name)(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of a feature map; with `pre_logits` what the classifier would see."""
        x = F.dropout(x.mean((-2, -1)), self.drop_rate, self.training)
        return x if pre_logits else self.get_classifier()(x)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K) of normalised images (B, C, H, W)."""
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.get_submodule(self.classifier)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier; `global_pool` is there because timm passes it, and is not looked at."""
        self.num_classes = num_classes
        head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        if isinstance(head, nn.Linear):
            nn.init.zeros_(head.bias)
        self.add_module(self.classifier, head)


class PreActResNet(PreActivated):
    """ResNet-18: four stages of two blocks; like in RobustBench, no norm stands before the classifier."""

    stages = ("layer1", "layer2", "layer3", "layer4")
    classifier = "linear"

    def __init__(
        self, *, num_classes: int = 10, in_chans: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
    ) -> None:
        widths = (64, 64, 128, 256, 512)
        super().__init__(widths, 2, in_chans=in_chans, drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        self.reset_classifier(num_classes)


class WideResNet(PreActivated):
    """Depth 6 n + 4: n blocks in each of three stages of 16, 32 and 64 times `width` channels."""

    stages = ("block1", "block2", "block3")
    classifier = "fc"
    make_block = WideBlock
    make_stage = Group

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
        widths, count = (16, 16 * width, 32 * width, 64 * width), (depth - 4) // 6
        super().__init__(widths, count, in_chans=in_chans, drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        self.bn1 = nn.BatchNorm2d(widths[-1])
        self.reset_classifier(num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        return F.relu(self.bn1(super().forward_features(x)))


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the size up to its stride, with He's start."""
    made = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.normal_(made.weight, std=math.sqrt(2 / (kernel**2 * outputs)))
    return made


def _small(kind: type[PreActivated], **defaults: Any) -> Any:
    def make(**kwargs: Any) -> nn.Module:
        size = kwargs.pop("img_size", 32)
        return configured(kind(**{**defaults, **kwargs}), size, kwargs.get("in_chans", 3), "conv1", kind.classifier)

    return make


models.add("vitruvius/preact_resnet_18", _small(PreActResNet), "PreAct ResNet-18 for 32×32 images")
for _depth, _width in ((28, 10), (34, 10), (34, 20), (70, 16), (106, 16)):
    models.add(
        f"vitruvius/wide_resnet{_depth}_{_width}",
        _small(WideResNet, depth=_depth, width=_width),
        f"WideResNet-{_depth}-{_width} for 32×32 images",
    )
