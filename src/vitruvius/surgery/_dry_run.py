"""Learn the sizes at every attention site by one run of a ghost: the model copied without its numbers.

The ghost lives on the meta device: its tensors have shapes and no storage, so the run costs nothing,
and the model itself (mode, buffers, caches, hooks, random state) is never touched.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._errors import SurgeryError
from vitruvius.heads import Heads
from vitruvius.surgery._socket import Socket, socket_of

Size = tuple[int, int, int]  # channels, rows, columns of an image


class Probe(nn.Module):
    """A core that remembers the shapes it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Heads | None = None
        self.knows_input = False

    def forward(self, heads: Heads, x: Tensor | None = None, states: Any = None) -> Tensor:
        self.seen, self.knows_input = heads, x is not None
        return heads.v.new_empty(*heads.q.shape[:-1], heads.v.shape[-1])

    def after(self, tokens: Tensor, heads: Heads, x: Tensor, states: Any) -> tuple[Tensor, Any]:
        return tokens, {}


def dry_run(model: nn.Module, input_size: Size | None) -> tuple[Size, dict[str, tuple[Socket, Heads]]]:
    """The image size used, and what every site that ran was given, in the order of the model's modules."""
    size = input_size or guess_input_size(model)
    ghost = ghost_of(model).eval()
    probes = {name: _plug_probe(module) for name, module in ghost.named_modules() if socket_of(module) is not None}
    if probes:
        _run(ghost, size, model)
    seen: dict[str, tuple[Socket, Heads]] = {}
    for name, (socket, probe) in probes.items():
        if probe.seen is not None:
            seen[name] = socket, probe.seen
    return size, seen


def ghost_of(model: nn.Module) -> Any:
    """A deep copy on the meta device, without hooks."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _tensors(vars(module)):
            memo[id(tensor)] = _ghost_tensor(tensor)
        for name, value in vars(module).items():
            if "_hooks" in name and isinstance(value, dict):
                memo[id(value)] = type(value)()
    return copy.deepcopy(model, memo)


def guess_input_size(model: nn.Module) -> Size:
    """Channels, rows and columns as the model was built, else as timm's configuration says."""
    model = _timm_model(model)
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    configured = config.get("input_size") or (3, 224, 224)
    channels = getattr(model, "in_chans", None) or _first_channels(model) or configured[0]
    rows, columns = _built_size(model) or configured[1:]
    return channels, rows, columns


def _timm_model(model: nn.Module) -> nn.Module:
    """The model itself, or the one that timm's feature extractor holds (`features_only=True`)."""
    inside = getattr(model, "model", None)
    if hasattr(model, "feature_info") and isinstance(inside, nn.Module):
        return inside
    return model


def _first_channels(model: nn.Module) -> int | None:
    """The channels of the first convolution, where there is one."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return module.in_channels
    return None


def _built_size(model: Any) -> tuple[int, int] | None:
    """The image size a model was built for, where it remembers one."""
    for holder in (getattr(model, "patch_embed", None), model):
        size = getattr(holder, "img_size", None)
        if isinstance(size, tuple) and len(size) == 2:
            return size
    stride = getattr(getattr(model, "stem", None), "stride", None)
    if not isinstance(stride, int):
        return None
    for module in model.modules():  # LeViT: a stem of known stride, then attention of fixed resolution
        if socket_of(module) is not None and hasattr(module, "resolution"):
            rows, columns = module.resolution
            return rows * stride, columns * stride
    return None


def _plug_probe(module: Any) -> tuple[Socket, Probe]:
    socket = socket_of(module)
    assert socket is not None
    module.__class__ = socket
    module.core = probe = Probe()
    return module, probe


def _run(ghost: nn.Module, size: Size, model: nn.Module) -> None:
    weight = next(p for p in ghost.parameters() if p.is_floating_point())
    try:
        with torch.no_grad():
            ghost(weight.new_zeros(1, *size))
    except Exception as error:
        raise SurgeryError(
            f"a dry run of {type(model).__name__} on one image of size {size} failed: {error}. "
            "If the model wants another size, say so: input_size=(channels, rows, columns)."
        ) from error


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in an object's dictionary, and in the dictionaries therein (parameters, buffers, caches)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _ghost_tensor(tensor: Tensor) -> Tensor:
    ghost = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(ghost, requires_grad=False)
    return ghost
