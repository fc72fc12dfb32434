"""A run folder, as `vitruvius train` and `convert` write it: its weights, and its data unless others are named.

One at a URL, s3://bucket/runs/rpc, is copied to runs/remote/…, where results go too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitruvius._config import build, override
from vitruvius._errors import ConfigError, RunError
from vitruvius._files import is_url
from vitruvius._registry import load_foreign_plugins
from vitruvius._yaml import read_yaml
from vitruvius.targets.base import Target, TargetConfig, local_run, target_kinds

if TYPE_CHECKING:
    from vitruvius.models import PixelModel

SECTIONS = ("model", "attention", "data", "plugins")  # of the recipe, that describe the model and its data
WEIGHTS = ("best.safetensors", "last.safetensors")
OTHER_DATA = ("data.root=", "data.dataset=")


@target_kinds.register("run")
class RunFolder:
    """A folder with config.yaml and weights: runs/rpc; or with the config.yaml that results of a model by name have."""

    order = 10.0
    has_data = True

    def accepts(self, text: str) -> bool:
        """Whether `text` is the path of a folder."""
        return Path(text).is_dir()

    def open(self, text: str, overrides: Sequence[str], *, trust_plugins: bool) -> Target:
        """The trained model; only data and device can be changed, and plugins trusted.

        `text` is the folder, `overrides` are settings `section.key=value`; `trust_plugins` imports what the recipe
        names under `plugins:`.
        """
        folder = Path(text)
        source = str(folder / "config.yaml")
        if not Path(source).is_file():
            raise RunError(f"{text} is not a run folder: it has no config.yaml. `vitruvius train` makes one.")
        recipe = read_yaml(source)
        load_foreign_plugins(recipe.get("plugins") or [], source=source, trust=trust_plugins)
        for setting in overrides:
            if not setting.startswith(("data.", "device=", "plugins=")):
                raise ConfigError(
                    f"{setting!r} cannot be changed: {folder} is a run, its model is what was trained. To try its "
                    f"weights otherwise, name the model instead of the run, with model.weights={folder}."
                )
        given = {key: recipe[key] for key in SECTIONS if key in recipe}
        config = build(TargetConfig, override(given, overrides), source=text)

        def make() -> PixelModel:
            from vitruvius.models.create import create_from_config, load_run

            if "train" in recipe or any((folder / name).is_file() for name in WEIGHTS):
                return load_run(recipe, folder)
            return create_from_config(config.model, config.attention, seed=int(recipe.get("seed", 0)))  # by its name

        return Target(
            text=text,
            config=config,
            folder=folder,
            make=make,
            recipe=recipe,
            is_run=True,
            own_data=not any(setting.startswith(OTHER_DATA) for setting in overrides),
        )


@target_kinds.register("remote run")
class RemoteRun:
    """The URL of a run folder, of any store that fsspec knows: s3://…, gs://…."""

    order = 5.0
    has_data = True

    def accepts(self, text: str) -> bool:
        return is_url(text)

    def open(self, text: str, overrides: Sequence[str], *, trust_plugins: bool) -> Target:
        """The run in its local copy."""
        opened = RunFolder().open(local_run(text), overrides, trust_plugins=trust_plugins)
        return replace(opened, text=text)
