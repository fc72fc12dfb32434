"""Weights from files into models: strict, or every missing key explained.

Unexpected keys are an error. Missing keys are allowed only under `<site>.core.<part>.` of a part that
the source does not have at that site, so a low-rank checkpoint loads into low rank + mask, and nothing
is ever dropped in silence. Two exceptions must be asked for: a new head, and tables resampled to another size.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._errors import CheckpointError
from vitruvius._files import StrPath, exists, is_url, join, load_tensors, read_bytes
from vitruvius.models._adapting import head_keys, resampled, without_head
from vitruvius.surgery.base import inner

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
    if isinstance(source, Mapping):
        state, name = dict(source), "the given weights"
    else:
        state, name = _read(source)
    target = inner(model)
    new: list[str] = []
    if reset_head:
        new = head_keys(target)
        state = without_head(target, state)
    if resample:
        state = resampled(target, state, name)
    missing = check_fit(target, state, name, new=new)
    target.load_state_dict(state, strict=False)
    return missing


def check_fit(model: nn.Module, state: Mapping[str, Tensor], name: str, *, new: Collection[str] = ()) -> list[str]:
    """Keys that the weights `state` lack and may lack; whatever else does not fit `model` is a CheckpointError.

    `name` is what the error calls the weights; `new` are keys of the model that are meant to be new.
    """
    own = model.state_dict()
    missing = [key for key in own if key not in state]
    unexplained = [key for key in missing if key not in new and not _belongs_to_new_part(key, state)]
    problems = [
        _list("keys the model does not have", sorted(set(state) - set(own))),
        _list("keys the weights lack", unexplained),
        _list("shapes that differ", _other_shapes(state, own)),
    ]
    if any(problems):
        raise CheckpointError(
            f"{name} does not fit this {type(model).__name__}: {'; '.join(filter(None, problems))}. "
            "Is it the same architecture, number of classes and attention? For other classes set model.reset_head; "
            "`vitruvius convert` reads old layouts."
        )
    return missing


def _other_shapes(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """`key shape → shape` of what has another shape in the model."""
    found = []
    for key, value in own.items():
        if key in state and state[key].shape != value.shape:
            found.append(f"{key} {tuple(state[key].shape)} → {tuple(value.shape)}")
    return found


def _read(source: StrPath) -> tuple[dict[str, Tensor], str]:
    path = _file_of(source)
    if str(path).endswith(".safetensors"):
        return load_tensors(path)[0], str(path)
    return _read_pickled(path), str(path)


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
        source: Any = path
        if is_url(path):
            source = io.BytesIO(read_bytes(path))
        loaded = torch.load(source, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        if isinstance(error, EOFError):
            reason = "it is empty, or cut off"
        raise CheckpointError(
            f"{path} cannot be read as weights: {reason or type(error).__name__}. "
            "If it is an old training checkpoint, `vitruvius convert` may know its layout."
        ) from error
    return _state_dict(loaded, path)


def _state_dict(loaded: Any, path: StrPath) -> dict[str, Tensor]:
    """The weights of a file that may wrap them in `state_dict` or `model`."""
    for key in ("state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(f"{path} holds {type(loaded).__name__}, expected a state dict of tensors.")
    return loaded


def _belongs_to_new_part(key: str, state: Mapping[str, Tensor]) -> bool:
    found = _PART.match(key)
    return found is not None and not any(other.startswith(f"{found[1]}.") for other in state)


def _list(what: str, keys: list[str], most: int = 6) -> str:
    if not keys:
        return ""
    shown = keys[:most]
    if len(keys) > most:
        shown = [*shown, "…"]
    return f"{len(keys)} {what} ({', '.join(shown)})"
