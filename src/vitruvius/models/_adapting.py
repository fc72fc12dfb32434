"""Weights made to fit a model for other classes, images or patches: the head left out, tables resampled.

Tables of positions are interpolated (Dosovitskiy et al. 2021), convolutions that see the image are resized by the
pseudo-inverse of the resize (Beyer et al. 2023, arXiv:2212.08013); both by timm's own functions. XCiTs get smaller
patches by losing strides.
"""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from collections.abc import Mapping
from typing import Any

from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models.xcit import ConvPatchEmbed
from torch import Tensor, nn

from vitruvius._errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)
State = dict[str, Tensor]


def head_keys(model: nn.Module) -> list[str]:
    """The keys of a model's classifier, as timm's `get_classifier` names it; two heads of distilled models are both."""
    heads = _heads(model)
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if any(module is head for head in heads))
    return [key for key in model.state_dict() if key.startswith(prefixes)]


def _heads(model: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that classify."""
    heads: Any = None
    if hasattr(model, "get_classifier"):
        heads = model.get_classifier()  # type: ignore[operator]
    if heads is None:
        raise ConfigError(f"model.reset_head: {type(model).__name__} does not say which part is its head.")
    if isinstance(heads, tuple):
        return heads
    return (heads,)


def without_head(model: nn.Module, state: Mapping[str, Tensor]) -> State:
    """The weights without those of the head, so that the model's own new head stays."""
    keys = set(head_keys(model))
    return {key: value for key, value in state.items() if key not in keys}


def _of_other_shape(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    return [key for key in state if key in own and state[key].shape != own[key].shape]


def resampled(model: nn.Module, state: Mapping[str, Tensor], name: str) -> State:
    """The weights with all that depends on the image or patch size brought to the model's; keys stay the same."""
    own = model.state_dict()
    result = dict(state)
    wrong = _of_other_shape(state, own)
    if not wrong:
        return result
    by_family = _family_filter(model, state)
    for key in wrong:
        new = _resample(model, key, state[key], own[key], name)
        new = by_family.get(key) if new is None else new
        if new is not None and new.shape == own[key].shape:
            result[key] = new
            logger.debug("%s: %s %s is resampled to %s.", name, key, tuple(state[key].shape), tuple(new.shape))
    return result


def restride(model: nn.Module, patch: int) -> nn.Module:
    """Set the patch size of an XCiT to `patch` pixels by taking the stride from its first convolutions.

    Kernels and weights of `model` stay, so that ImageNet weights of the 16-pixel model load unchanged (Debenedetti et
    al. 2023, arXiv:2209.07399). In place, returns the model.
    """
    embed: Any = getattr(model, "patch_embed", None)
    if not isinstance(embed, ConvPatchEmbed):
        raise ConfigError(
            f"{type(model).__name__} has no patch embedding of several strided convolutions, as XCiT has. "
            "For other transformers set model.kwargs.patch_size; weights are resampled when they are loaded."
        )
    halvings = [layer for layer in embed.proj if isinstance(layer, nn.Sequential)]  # conv + norm, stride 2 each
    wanted = {2**kept: len(halvings) - kept for kept in range(len(halvings) + 1)}
    if patch not in wanted:
        raise ConfigError(f"patch {patch} cannot be reached by re-striding; possible: {sorted(wanted)}.")
    for i, layer in enumerate(halvings):
        conv = layer[0]
        assert isinstance(conv, nn.Conv2d)
        conv.stride = (2, 2)
        if i < wanted[patch]:
            conv.stride = (1, 1)
    embed.patch_size = patch
    embed.num_patches = (embed.img_size[0] // patch) * (embed.img_size[1] // patch)
    return model


def _resample(model: Any, key: str, value: Tensor, own: Tensor, name: str) -> Tensor | None:
    if key == "pos_embed" and _are_tables(value, own):
        if not model.pos_embed.requires_grad:
            return own  # a fixed table is made for its grid
        return _positions(model, value, own, name)
    if key == f"{_first_convolution(model)}.weight" and _are_patches(value, own):
        return resample_patch_embed(value, list(own.shape[2:]))
    return None


def _are_tables(value: Tensor, own: Tensor) -> bool:
    """Whether both are positions (1, N, C) of one width."""
    return value.dim() == own.dim() == 3 and value.shape[-1] == own.shape[-1]


def _are_patches(value: Tensor, own: Tensor) -> bool:
    """Whether both are filters (C, channels, height, width) but for their size."""
    return value.dim() == 4 and value.shape[:2] == own.shape[:2]


def _positions(model: Any, value: Tensor, own: Tensor, name: str) -> Tensor | None:
    """Positions (1, prefix + old patches, C) → (1, prefix + patches, C)."""
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if grid is None:
        return None
    prefix = own.shape[1] - math.prod(grid)
    old = value.shape[1] - prefix
    if old <= 0 or math.isqrt(old) ** 2 != old:
        raise CheckpointError(
            f"{name}: pos_embed has {value.shape[1]} rows; without the {prefix} of class and register tokens {old} are "
            "left, which is not a square grid. Weights of oblong images cannot be resampled."
        )
    return resample_abs_pos_embed(value, new_size=list(grid), num_prefix_tokens=prefix)


def _first_convolution(model: nn.Module) -> str:
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    first = config.get("first_conv") or ""
    if isinstance(first, str):
        return first
    return str(first[0])


def _family_filter(model: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What timm's own filter of that family makes of the weights: tables of relative positions, for one."""
    kind = next((k for k in type(model).__mro__ if k.__module__.startswith("timm.models.")), type(model))
    change = getattr(importlib.import_module(kind.__module__), "checkpoint_filter_fn", None)
    if change is None:
        return {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on the layout of its own tensors
            changed: Mapping[str, Tensor] = change(dict(state), model)
    except (RuntimeError, AttributeError, KeyError, ValueError, AssertionError):
        return {}  # it cannot; the check of keys and shapes will say what does not fit
    return changed
