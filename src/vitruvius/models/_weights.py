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

import torch
from torch import Tensor, nn

from vitruvius._errors import CheckpointError
from vitruvius._files import StrPath, exists, is_url, join, load_tensors, read_bytes
from vitruvius.models._adapting import head_keys, resampled, without_head
from vitruvius.surgery import inner

_PART = re.compile(r"^(.*\.core\.[^.]+)\.")


def load_weights(
    model: nn.Module,
    source: StrPath | Mapping[str, Tensor],
    *,
    reset_head: bool = False,
    resample: bool = False,
) -> list[str]:
    """Load a state dict, a safetensors or .pth file, or a run folder. Returns the keys that keep their start.

    `reset_head` takes no head from the weights, whatever its number of classes; `resample` brings positions and
    patch embeddings of another image or patch size to the model's.
    """
    state, name = (dict(source), "the given weights") if isinstance(source, Mapping) else _read(source)
    target = inner(model)
    new = head_keys(target) if reset_head else []
    state = without_head(target, state) if reset_head else state
    state = resampled(target, state, name) if resample else state
    missing = check_fit(target, state, name, new=new)
    target.load_state_dict(state, strict=False)
    return missing


def check_fit(model: nn.Module, state: Mapping[str, Tensor], name: str, *, new: Collection[str] = ()) -> list[str]:
    """Keys the weights lack and may lack (`new` ones among them); what else does not fit is a CheckpointError."""
    own = model.state_dict()
    unexpected = sorted(key for key in state if key not in own)
    missing = [key for key in own if key not in state]
    wrong = [key for key in own if key in state and state[key].shape != own[key].shape]
    unexplained = [key for key in missing if key not in new and not _belongs_to_new_part(key, state)]
    letters = [
        _list("keys the model does not have", unexpected),
        _list("keys the weights lack", unexplained),
        _list("shapes that differ", [f"{k} {tuple(state[k].shape)} → {tuple(own[k].shape)}" for k in wrong]),
    ]
    if problems := [letter for letter in letters if letter]:
        kind = type(model).__name__
        raise CheckpointError(
            f"{name} does not fit this {kind}: {'; '.join(problems)}. "
            "Is it the same architecture, number of classes and attention? For other classes set model.reset_head; "
            "`vitruvius convert` reads old layouts."
        )
    return missing


def _read(source: StrPath) -> tuple[dict[str, Tensor], str]:
    path = _file_of(source)
    if str(path).endswith(".safetensors"):
        return load_tensors(path)[0], str(path)
    return _read_pickled(path), str(path)


def _file_of(source: StrPath) -> StrPath:
    """The file itself, or the weights of a run folder; either may be a URL."""
    inside = [join(source, f"{name}.safetensors") for name in ("best", "last")]
    if found := next((file for file in inside if exists(file)), None):
        return found
    if not exists(source) or (not is_url(source) and Path(source).is_dir()):
        raise CheckpointError(f"no weights at {source}; expected a run folder, a .safetensors or a .pth file.")
    return source


def _read_pickled(path: StrPath) -> dict[str, Tensor]:
    """A .pth state dict, read without running pickled code."""
    try:
        loaded = torch.load(
            io.BytesIO(read_bytes(path)) if is_url(path) else path, map_location="cpu", weights_only=True
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as weights: {(str(error) or type(error).__name__).splitlines()[0]} "
            "If it is an old training checkpoint, `vitruvius convert` may know its layout."
        ) from error
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
    shown = ", ".join(keys[:most])
    return f"{len(keys)} {what} ({shown}{', …' if len(keys) > most else ''})"
