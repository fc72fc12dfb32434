"""What an evaluation is about, in few words: enough to notice that a ledger belongs to other weights or images."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from vitruvius._files import bytes_of
from vitruvius.attention import Core
from vitruvius.data import DataConfig
from vitruvius.data.identity import hash_tensors
from vitruvius.surgery import inner

JUDGED = (
    "root",
    "val_split",
    "class_map",
    "val_num_samples",
    "image_size",
    "in_chans",
    "interpolation",
    "crop_pct",
    "crop_mode",
    "broken",
)  # settings of data that change what is judged


IGNORED = {  # attributes that change no answer
    *vars(nn.Module()),
    "fused_attn",
    "grad_checkpointing",
    "pretrained_cfg",
    "default_cfg",
}


def subject_of(model: nn.Module, loader: Any) -> dict[str, Any]:
    """Data, number of images, architecture with its cores, and fingerprints of weights and of settings.

    Which images they are is checked one by one: a ledger keeps a hash of each.
    """
    cores = Counter(module.describe() for module in model.modules() if isinstance(module, Core))
    attention = "".join(f", {core} at {count} sites" for core, count in cores.items())
    return {
        "data": str(getattr(loader, "name", "unnamed")),
        "images": getattr(loader, "num_images", None),
        "model": f"{type(inner(model)).__name__}{attention}",
        "weights": fingerprint(model),
        "settings": settings_fingerprint(model),
    }


def data_settings(config: DataConfig) -> dict[str, Any]:
    """What a recipe says about the images to judge, where it differs from the defaults.

    `config` is the data section of a target.
    """
    defaults = DataConfig()
    values = {name: getattr(config, name) for name in JUDGED if getattr(config, name) != getattr(defaults, name)}
    return {f"data.{name}": value for name, value in values.items()}


def fingerprint(model: nn.Module) -> str:
    """A hash of every parameter and buffer (normalisation included) and of the settings of the cores.

    `model` is any module; equal weights on another device have the same.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(model)):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    for core in model.modules():
        if isinstance(core, Core):
            digest.update(repr([(name, _settings(part)) for name, part in core.named_modules()]).encode())
    return digest.hexdigest()[:16]


def settings_fingerprint(model: nn.Module) -> str:
    """A hash of the plain attributes of every module, and of their classes.

    Plain are numbers, words, functions by their names, tensors that are no buffers, and lists and dictionaries of them.

    `model` is any module.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        own = []
        for key, value in sorted(vars(module).items()):
            if key not in IGNORED and "cache" not in key and _is_plain(value):  # a pass fills a cache, as LeViT's
                own.append((key, _described(value)))
        digest.update(repr((name, type(module).__name__, own)).encode())
    return digest.hexdigest()[:16]


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or isinstance(value, bool | int | float | str | Tensor | np.generic) or _is_function(value)


def _is_function(value: object) -> bool:
    return inspect.isfunction(value) or inspect.isbuiltin(value) or inspect.isclass(value)


def _described(value: Any) -> object:
    """What prints alike in every process."""
    if isinstance(value, tuple | list):
        return [_described(item) for item in value]
    if isinstance(value, dict):
        return [(_described(key), _described(item)) for key, item in value.items()]
    if isinstance(value, Tensor):
        return hash_tensors(value)
    if _is_function(value):
        return f"{value.__module__}.{value.__qualname__}"
    return value


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _settings(part: nn.Module) -> list[tuple[str, Any]]:
    """Numbers and words among the attributes of a part: its hyper-parameters."""
    plain = {key: value for key, value in vars(part).items() if isinstance(value, bool | int | float | str | tuple)}
    return sorted((key, value) for key, value in plain.items() if key != "training" and not key.startswith("_"))
