"""A model in bfloat16, for the search alone, and whether that pays; what it finds is always verified on the model.

A search in bfloat16 is followed by a shorter one in float32. It pays for large models on a GPU (small ones wait for the
host, whatever the precision) and for most on a CPU with instructions for bfloat16. B images (B, C, H, W), K classes.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitruvius.attacks._batching import SMALL_BATCH
from vitruvius.attacks._models import loss_and_grad
from vitruvius.attacks.losses import CE

logger = logging.getLogger(__name__)

PAYS_FROM = 2.0  # times that a gradient in bfloat16 must be faster
PAYS_ON_CPU = 1.5
WARM_UP = 17  # gradients before the clock: after sixteen a pass is recorded as a CUDA graph
PASSES = 5
Clock = Callable[[], float]


class Bfloat16Copy(nn.Module):
    """A copy of a model in bfloat16 that answers in float32; its first layer still sees the image in float32.

    An image rounded to bfloat16 has steps of 1/256 where it is bright, too coarse for a perturbation of 1/255.
    `first_layer` is the name of that layer; None: there is none, and the image is rounded.
    """

    def __init__(self, model: nn.Module, first_layer: str | None = None) -> None:
        super().__init__()
        self.model = _lowered(copy.deepcopy(model), first_layer)
        self.training = model.training
        self.rounds_images = first_layer is None

    def forward(self, x: Tensor) -> Tensor:
        if self.rounds_images:
            x = x.bfloat16()
        logits: Tensor = self.model(x)
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
    if x.device.type == "cpu":
        from vitruvius.surgery.rewiring import attend_through_sockets

        model = attend_through_sockets(copy.deepcopy(model))
    for first_layer in dict.fromkeys((first_layer_of(model, x), None)):
        try:
            view = Bfloat16Copy(model, first_layer)
            view(x[:1])
        except (RuntimeError, TypeError, ValueError):  # parts of some models insist on their precision
            continue
        return view
    return Autocast(model)


def may_pay(x: Tensor) -> bool:
    """Whether the device of the images `x` computes in bfloat16 at all, and does not emulate it."""
    from vitruvius.attention.softmax import multiplies_bfloat16

    return x.device.type != "cpu" or multiplies_bfloat16()


def first_layer_of(model: nn.Module, x: Tensor) -> str | None:
    """Name of the first layer with weights that the image meets; none for a model that is not made of layers."""
    met: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        if name and _is_layer(module):
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: met.append(name)))
    try:
        model(x[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return next(iter(met), None)


def _is_layer(module: nn.Module) -> bool:
    """Has weights and no parts."""
    has_parts = next(module.children(), None) is not None
    has_weights = next(module.parameters(), None) is not None
    return has_weights and not has_parts


def _lowered(model: nn.Module, first_layer: str | None) -> nn.Module:
    """The model in bfloat16, except for its first layer and the buffers before it, which normalise the image."""
    for name, module in model.named_modules():
        if name == first_layer:
            module.__class__ = widened(type(module))  # type: ignore[arg-type]
            continue
        for weight in module.parameters(recurse=False):
            weight.data = _lowered_tensor(weight.data)
        if first_layer is None or not _contains(name, first_layer):
            for key, buffer in module.named_buffers(recurse=False):
                module._buffers[key] = _lowered_tensor(buffer)
    return model


def _contains(outer: str, inner: str) -> bool:
    """Whether the module of one name holds that of the other; the model itself, named "", holds all."""
    return not outer or inner.startswith(f"{outer}.")


@functools.cache
def widened(layer: type[nn.Module]) -> type[nn.Module]:
    """A class of layers that answer in bfloat16. One for each class: the compiler knows it again in the next copy."""

    def forward(self: nn.Module, *inputs: Any) -> Tensor:
        out: Tensor = layer.forward(self, *inputs)
        return out.bfloat16()

    return type(f"Wide{layer.__name__}", (layer,), {"forward": forward})


def _lowered_tensor(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


_known: WeakKeyDictionary[nn.Module, dict[torch.Size, bool]] = WeakKeyDictionary()  # so that a model is measured once


def bfloat16_pays(model: nn.Module, exact: nn.Module, view: nn.Module, x: Tensor, y: Tensor) -> bool:
    """Whether gradients of `view` are so much faster than those of `exact` that a search on it pays.

    model: what the two are views of; it is measured once for every size of images. exact, view: in float32 and in
    bfloat16, as they will be searched. x (B, C, H, W) and y (B,): images and labels of a batch; nothing but the time of
    their gradients is used.
    """
    answers = _known.setdefault(model, {})
    if x.shape[1:] not in answers:
        answers[x.shape[1:]] = _measure(exact, view, x, y)
    return answers[x.shape[1:]]


def _measure(exact: nn.Module, view: nn.Module, x: Tensor, y: Tensor) -> bool:
    on_cpu = x.device.type == "cpu"
    few = max(SMALL_BATCH // x[0].numel(), 1) if on_cpu else len(x)  # there a larger batch gains as much
    seconds = [pass_seconds(one, x[:few], y[:few]) for one in (exact, view)]
    pays = seconds[0] >= (PAYS_ON_CPU if on_cpu else PAYS_FROM) * seconds[1]
    logger.debug(
        "precision=auto: %s; a gradient of %d images takes %.2f ms in float32, %.2f in bfloat16",
        "fast" if pays else "exact", min(few, len(x)), 1e3 * seconds[0], 1e3 * seconds[1],
    )  # fmt: skip
    return pays


def pass_seconds(model: nn.Module, x: Tensor, y: Tensor, clock: Clock = time.perf_counter) -> float:
    """Seconds of a gradient, the fastest of a few after warming up; on a CPU, where it is slow, of fewer."""
    warm_up, passes = (1, 3) if x.device.type == "cpu" else (WARM_UP, PASSES)
    fastest = torch.inf
    for number in range(warm_up + passes):
        _wait(x)
        begun = clock()
        loss_and_grad(model, x, lambda logits: CE(logits, y))
        _wait(x)
        if number >= warm_up:
            fastest = min(fastest, clock() - begun)
    return fastest


def _wait(x: Tensor) -> None:
    if x.device.type != "cpu":
        torch.get_device_module(x.device).synchronize(x.device)
