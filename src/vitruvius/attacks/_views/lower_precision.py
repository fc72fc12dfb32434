"""Faster views of a model for the search alone: bfloat16, and compiled. What they find is always judged by the model.

B images (B, C, H, W), K classes.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn


class Bfloat16Copy(nn.Module):
    """A copy of a model in bfloat16 that answers in float32; its first layer still sees the image in float32.

    An image rounded to bfloat16 has steps of 1/256 where it is bright, too coarse for a perturbation of 1/255.
    """

    def __init__(self, model: nn.Module, entrance: str | None = None) -> None:
        super().__init__()
        self.model = _lowered(copy.deepcopy(model), entrance)
        self.training, self.wide = model.training, entrance is not None

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x if self.wide else x.bfloat16())
        return logits.float()


class Autocast(nn.Module):
    """The model itself, in bfloat16 where PyTorch thinks it safe, for models that cannot live in bfloat16 alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            logits: Tensor = self.model(x)
        return logits.float()


def bfloat16_view(model: nn.Module, x: Tensor) -> nn.Module:
    """The model in bfloat16: a copy if one can answer for these images, else by autocast."""
    for entrance in dict.fromkeys((entrance_of(model, x), None)):
        try:
            view = Bfloat16Copy(model, entrance)
            view(x[:1])
        except (RuntimeError, TypeError, ValueError):  # parts of some models insist on their precision
            continue
        return view
    return Autocast(model)


def entrance_of(model: nn.Module, x: Tensor) -> str | None:
    """Name of the first layer with weights that the image meets; none for a model that is not made of layers."""
    met: list[str] = []
    layers = {name: m for name, m in model.named_modules() if name and not [*m.children()] and [*m.parameters()]}
    hooks = [m.register_forward_pre_hook(lambda *_, name=name: met.append(name)) for name, m in layers.items()]
    try:
        model(x[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return met[0] if met else None


def _lowered(model: nn.Module, entrance: str | None) -> nn.Module:
    """The model in bfloat16, but for its entrance and the buffers on the way there, which normalise the image."""
    for name, module in model.named_modules():
        if name == entrance:
            module.__class__ = widened(type(module))  # type: ignore[arg-type]
            continue
        on_the_way = entrance is not None and (not name or entrance.startswith(f"{name}."))
        for weight in module.parameters(recurse=False):
            weight.data = _halved(weight.data)
        for key, buffer in module.named_buffers(recurse=False):
            if not on_the_way:
                module._buffers[key] = _halved(buffer)
    return model


@functools.cache
def widened(layer: type[nn.Module]) -> type[nn.Module]:
    """A class of layers that answer in bfloat16. One for each class: the compiler knows it again in the next copy."""

    def forward(self: nn.Module, *inputs: Any) -> Tensor:
        out: Tensor = layer.forward(self, *inputs)
        return out.bfloat16()

    return type(f"Wide{layer.__name__}", (layer,), {"forward": forward})


def _halved(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor
