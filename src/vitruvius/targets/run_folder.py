"""A run folder, as `vitruvius train` and `convert` write it: its weights, and its data unless others are named.

One at a URL, s3://bucket/runs/rpc, is copied to runs/remote/…, where results go too. A checkpoint of the zoo,
zoo/vit_digits_adversarial, is a run folder with a card, checked before it is loaded: card.json says what the weights
were trained on and how, what was measured of them, and their hash; card.md says the same to a person.
`python -m experiments.zoo` makes and checks them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitruvius._config import build, override
from vitruvius._errors import CheckpointError, ConfigError, RunError, UnknownName, suggest
from vitruvius._files import is_url, read_json
from vitruvius._recipes import ZOO, zoo_cards, zoo_folder
from vitruvius._registry import load_foreign_plugins
from vitruvius._yaml import read_yaml
from vitruvius.targets.base import OUTSIDE, Target, TargetConfig, check_settings, folder_for, local_run, target_kinds

if TYPE_CHECKING:
    from vitruvius.models import PixelModel

SECTIONS = ("model", "attention", "data", "plugins")  # of the recipe, that describe the model and its data
WEIGHTS = ("best.safetensors", "last.safetensors")
OTHER_DATA = ("data.root=", "data.dataset=")
PREFIX = "zoo/"
PICTURES = "pictures.npz"  # a few of its data set, where that has to be fetched; used until `data.root` names the whole


@target_kinds.register("run")
class RunFolder:
    """A folder with config.yaml and weights: runs/rpc; or with the config.yaml that results of a model by name have."""

    order = 10.0
    has_data = True

    def accepts(self, text: str) -> bool:
        return Path(text).is_dir()

    def open(self, text: str, overrides: Sequence[str], *, trust_plugins: bool) -> Target:
        """The trained model; only data and device can be changed, and plugins trusted."""
        folder = Path(text)
        source = str(folder / "config.yaml")
        if not Path(source).is_file():
            raise RunError(f"{text} is not a run folder: it has no config.yaml. `vitruvius train` makes one.")
        recipe = read_yaml(source)
        load_foreign_plugins(recipe.get("plugins") or [], source=source, trust=trust_plugins)
        why = (
            f"{folder} is a run, its model is what was trained. To try its weights otherwise, name the model instead "
            f"of the run, with model.weights={folder}."
        )
        check_settings(overrides, OUTSIDE, why)
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
        opened = RunFolder().open(local_run(text), overrides, trust_plugins=trust_plugins)
        return replace(opened, text=text)


@target_kinds.register("zoo")
class ZooCheckpoint:
    """A checkpoint of the zoo: zoo/vit_digits_adversarial; VITRUVIUS_ZOO names another folder of checkpoints."""

    order = 7.0  # before run folders: the zoo's are run folders too, and their hashes shall be checked
    has_data = True

    def accepts(self, text: str) -> bool:
        """Whether it has a card; a run folder of one's own under zoo/ has none."""
        own_run = (Path(text) / "config.yaml").is_file() and not (Path(text) / "card.json").is_file()
        return text.startswith(PREFIX) and not own_run and find_checkpoint(text).is_dir()

    def open(self, text: str, overrides: Sequence[str], *, trust_plugins: bool) -> Target:
        """The checkpoint with its own data, or the few pictures beside it; results go to runs/."""
        folder = find_checkpoint(text)
        opened = RunFolder().open(str(folder), overrides, trust_plugins=trust_plugins)
        if (folder / PICTURES).is_file() and not any(word.startswith("data.root=") for word in overrides):
            data = replace(opened.config.data, root=str(folder / PICTURES))
            opened = replace(opened, config=replace(opened.config, data=data))
        return replace(opened, text=text, folder=folder_for(text), is_run=False)


def find_checkpoint(text: str) -> Path:
    """The folder of a checkpoint whose files are what its card says; `text` is as in zoo/vit_digits_adversarial."""
    name = text.removeprefix(PREFIX)
    cards = zoo_cards()
    if name not in cards:
        folder = zoo_folder()
        if not folder.is_dir():
            raise UnknownName(
                f"{text} is not here: {folder} is not a folder. Name the folder of checkpoints with {ZOO}=…, or "
                "install the package again, which brings one."
            )
        known = ", ".join(cards) or "none"
        raise UnknownName(f"no checkpoint named {name!r} in {folder}{suggest(name, list(cards))} Known: {known}.")
    folder = cards[name].parent
    stated = read_card(name)["sha256"]
    found = hash_file(folder / WEIGHTS[0])
    if found != stated:
        raise CheckpointError(
            f"{folder / WEIGHTS[0]} is not the file that card.json describes: its SHA-256 is {found[:16]}…, the card "
            f"says {stated[:16]}…. Get it anew (git checkout, git lfs pull), or make it again: "
            "python -m experiments.zoo."
        )
    return folder


def read_card(name: str) -> dict[str, Any]:
    """The card of a checkpoint, by its `name` without zoo/."""
    file = zoo_cards()[name]
    card: dict[str, Any] = read_json(file)
    if not isinstance(card.get("sha256"), str):
        raise ConfigError(f"{file} is damaged: it does not say the SHA-256 of the weights.")
    return card


def hash_file(path: str | Path) -> str:
    """SHA-256 of the file at `path`; a missing file is an error."""
    if not Path(path).is_file():
        raise CheckpointError(f"{path} is missing; the zoo holds its card alone.")
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
