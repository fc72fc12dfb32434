"""A checkpoint that a paper publishes, by name: light/xcit_s12_imagenet_eps4 (`vitruvius list checkpoints`)."""

from __future__ import annotations

from collections.abc import Sequence

from vitruvius._config import build, override
from vitruvius._errors import ConfigError
from vitruvius.converters.published import open_published, published_checkpoints
from vitruvius.targets.base import Target, TargetConfig, folder_for, target_kinds

WEIGHTS = "model.weights="


@target_kinds.register("published")
class PublishedCheckpoint:
    """A name of the table in converters/published.yaml; model.weights=FILE where the file was fetched by hand."""

    order = 50.0
    has_data = False

    def accepts(self, text: str) -> bool:
        """Whether `text` is such a name."""
        return text in published_checkpoints()

    def open(self, text: str, overrides: Sequence[str], *, trust_plugins: bool) -> Target:
        """The checkpoint, converted; only data, device and the file itself can be said.

        `text` is the name, `overrides` are settings `section.key=value`; `trust_plugins` changes nothing.
        """
        file = None
        rest = []
        for setting in overrides:
            if setting.startswith(WEIGHTS):
                file = setting.removeprefix(WEIGHTS)
            elif setting.startswith(("data.", "device=", "plugins=")):
                rest.append(setting)
            else:
                raise ConfigError(f"{setting!r} cannot be changed: {text} is a published checkpoint.")
        converted = open_published(text, file=file)
        config = build(TargetConfig, override(converted.config, rest), source=text)
        return Target(text=text, config=config, folder=folder_for(text), make=converted.build)
