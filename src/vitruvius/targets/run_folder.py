"""A run folder, as `vitruvius train` and `convert` write it: its weights, and its data unless others are named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitruvius._config import build, override
from vitruvius._errors import ConfigError
from vitruvius._yaml import read_yaml
from vitruvius.models import load_model
from vitruvius.targets._base import Target, TargetConfig, target_kinds

KEPT = ("model", "attention", "data", "plugins")  # sections of the recipe that describe the model and its data
OTHER_DATA = ("data.root=", "data.dataset=")


@target_kinds.register("run")
class RunFolder:
    """A folder with config.yaml and weights: runs/rpc."""

    order = 10.0

    def accepts(self, text: str) -> bool:
        """Whether `text` is the path of a folder."""
        return Path(text).is_dir()

    def open(self, text: str, overrides: Sequence[str], *, data_needed: bool) -> Target:
        """The trained model; only data and device can be changed, and plugins trusted.

        `text` is the folder, `overrides` are settings `section.key=value`; `data_needed` changes nothing: a run knows
        its data.
        """
        folder = Path(text)
        model = load_model(folder)
        for setting in overrides:
            _check_override(setting, folder)
        recipe = read_yaml(folder / "config.yaml")
        known = {key: recipe[key] for key in KEPT if key in recipe}
        return Target(
            text=text,
            model=model,
            config=build(TargetConfig, override(known, overrides), source=text),
            folder=folder,
            is_run=True,
            own_data=not any(setting.startswith(OTHER_DATA) for setting in overrides),
        )


def _check_override(setting: str, folder: Path) -> None:
    if not setting.startswith(("data.", "device=", "plugins=")):
        raise ConfigError(
            f"{setting!r} cannot be changed: {folder} is a run, its model is what was trained. To try its weights "
            f"otherwise, name the model instead of the run, with model.weights={folder}."
        )
