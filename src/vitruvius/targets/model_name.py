"""A model by name, timm's or one of ours: pretrained, unless weights are given or there are none to have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vitruvius._config import build, override
from vitruvius._errors import ConfigError, UnknownName
from vitruvius.targets.base import Target, TargetConfig, folder_for, target_kinds

if TYPE_CHECKING:
    from vitruvius.models import PixelModel


@target_kinds.register("model")
class ModelName:
    """A name that `create_model` knows: deit_tiny_patch16_224, vitruvius/vit_digits; or weights and a model.name."""

    order = 100.0  # last: any text may be a model's name
    has_data = False

    def accepts(self, text: str) -> bool:
        """Any `text`: this kind is asked last."""
        return True

    def open(self, text: str, overrides: Sequence[str], *, trust_plugins: bool) -> Target:
        """The model, built as the overrides say (`model.…`, `attention=…`, `seed=…`).

        `text` is the name, or a file of weights for `model.name=…`; `trust_plugins` changes nothing, since a name
        brings none.
        """
        weights_given = any(setting.startswith("model.weights=") for setting in overrides)
        pretrained = not (weights_given or text.startswith("vitruvius/"))
        given: dict[str, Any] = {"model": {"name": text, "pretrained": pretrained}}
        if text.endswith((".safetensors", ".pth")):
            if not any(setting.startswith("model.name=") for setting in overrides):
                raise ConfigError(f"{text} are weights; say of which model, e.g. model.name=vit_small_patch16_224.")
            given = {"model": {"name": text, "weights": text}}
        config = build(TargetConfig, override(given, overrides), source=text)

        def make() -> PixelModel:
            from vitruvius.models import create_from_config

            try:
                return create_from_config(config.model, config.attention, seed=config.seed)
            except UnknownName as error:
                raise UnknownName(f"{text!r} is neither a run folder nor a model: {error}") from None

        return Target(text=text, config=config, folder=folder_for(text), make=make)
