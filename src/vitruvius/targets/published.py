"""A checkpoint that a paper publishes, by name: light/xcit_s12_imagenet_eps4 (`vitruvius list checkpoints`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitruvius import models
from vitruvius._config import build, override
from vitruvius._errors import ConfigError
from vitruvius.converters.published import open_published, published_checkpoints
from vitruvius.models import PixelModel
from vitruvius.targets import hugging_face, zoo
from vitruvius.targets._base import Target, TargetConfig, folder_for, target_kinds

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


def load_model(run: str | Path, *, best: bool = True, trust_plugins: bool = False) -> PixelModel:
    """The model of a run folder, of the zoo, that a paper publishes, or an image classifier of transformers.

    run: the folder, here or at a URL; a name of the zoo (`zoo/vit_digits_adversarial`), whose hash is checked; a
        published name (`light/xcit_s12_imagenet_eps4`), which is fetched once; or `hf:FOLDER`, `hf:ID` (extra `hf`).
    best: of a run, the best weights where there are any (default), else the last ones.
    trust_plugins: of a run, import the modules that its `plugins:` names, which runs their code; by default only
        modules that are imported already or installed with an entry point are accepted.
    """
    if str(run).startswith(hugging_face.PREFIX):
        return hugging_face.load_classifier(str(run))
    if isinstance(run, str) and zoo.is_zoo(run):
        return zoo.load_checkpoint(run)
    if str(run) in published_checkpoints() and not Path(run).exists():
        return open_published(str(run)).build()
    return models.load_model(run, best=best, trust_plugins=trust_plugins)
