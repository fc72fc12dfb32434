"""Filters for timm's ConvMixer: other starts for its depth-wise convolutions, shared among channels or frozen.

Zheng et al. 2024, arXiv:2401.12511. With F filters for C channels, channel c uses filter `choice[c]`; the choice
is a buffer, so that it is saved with the weights and a reloaded model is the model that was saved.

Letters: C channels, F filters, K taps a side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from timm.models.convmixer import ConvMixer
from torch import Tensor, nn

from vitruvius._errors import ConfigError, SurgeryError
from vitruvius._registry import piece_of
from vitruvius.init.filters import filters
from vitruvius.surgery.base import inner


class SharedFilters(nn.Conv2d):
    """A depth-wise convolution whose channels choose among F filters: weight (F, 1, K, K), choice (C,)."""

    choice: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.taps()[self.choice], self.bias)

    def taps(self) -> Tensor:
        """The filters as they are applied: (F, 1, K, K)."""
        return self.weight


class SoftmaxFilters(SharedFilters):
    """Shared filters whose taps are positive and sum to one: softmax of the weight."""

    def taps(self) -> Tensor:
        return self.weight.flatten(1).softmax(-1).view_as(self.weight)


def use_filters(
    model: nn.Module,
    kind: str | Mapping[str, Any] | Callable[..., Tensor],
    *,
    generator: torch.Generator | None = None,
    num_filters: int | None = None,
    trainable: bool = True,
    **settings: Any,
) -> nn.Module:
    """Start the depth-wise convolutions of the ConvMixer `model` from filters of a kind; in place, returns the model.

    `kind` is one of `vitruvius.init.filters`: random, softmax, impulse, box (taps=…), gauss (variance=…), written as
    `"box:taps=4"` or `{"use": "box", "taps": 4}`, or a function of its own; `settings` are further settings of it.
    All randomness comes from `generator`. With `num_filters` fewer than channels (default: one per channel), filters
    are shared, each channel choosing at random. `trainable=False` freezes filters and biases. Plain filters, one per
    channel, leave upstream's modules and keys as they are.
    """
    if generator is None:
        raise ConfigError("use_filters needs its randomness given: generator=torch.Generator().manual_seed(0).")
    make = filters.bind(kind, where="filters", settings=settings)
    softmax = piece_of(make) is filters["softmax"]
    for convolution in _depthwise(model):
        channels, size = convolution.out_channels, convolution.kernel_size[0]
        count = channels if num_filters is None else num_filters
        if not 1 <= count <= channels:
            raise ConfigError(f"num_filters={num_filters}, expected 1 to {channels}, the number of channels.")
        made = make(count, size, generator=generator)[:, None]
        bias = made.new_empty(channels).uniform_(-1, 1, generator=generator) / size
        choice = torch.arange(channels, device=generator.device)  # of filters: each channel's own, or one at random
        if count < channels:
            choice = torch.randint(count, (channels,), generator=generator, device=generator.device)
        _set_plain(convolution, made)
        if convolution.bias is not None:
            convolution.bias.data.copy_(bias)
        if softmax or count < channels:
            convolution.__class__ = SoftmaxFilters if softmax else SharedFilters
            convolution.register_buffer("choice", choice.to(convolution.weight.device))
        convolution.requires_grad_(trainable)
    return model


def plain_filters(model: nn.Module) -> nn.Module:
    """Write shared filters out, one a channel, as upstream's convolutions; in place, the function stays the same."""
    for convolution in _depthwise(model):
        if isinstance(convolution, SharedFilters):
            _set_plain(convolution, convolution.taps().detach()[convolution.choice])
    return model


def _depthwise(model: nn.Module) -> list[nn.Conv2d]:
    root = inner(model)
    if not isinstance(root, ConvMixer):
        raise SurgeryError(f"filters are for timm's ConvMixer; this is a {type(root).__name__}.")
    return [m for m in root.blocks.modules() if isinstance(m, nn.Conv2d) and m.groups == m.in_channels > 1]


def _set_plain(convolution: nn.Conv2d, weight: Tensor) -> None:
    """Upstream's class, with another weight on the device and in the precision of the old one."""
    if isinstance(convolution, SharedFilters):
        del convolution.choice
    convolution.__class__ = nn.Conv2d
    old = convolution.weight
    convolution.weight = nn.Parameter(weight.to(old), requires_grad=old.requires_grad)
