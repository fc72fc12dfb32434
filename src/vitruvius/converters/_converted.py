"""What a converter gives back, and the verb that reads, converts and proves that everything fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vitruvius._errors import CheckpointError, ConfigError
from vitruvius._files import StrPath
from vitruvius._registry import Registry, piece_of
from vitruvius.converters._checkpoint import Checkpoint, read_checkpoint
from vitruvius.models import PixelModel, create_model, load_weights
from vitruvius.models.config import AttentionRule
from vitruvius.models.weights import check_fit
from vitruvius.surgery.base import inner

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
UNTOUCHED = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}  # pixels go in as they are


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

    def build(self) -> PixelModel:
        """The model, with these weights."""
        model = self._empty()
        load_weights(model, self.state_dict)
        return model

    def _empty(self) -> PixelModel:
        return create_model(**self.model, attention=[AttentionRule(**rule) for rule in self.attention])


Converter = Callable[..., Any]  # of a checkpoint, to Converted; SETTINGS of a file, to a recipe
SETTINGS = ("timm-args",)  # programs whose settings become recipes
MASKS = "vitcod-masks"  # reads no weights either
converters: Registry[Converter] = Registry("converter", homes=["vitruvius.converters"])


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
    if piece_of(converter) in [converters[name] for name in SETTINGS]:
        raise ConfigError(
            f"{source} reads settings, not weights: read_arguments({str(path)!r}) makes a recipe of them."
        )
    if piece_of(converter) is converters[MASKS]:
        raise ConfigError(f"{MASKS} reads masks, not weights: read_masks({str(path)!r}) gives them by site.")
    checkpoint = read_checkpoint(path, weights=weights)
    converted: Converted = converter(checkpoint)
    with torch.device("meta"):  # shapes are enough to compare
        target = inner(converted._empty())
    missing = check_fit(target, converted.state_dict, f"{path}, read as {source},")
    if missing:
        raise CheckpointError(f"{path}, read as {source}, lacks {len(missing)} keys: {', '.join(missing[:6])}.")
    return converted


def finish(checkpoint: Checkpoint, model: dict[str, Any], attention: list[dict[str, Any]] | None = None) -> Converted:
    """The result for a checkpoint whose keys have been brought into our order."""
    return Converted(state_dict=checkpoint.state, model=model, attention=attention or [], notes=checkpoint.notes)
