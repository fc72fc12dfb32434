"""What models are made of and known by: pixels in [0, 1] with the normalisation inside, and our own names.

Attacks and ε live in pixel space, because a `PixelModel` normalises itself. Names of ours begin with `vitruvius/`, so
that none hides one of timm's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from timm.data import resolve_data_config
from timm.layers import to_2tuple
from timm.models.xcit import ConvPatchEmbed
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius._linear import fast_linear
from vitruvius._notebook import module_html
from vitruvius._registry import Registry

PREFIX = "vitruvius/"


class Models(Registry[Callable[..., nn.Module]]):
    """A registry whose pieces are functions of timm-style keyword arguments."""

    def add(self, name: str, make: Callable[..., nn.Module], doc: str) -> None:
        if not name.startswith(PREFIX):
            raise ConfigError(f"{name!r}: models of this package are named {PREFIX}…")

        def build(**timm_kwargs: Any) -> nn.Module:
            return make(**timm_kwargs)

        build.__qualname__, build.__doc__ = name, doc
        self.register(name)(build)


models = Models("model", homes=["vitruvius.models"])


class PixelModel(nn.Module):
    """Normalise the channels by `mean` and `std` (default: what timm resolves for `model`), then the timm model.

    `mean` and `std` are buffers that follow the model from device to device but stay out of its
    state dict: checkpoints hold the timm model's own keys, the run's config holds the statistics.
    """

    looks_through: ClassVar[bool] = True  # surgery names sites as in the model inside
    mean: Tensor
    std: Tensor

    def __init__(
        self, model: nn.Module, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.still: tuple[str, ...] = ()  # modules that stay in eval mode: batch norms of what is frozen
        config = resolve_data_config({}, model=model)
        convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
        channels = next((first.in_channels for first in convolutions), int(getattr(model, "in_chans", 3)))
        self.statistics = (
            _statistic("mean", mean, config["mean"], channels),
            _statistic("std", std, config["std"], channels),
        )
        self.register_buffer("mean", torch.tensor(self.statistics[0]).view(-1, 1, 1), persistent=False)  # (C, 1, 1)
        self.register_buffer("std", torch.tensor(self.statistics[1]).view(-1, 1, 1), persistent=False)  # (C, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K), or whatever timm's model returns, for pixels `x` (B, C, H, W) in [0, 1]."""
        with fast_linear(self, x):
            out: Tensor = self.model((x - self.mean) / self.std)
        return out

    def train(self, mode: bool = True) -> PixelModel:
        """Training mode, or eval mode for a `mode` of False; frozen parts that keep statistics stay in eval mode."""
        super().train(mode)
        for name in self.still:
            self.get_submodule(name).eval()
        return self

    def _repr_html_(self) -> str:
        return module_html(self)

    @property
    def data_config(self) -> dict[str, Any]:
        """timm's resolved preprocessing of this model: input_size, interpolation, crop_pct."""
        config = resolve_data_config({}, model=self.model)
        built = getattr(getattr(self.model, "patch_embed", None), "img_size", None)  # may differ from the default
        config["input_size"] = (len(self.statistics[0]), *(built or config["input_size"][1:]))
        config["mean"], config["std"] = self.statistics
        return dict(config)

    @property
    def num_classes(self) -> int:
        return int(getattr(self.model, "num_classes", 0))


def _statistic(name: str, given: Sequence[float] | None, resolved: Sequence[float], channels: int) -> tuple[float, ...]:
    """What was given, else what timm resolves; its mean over the colours where the model takes other channels."""
    if given is None:
        values = tuple(float(value) for value in resolved)
        return values if len(values) == channels else (sum(values) / len(values),) * channels
    values = tuple(float(value) for value in given)
    if len(values) != channels:
        raise ConfigError(f"model.{name} has {len(values)} values, the model takes {channels} channels.")
    if name == "std" and min(values) <= 0:
        raise ConfigError(f"model.std = {list(values)}, expected positive numbers.")
    return values


def configured(
    model: Any, size: int | tuple[int, int], channels: int, first: str, last: str, **settings: Any
) -> nn.Module:
    """Give a timm model the preprocessing that timm's resolver reads: of images of this size in pixels.

    `first` and `last` are the names of the first convolution and of the classifier; `settings` whatever else timm's
    config holds.
    """
    height, width = to_2tuple(size)
    model.pretrained_cfg = {
        "input_size": (channels, height, width),
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "mean": (0.5,) * channels,
        "std": (0.5,) * channels,
        "num_classes": model.num_classes,
        "first_conv": first,
        "classifier": last,
        **settings,
    }
    embed = getattr(model, "patch_embed", None)
    if embed is not None:
        rows, columns = to_2tuple(embed.patch_size)
        embed.img_size, embed.num_patches = (height, width), (height // rows) * (width // columns)
    return model


def restride(model: nn.Module, patch: int) -> nn.Module:
    """Set the patch size of an XCiT in pixels by taking the stride from its first convolutions; in place.

    Kernels and weights stay, so that ImageNet weights of the 16-pixel model load unchanged (Debenedetti et al. 2023,
    arXiv:2209.07399).
    """
    embed: Any = getattr(model, "patch_embed", None)
    if not isinstance(embed, ConvPatchEmbed):
        raise ConfigError(
            f"{type(model).__name__} has no patch embedding of several strided convolutions, as XCiT has. "
            "For other transformers set model.kwargs.patch_size; weights are resampled when they are loaded."
        )
    halvings = [layer for layer in embed.proj if isinstance(layer, nn.Sequential)]  # conv + norm, stride 2 each
    possible = [2**strides for strides in range(len(halvings) + 1)]
    if patch not in possible:
        raise ConfigError(f"patch {patch} cannot be reached by re-striding; possible: {possible}.")
    for i, layer in enumerate(reversed(halvings)):  # the last convolutions keep their stride
        conv = layer[0]
        assert isinstance(conv, nn.Conv2d)
        conv.stride = (2, 2) if i < possible.index(patch) else (1, 1)
    embed.patch_size = patch
    embed.num_patches = (embed.img_size[0] // patch) * (embed.img_size[1] // patch)
    return model
