"""A model by name: timm's, one of ours, or a checkpoint that a paper publishes (`vitruvius list checkpoints`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vitruvius._config import build, override
from vitruvius._errors import ConfigError, UnknownName
from vitruvius.converters.published import open_published, published_checkpoints
from vitruvius.targets.base import OUTSIDE, Target, TargetConfig, check_settings, folder_for, target_kinds

if TYPE_CHECKING:
    from vitruvius.models import PixelModel

WEIGHTS = "model.weights="
WEIGHTS_FILES = (".safetensors", ".pth")


@target_kinds.register("published")
class PublishedCheckpoint:
    """A name of the table in converters/published.yaml; model.weights=FILE where the file was fetched by hand."""

    order = 50.0
    has_data = False

    def accepts(self, text: str) -> bool:
        return text in published_checkpoints()

    def open(self, text: str, overrides: Sequence[str], *, trust_plugins: bool) -> Target:
        """The checkpoint, converted; only data, device and the file itself can be said."""
        check_settings(overrides, (*OUTSIDE, WEIGHTS), f"{text} is a published checkpoint.")
        rest = [setting for setting in overrides if not setting.startswith(WEIGHTS)]
        files = [setting.removeprefix(WEIGHTS) for setting in overrides if setting.startswith(WEIGHTS)]
        converted = open_published(text, file=files[-1] if files else None)
        config = build(TargetConfig, override(converted.config, rest), source=text)
        return Target(text=text, config=config, folder=folder_for(text), make=converted.build)


@target_kinds.register("model")
class ModelName:
    """A name that `create_model` knows: deit_tiny_patch16_224, vitruvius/vit_digits; or weights and a model.name.

    Pretrained, unless weights are given or there are none to have.
    """

    order = 100.0  # last: nearly any text may be a model's name
    has_data = False

    def accepts(self, text: str) -> bool:
        """Any text but a path: timm writes others' models as hf-hub:USER/NAME and local-dir:FOLDER."""
        return "/" not in text or ":" in text or text.startswith("vitruvius/") or text.endswith(WEIGHTS_FILES)

    def open(self, text: str, overrides: Sequence[str], *, trust_plugins: bool) -> Target:
        """The model, built as the overrides say (`model.…`, `attention=…`, `seed=…`)."""
        weights_given = any(setting.startswith(WEIGHTS) for setting in overrides)
        pretrained = not (weights_given or text.startswith("vitruvius/"))
        given: dict[str, Any] = {"model": {"name": text, "pretrained": pretrained}}
        if text.endswith(WEIGHTS_FILES):
            if not any(setting.startswith("model.name=") for setting in overrides):
                raise ConfigError(f"{text} are weights; say of which model, e.g. model.name=vit_small_patch16_224.")
            given = {"model": {"name": text, "weights": text}}
        config = build(TargetConfig, override(given, overrides), source=text)

        def make() -> PixelModel:
            from vitruvius.models.create import create_from_config

            try:
                return create_from_config(config.model, config.attention, seed=config.seed)
            except UnknownName as error:
                raise UnknownName(f"{text!r} is neither a run folder nor a model: {error}") from None

        return Target(text=text, config=config, folder=folder_for(text), make=make)
