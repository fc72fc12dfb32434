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
        """Remove and return the tensor of this `key`."""
        self.shape_of(key)
        return self.state.pop(key)

    def shape_of(self, key: str) -> torch.Size:
        """The shape of the tensor of this `key`, which must be there."""
        if key not in self.state:
            raise CheckpointError(f"{self.name} lacks {key!r}; it is not a checkpoint of this layout.")
        return self.state[key].shape

    def drop(self, *endings: str, why: str) -> None:
        """Remove keys that end so, and say it.

        `endings` are those of the keys, `why` the end of the sentence that says so.
        """
        dropped = [key for key in self.state if key.endswith(endings)]
        for key in dropped:
            del self.state[key]
        if dropped:
            self.notes.append(f"left behind {len(dropped)} keys like {dropped[0]!r}: {why}.")


def read_checkpoint(path: StrPath, *, weights: Literal["model", "ema"] = "model") -> Checkpoint:
    """A .pth, .pth.tar, .bin or .safetensors file; prefixes taken off, everything left behind is named.

    `path` is the file, here or at a URL. `weights` chooses between the trained weights ("model", the default) and
    their average over time ("ema").
    """
    if not exists(path):
        raise CheckpointError(f"there is no checkpoint at {path}.")
    if str(path).endswith(".safetensors"):
        return _checked(Checkpoint(name=str(path), state=load_tensors(path)[0]))
    loaded = _load(path)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds {type(loaded).__name__}, expected a dictionary of tensors.")
    key = _weights_key(path, loaded, weights)
    if key is None:
        return _checked(Checkpoint(name=str(path), state=dict(loaded)))
    checkpoint = Checkpoint(name=str(path), state=dict(loaded[key]), args=_args(loaded))
    _note_rest(checkpoint, loaded, key)
    return _checked(checkpoint)


def _weights_key(path: StrPath, loaded: Mapping[str, Any], weights: str) -> str | None:
    """Under which key the weights lie; nothing where the file itself is a state dict."""
    for key in WEIGHTS[weights]:
        if isinstance(loaded.get(key), Mapping):
            return key
    if weights == "ema":
        raise CheckpointError(f"{path} has no EMA weights (looked for {', '.join(WEIGHTS['ema'])}). Use weights=model.")
    if any(isinstance(value, Mapping) for value in loaded.values()):
        raise CheckpointError(f"{path} has no weights under {' or '.join(WEIGHTS['model'])}; it has {_names(loaded)}.")
    return None


def _load(path: StrPath) -> Any:
    source: Any = Path(path)
    if not is_url(path) and source.is_dir():
        raise CheckpointError(f"{str(path)!r} is a folder; name the checkpoint file, e.g. {source / 'checkpoint.pth'}.")
    if is_url(path):
        source = io.BytesIO(read_bytes(path))
    try:
        with torch.serialization.safe_globals(HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on old pickle protocols
            return torch.load(source, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read without running code from it, or is damaged: {_first_line(error)} "
            "Only tensors, numbers, text and argparse namespaces are accepted."
        ) from error


def _first_line(error: Exception) -> str:
    """The first line of an error's words; the kind of an error that has none, as for an empty file."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _args(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from an argparse namespace or a dictionary, and the architecture's name."""
    found: dict[str, Any] = {}
    for key in ("args", "hparams"):
        value = loaded.get(key) or {}
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        found |= dict(value)
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
    """The checkpoint with its prefixes taken off, if it holds finite tensors and nothing else."""
    strange = [key for key, value in checkpoint.state.items() if not isinstance(value, Tensor)]
    if strange or not checkpoint.state:
        raise CheckpointError(f"{checkpoint.name} holds no plain state dict: {_names(strange) or 'it is empty'}.")
    while prefix := _common_prefix(checkpoint):
        checkpoint.state = {key.removeprefix(prefix): value for key, value in checkpoint.state.items()}
    for key, value in checkpoint.state.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise CheckpointError(
                f"{checkpoint.name}: {key!r} holds numbers that are not finite. The run has diverged."
            )
    return checkpoint


def _common_prefix(checkpoint: Checkpoint) -> str:
    """The prefix of a wrapper that every key has, or nothing."""
    return next((prefix for prefix in PREFIXES if all(key.startswith(prefix) for key in checkpoint.state)), "")


def _names(keys: Any) -> str:
    names = [str(key) for key in keys]
    return ", ".join(names if len(names) <= 6 else [*names[:6], "…"])
