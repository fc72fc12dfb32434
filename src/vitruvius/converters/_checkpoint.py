"""Read a training checkpoint of somebody else: its weights and what it says about itself, never its code."""

from __future__ import annotations

import argparse
import io
import pathlib
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitruvius._errors import CheckpointError
from vitruvius._files import StrPath, exists, is_url, load_tensors, read_bytes

WEIGHTS = {  # where trainers keep their weights, in order of preference
    "model": ("model", "state_dict"),
    "ema": ("model_ema", "state_dict_ema", "ema"),
}
PREFIXES = ("module.", "_orig_mod.", "model.")  # left by DataParallel, torch.compile and wrappers
_SCALAR = np._core.multiarray.scalar  # type: ignore[attr-defined]
HARMLESS: list[Any] = [  # what checkpoints hold beside tensors: data, no code
    argparse.Namespace,
    pathlib.PosixPath,
    (_SCALAR, "numpy.core.multiarray.scalar"),
    (_SCALAR, "numpy._core.multiarray.scalar"),
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("float64", "float32", "int64", "bool")),
]


@dataclass(kw_only=True)
class Checkpoint:
    """Weights by key, the settings of the run that made them (`args`), and notes for the user."""

    name: str
    state: dict[str, Tensor]
    args: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def take(self, key: str) -> Tensor:
        """Remove and return one tensor."""
        self.shape_of(key)
        return self.state.pop(key)

    def shape_of(self, key: str) -> torch.Size:
        """The shape of a tensor that must be there."""
        if key not in self.state:
            raise CheckpointError(f"{self.name} lacks {key!r}; it is not a checkpoint of this layout.")
        return self.state[key].shape

    def drop(self, *endings: str, why: str) -> None:
        """Remove keys that end so, and say it."""
        dropped = [key for key in self.state if key.endswith(endings)]
        for key in dropped:
            del self.state[key]
        if dropped:
            self.notes.append(f"left behind {len(dropped)} keys like {dropped[0]!r}: {why}.")


def read_checkpoint(path: StrPath, *, weights: Literal["model", "ema"] = "model") -> Checkpoint:
    """A .pth, .pth.tar, .bin or .safetensors file; prefixes taken off, everything left behind is named."""
    if not exists(path):
        raise CheckpointError(f"there is no checkpoint at {path}.")
    if str(path).endswith(".safetensors"):
        return _checked(Checkpoint(name=str(path), state=load_tensors(path)[0]))
    loaded = _load(path)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds {type(loaded).__name__}, expected a dictionary of tensors.")
    key = next((key for key in WEIGHTS[weights] if isinstance(loaded.get(key), Mapping)), None)
    if key is None and weights == "ema":
        raise CheckpointError(f"{path} has no EMA weights (looked for {', '.join(WEIGHTS['ema'])}). Use weights=model.")
    if key is None and any(isinstance(value, Mapping) for value in loaded.values()):
        raise CheckpointError(f"{path} has no weights under {' or '.join(WEIGHTS['model'])}; it has {_names(loaded)}.")
    state = loaded if key is None else loaded[key]
    checkpoint = Checkpoint(name=str(path), state=dict(state), args=_args(loaded) if key else {})
    if key is not None:
        _note_rest(checkpoint, loaded, key)
    return _checked(checkpoint)


def _load(path: StrPath) -> Any:
    source = io.BytesIO(read_bytes(path)) if is_url(path) else Path(path)
    try:
        with torch.serialization.safe_globals(HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on old pickle protocols
            return torch.load(source, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read without running code from it, or is damaged: {str(error).splitlines()[0]} "
            "Only tensors, numbers, text and argparse namespaces are accepted."
        ) from error


def _args(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from an argparse namespace or a dictionary, and the architecture's name."""
    found: dict[str, Any] = {}
    for key in ("args", "hparams"):
        value = loaded.get(key)
        found |= vars(value) if isinstance(value, argparse.Namespace) else dict(value or {})
    if isinstance(loaded.get("arch"), str):
        found["model"] = loaded["arch"]
    return found


def _note_rest(checkpoint: Checkpoint, loaded: Mapping[str, Any], key: str) -> None:
    rest = [name for name in loaded if name not in (key, "args", "hparams", "arch")]
    if rest:
        checkpoint.notes.append(f"left behind: {', '.join(map(str, rest))}.")
    if key in WEIGHTS["model"] and any(loaded.get(name) for name in WEIGHTS["ema"]):
        checkpoint.notes.append("the file also holds EMA weights; weights=ema takes those.")


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    strange = [key for key, value in checkpoint.state.items() if not isinstance(value, Tensor)]
    if strange or not checkpoint.state:
        raise CheckpointError(f"{checkpoint.name} holds no plain state dict: {_names(strange) or 'it is empty'}.")
    while prefix := next((p for p in PREFIXES if all(key.startswith(p) for key in checkpoint.state)), None):
        checkpoint.state = {key.removeprefix(prefix): value for key, value in checkpoint.state.items()}
    for key, value in checkpoint.state.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise CheckpointError(
                f"{checkpoint.name}: {key!r} holds numbers that are not finite. The run has diverged."
            )
    return checkpoint


def _names(keys: Any, most: int = 6) -> str:
    names = [str(key) for key in keys]
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
