"""Weights from files into models: strict, or every missing key explained.

Unexpected keys are an error. Missing keys are allowed only under `<site>.core.<part>.` of a part that
the source does not have at that site, so a low-rank checkpoint loads into low rank + mask, and nothing
is ever dropped in silence. Two exceptions must be asked for: a new head, and what depends on the size of images or
patches resampled to another one. Tables of positions are interpolated (Dosovitskiy et al. 2021), convolutions that see
the image are resized by the pseudo-inverse of the resize (Beyer et al. 2023, arXiv:2212.08013), both by timm.
"""

from __future__ import annotations

import importlib
import io
import logging
import math
import pickle
import re
import warnings
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import Tensor, nn

from vitruvius._errors import CheckpointError, ConfigError
from vitruvius._files import StrPath, exists, is_url, join, load_tensors, read_bytes
from vitruvius.surgery.base import inner

logger = logging.getLogger(__name__)
State = dict[str, Tensor]
_PART = re.compile(r"^(.*\.core\.[^.]+)\.")


def load_weights(
    model: nn.Module,
    source: StrPath | Mapping[str, Tensor],
    *,
    reset_head: bool = False,
    resample: bool = False,
) -> list[str]:
    """Load weights into `model`. Returns the keys that keep their start.

    `source` is a state dict, a safetensors or .pth file, or a run folder. `reset_head` takes no head from the
    weights, whatever its number of classes; `resample` brings positions and patch embeddings of another image or
    patch size to the model's (default: neither).
    """
    if not isinstance(source, Mapping | str | PathLike):
        raise ConfigError(f"weights = {source!r}, expected a state dict, a .safetensors or .pth file, or a run folder.")
    target = inner(model)
    if isinstance(source, Mapping):
        state, name = dict(source), "the given weights"
    else:
        path = _file_of(source)
        name = str(path)
        state = load_tensors(path)[0] if name.endswith(".safetensors") else _read_pickled(path)
    no_tensors = [str(key) for key, value in state.items() if not isinstance(value, Tensor)]
    if no_tensors:
        raise CheckpointError(f"{name} are no state dict: {_list('values are no tensors', no_tensors)}.")
    new: list[str] = []
    if reset_head:
        new = head_keys(target)
        state = {key: value for key, value in state.items() if key not in new}
    if resample:
        state = resampled(target, state, name)
    missing = check_fit(target, state, name, new=new)
    target.load_state_dict(state, strict=False)
    return missing


def check_fit(model: nn.Module, state: Mapping[str, Tensor], name: str, *, new: Collection[str] = ()) -> list[str]:
    """Keys that `state` lacks and may, those in `new` among them; what else does not fit is an error about `name`."""
    target = model.state_dict()
    missing = [key for key in target if key not in state]
    unexplained = [key for key in missing if key not in new and not _belongs_to_new_part(key, state)]
    pairs = [(key, state[key], value) for key, value in target.items() if key in state]
    shapes = [f"{key} {tuple(x.shape)} → {tuple(y.shape)}" for key, x, y in pairs if x.shape != y.shape]
    no_floats = [
        f"{key} {str(given.dtype).removeprefix('torch.')}"
        for key, given, value in pairs
        if value.is_floating_point() and not given.is_floating_point()
    ]
    problems = [
        _list("keys the model does not have", sorted(set(state) - set(target))),
        _list("keys the weights lack", unexplained),
        _list("shapes that differ", shapes),
        _list("tensors that are not of floating point, as quantised ones", no_floats),
    ]
    if any(problems):
        raise CheckpointError(
            f"{name} does not fit this {type(model).__name__}: {'; '.join(filter(None, problems))}. "
            "Is it the same architecture, number of classes and attention? For other classes set model.reset_head; "
            "`vitruvius convert` reads old layouts."
        )
    return missing


def _file_of(source: StrPath) -> StrPath:
    """The file itself, or the weights of a run folder; either may be a URL."""
    for name in ("best", "last"):
        inside = join(source, f"{name}.safetensors")
        if exists(inside):
            return inside
    if not exists(source) or (not is_url(source) and Path(source).is_dir()):
        raise CheckpointError(f"no weights at {source}; expected a run folder, a .safetensors or a .pth file.")
    return source


def _read_pickled(path: StrPath) -> dict[str, Tensor]:
    """A .pth state dict, read without running pickled code."""
    try:
        source: Any = io.BytesIO(read_bytes(path)) if is_url(path) else path
        loaded = torch.load(source, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        if isinstance(error, EOFError):
            reason = "it is empty, or cut off"
        raise CheckpointError(
            f"{path} cannot be read as weights: {reason or type(error).__name__}. "
            "If it is an old training checkpoint, `vitruvius convert` may know its layout."
        ) from error
    for key in ("state_dict", "model"):  # which may wrap the weights
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds {type(loaded).__name__}, expected a state dict of tensors.")
    return loaded


def _belongs_to_new_part(key: str, state: Mapping[str, Tensor]) -> bool:
    part = _PART.match(key)
    return part is not None and not any(other.startswith(f"{part[1]}.") for other in state)


def _list(what: str, keys: list[str]) -> str:
    shown = keys[:6] + ["…"] * (len(keys) > 6)
    return f"{len(keys)} {what} ({', '.join(shown)})" if keys else ""


def head_keys(model: nn.Module) -> list[str]:
    """The keys of a model's classifier, as timm's `get_classifier` names it; two heads of distilled models are both."""
    heads: Any = model.get_classifier() if hasattr(model, "get_classifier") else None  # type: ignore[operator]
    if heads is None:
        raise ConfigError(f"model.reset_head: {type(model).__name__} does not say which part is its head.")
    heads = heads if isinstance(heads, tuple) else (heads,)
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if any(module is head for head in heads))
    return [key for key in model.state_dict() if key.startswith(prefixes)]


def resampled(model: nn.Module, state: Mapping[str, Tensor], name: str) -> State:
    """The weights with all that depends on the image or patch size brought to the model's; keys stay the same."""
    target = model.state_dict()
    result = dict(state)
    other_shape = [key for key in state if key in target and state[key].shape != target[key].shape]
    by_family = _family_filter(model, state) if other_shape else {}
    for key in other_shape:
        new = _resample(model, key, state[key], target[key], name)
        new = by_family.get(key) if new is None else new
        if new is not None and new.shape == target[key].shape:
            result[key] = new
            logger.info("%s: %s %s is resampled to %s.", name, key, tuple(state[key].shape), tuple(new.shape))
    return result


def _resample(model: Any, key: str, value: Tensor, target: Tensor, name: str) -> Tensor | None:
    are_positions = value.dim() == target.dim() == 3 and value.shape[-1] == target.shape[-1]  # (1, N, C)
    if key == "pos_embed" and are_positions:
        if not model.pos_embed.requires_grad:
            return target  # a fixed table is made for its grid
        return _positions(model, value, target, name)
    first = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv") or ""
    first = first if isinstance(first, str) else str(first[0])
    if key == f"{first}.weight" and value.dim() == 4 and value.shape[:2] == target.shape[:2]:
        return resample_patch_embed(value, list(target.shape[2:]))
    return None


def _positions(model: Any, value: Tensor, target: Tensor, name: str) -> Tensor | None:
    """Positions (1, prefix + old patches, C) → (1, prefix + patches, C)."""
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if grid is None:
        return None
    prefix = target.shape[1] - math.prod(grid)
    old = value.shape[1] - prefix
    if old <= 0 or math.isqrt(old) ** 2 != old:
        raise CheckpointError(
            f"{name}: pos_embed has {value.shape[1]} rows; without the {prefix} of class and register tokens {old} are "
            "left, which is not a square grid. Weights of oblong images cannot be resampled."
        )
    return resample_abs_pos_embed(value, new_size=list(grid), num_prefix_tokens=prefix)


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
