"""A model that takes pixels in [0, 1]: normalisation lives inside, so attacks and ε live in pixel space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from timm.data import resolve_data_config
from torch import Tensor, nn

from vitruvius._errors import ConfigError


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
        channels = _in_chans(model)
        self.statistics = (
            _statistic("mean", mean, config["mean"], channels),
            _statistic("std", std, config["std"], channels),
        )
        self.register_buffer("mean", torch.tensor(self.statistics[0]).view(-1, 1, 1), persistent=False)  # (C, 1, 1)
        self.register_buffer("std", torch.tensor(self.statistics[1]).view(-1, 1, 1), persistent=False)  # (C, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K), or whatever timm's model returns, for pixels `x` (B, C, H, W) in [0, 1]."""
        out: Tensor = self.model((x - self.mean) / self.std)
        return out

    def train(self, mode: bool = True) -> PixelModel:
        """Training mode, or eval mode for a `mode` of False; frozen parts that keep statistics stay in eval mode."""
        super().train(mode)
        for name in self.still:
            self.get_submodule(name).eval()
        return self

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


def _in_chans(model: nn.Module) -> int:
    """Channels of the first convolution."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return module.in_channels
    return int(getattr(model, "in_chans", 3))


def _statistic(name: str, given: Sequence[float] | None, resolved: Sequence[float], channels: int) -> tuple[float, ...]:
    """What was given, else what timm resolves; its mean over the colours where the model takes other channels."""
    if given is None:
        return _resolved_statistic(resolved, channels)
    values = tuple(float(value) for value in given)
    if len(values) != channels:
        raise ConfigError(f"model.{name} has {len(values)} values, the model takes {channels} channels.")
    if name == "std" and min(values) <= 0:
        raise ConfigError(f"model.std = {list(values)}, expected positive numbers.")
    return values


def _resolved_statistic(resolved: Sequence[float], channels: int) -> tuple[float, ...]:
    values = [float(value) for value in resolved]
    if len(values) != channels:
        values = [sum(values) / len(values)] * channels
    return tuple(values)
