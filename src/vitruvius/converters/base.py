"""Read a checkpoint of another code base, convert it, prove that everything fits, write it as a run folder.

A checkpoint is data: its weights and what it says about itself; pickled code is never run.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitruvius._errors import CheckpointError, ConfigError, RunError
from vitruvius._files import (
    Lock,
    StrPath,
    atomic_write_text,
    ensure_writable,
    exists,
    is_url,
    load_tensors,
    read_bytes,
    save_tensors,
)
from vitruvius._registry import Registry, piece_of
from vitruvius._version import __version__
from vitruvius._yaml import dump_yaml
from vitruvius.models import PixelModel, create_model, load_weights
from vitruvius.models.config import AttentionRule
from vitruvius.models.weights import check_fit
from vitruvius.surgery.base import inner

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
EPOCH = re.compile(r"checkpoint-(\d+)\.pth(\.tar)?")  # of timm's trainer and the light recipe's, from 0
BEST = ("model_best.pth.tar", "best.pth.tar")

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
UNTOUCHED = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}  # pixels go in as they are

Converter = Callable[..., Any]  # of a checkpoint, to Converted; SETTINGS of a file, to a recipe
SETTINGS = "timm-args"  # reads the settings of a program, which become a recipe
MASKS = "vitcod-masks"  # reads no weights either
converters: Registry[Converter] = Registry("converter", homes=["vitruvius.converters"])


@dataclass(kw_only=True)
class Checkpoint:
    """Weights by key, the settings of the run that made them (`args`), and notes for the user."""

    name: str
    state: dict[str, Tensor]
    args: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def take(self, key: str) -> Tensor:
        """Remove and return the tensor of this `key`, which must be there."""
        self.shape_of(key)
        return self.state.pop(key)

    def shape_of(self, key: str) -> torch.Size:
        """The shape of the tensor of this `key`, which must be there."""
        if key not in self.state:
            raise CheckpointError(f"{self.name} lacks {key!r}; it is not a checkpoint of this layout.")
        return self.state[key].shape

    def drop(self, *endings: str, why: str) -> None:
        """Remove keys that end so, and say it; `why` is the end of that sentence."""
        dropped = [key for key in self.state if key.endswith(endings)]
        for key in dropped:
            del self.state[key]
        if dropped:
            self.notes.append(f"left behind {len(dropped)} keys like {dropped[0]!r}: {why}.")


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A model in our terms: weights, arguments of `create_model`, attention rules, and what the user should know."""

    state_dict: dict[str, Tensor]
    model: dict[str, Any]
    attention: list[dict[str, Any]] = field(default_factory=list)  # [{where, parts: [{use: name, …}]}]
    notes: list[str] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        """The `model` and `attention` sections of a run's config.yaml."""
        own = {key: list(value) for key, value in self.model.items() if key in ("mean", "std")}
        kwargs = {key: value for key, value in self.model.items() if key not in ("name", "mean", "std")}
        return {"model": {"name": self.model["name"], **own, "kwargs": kwargs}, "attention": self.attention}

    def build(self, *, empty: bool = False) -> PixelModel:
        """The model, with these weights; `empty`: with new ones."""
        model = create_model(**self.model, attention=[AttentionRule(**rule) for rule in self.attention])
        if not empty:
            load_weights(model, self.state_dict)
        return model


def convert(
    path: StrPath,
    source: str | Mapping[str, Any] | Converter,
    *,
    model_name: str | None = None,
    weights: Literal["model", "ema"] = "model",
    **settings: Any,
) -> Converted:
    """Read a checkpoint of another code base; every key is used or named.

    `path` is its file or URL. `source` says how to read it: `"vitcod"`, `"vitcod:key=value"`,
    `{"use": "vitcod", key: value}` (`vitruvius list converters`), or a converter itself; `settings` are further
    settings of it. `model_name` says what the checkpoint itself does not (default: what it says). `weights` chooses
    between the trained weights ("model", the default) and their average over time ("ema").
    """
    if model_name is not None:
        settings["model_name"] = model_name
    converter = converters.bind(source, where="convert", settings=settings)
    for name, what in ((SETTINGS, "settings"), (MASKS, "masks")):
        if piece_of(converter) is converters[name]:
            raise ConfigError(f"{name} reads {what}, not weights: vitruvius convert {path} --from {name} writes them.")
    converted: Converted = converter(read_checkpoint(path, weights=weights))
    with torch.device("meta"):  # shapes are enough to compare
        target = inner(converted.build(empty=True))
    missing = check_fit(target, converted.state_dict, f"{path}, read as {source},")
    if missing:
        raise CheckpointError(f"{path}, read as {source}, lacks {len(missing)} keys: {_names(missing)}.")
    return converted


def finish(checkpoint: Checkpoint, model: dict[str, Any], attention: list[dict[str, Any]] | None = None) -> Converted:
    """The result for a checkpoint whose keys have been brought into our order."""
    return Converted(state_dict=checkpoint.state, model=model, attention=attention or [], notes=checkpoint.notes)


def read_checkpoint(path: StrPath, *, weights: Literal["model", "ema"] = "model") -> Checkpoint:
    """A .pth, .pth.tar, .bin or .safetensors file; prefixes taken off, everything left behind is named.

    `path` and `weights` as for `convert`.
    """
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
    if key is None:  # the file itself is a state dict
        return _checked(Checkpoint(name=str(path), state=dict(loaded)))
    checkpoint = Checkpoint(name=str(path), state=dict(loaded[key]), args=_args(loaded))
    rest = [name for name in loaded if name not in (key, "args", "hparams", "arch")]
    if rest:
        checkpoint.notes.append(f"left behind: {', '.join(map(str, rest))}.")
    if weights == "model" and any(loaded.get(name) for name in WEIGHTS["ema"]):
        checkpoint.notes.append("the file also holds EMA weights; weights=ema takes those.")
    return _checked(checkpoint)


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
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read without running code from it, or is damaged: {first_line} "
            "Only tensors, numbers, text and argparse namespaces are accepted."
        ) from error


def _args(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from an argparse namespace or a dictionary, and the architecture's name."""
    found: dict[str, Any] = {}
    for key in ("args", "hparams"):
        value = loaded.get(key) or {}
        found |= vars(value) if isinstance(value, argparse.Namespace) else dict(value)
    if isinstance(loaded.get("arch"), str):
        found["model"] = loaded["arch"]
    return found


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its prefixes taken off, if it holds finite tensors and nothing else."""
    strange = [key for key, value in checkpoint.state.items() if not isinstance(value, Tensor)]
    if strange or not checkpoint.state:
        raise CheckpointError(f"{checkpoint.name} holds no plain state dict: {_names(strange) or 'it is empty'}.")
    while prefix := next((p for p in PREFIXES if all(key.startswith(p) for key in checkpoint.state)), ""):
        checkpoint.state = {key.removeprefix(prefix): value for key, value in checkpoint.state.items()}
    for key, value in checkpoint.state.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise CheckpointError(
                f"{checkpoint.name}: {key!r} holds numbers that are not finite. The run has diverged."
            )
    return checkpoint


def _names(keys: Any) -> str:
    names = [str(key) for key in keys]
    return ", ".join(names if len(names) <= 6 else [*names[:6], "…"])


def epoch_checkpoints(folder: Path) -> tuple[Path, dict[int, Path]]:
    """The best checkpoint in a training's `folder` (where none is named so, the last), and all by epochs from 1."""
    matches = [(EPOCH.fullmatch(file.name), file) for file in folder.iterdir()]
    epochs = dict(sorted((int(match[1]) + 1, file) for match, file in matches if match))
    if not epochs:
        raise CheckpointError(
            f"{folder} is a folder without checkpoint-EPOCH.pth.tar; name the checkpoint file, e.g. "
            f"{folder / 'checkpoint.pth'}."
        )
    best = next((folder / name for name in BEST if (folder / name).is_file()), epochs[max(epochs)])
    return best, epochs


def write_run(
    converted: Converted, folder: str | Path, *, origin: str = "", kept: Iterable[tuple[int, Converted]] = ()
) -> Path:
    """Write `converted` as a run folder: config.yaml and best.safetensors; its notes stand at the head of the config.

    `folder` must not be a run folder yet. `origin` names where the weights come from (default: not said). `kept` are
    the weights after single epochs, counted from 1, as `train.keep` leaves them. Returns the folder's path.
    """
    path = Path(folder)
    if (path / "config.yaml").exists():
        raise RunError(f"{path} is a run folder already. Choose another one with --out, or delete it.")
    config = {"seed": 0, **converted.config, "versions": {"vitruvius": __version__}}
    with Lock(path):
        ensure_writable(path)
        save_tensors(path / "best.safetensors", converted.state_dict, {"vitruvius": __version__, "origin": origin})
        for epoch, at_epoch in kept:
            file = path / "kept" / f"epoch_{epoch:04d}.safetensors"
            save_tensors(file, at_epoch.state_dict, {"vitruvius": __version__, "epoch": str(epoch - 1)})
        head = [f"Converted from {origin}."] if origin else []
        atomic_write_text(path / "config.yaml", comment([*head, *converted.notes]) + dump_yaml(config))
    return path


def comment(lines: Iterable[str]) -> str:
    """Comment lines for the head of a YAML file."""
    return "".join(f"# {line}\n" for line in lines)
