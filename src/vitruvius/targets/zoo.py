"""A checkpoint of the zoo, by name: zoo/vit_digits_adversarial. A run folder with a card, checked before it is loaded.

The card, card.json, says what the weights were trained on and how, what was measured of them, and their hash; card.md
says the same to a person. `python -m experiments.zoo` makes and checks them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitruvius._errors import CheckpointError, ConfigError, UnknownName, suggest
from vitruvius._files import read_json
from vitruvius._recipes import ZOO, zoo_cards, zoo_folder
from vitruvius.targets.base import Target, folder_for, target_kinds
from vitruvius.targets.run_folder import RunFolder

PREFIX = "zoo/"
WEIGHTS = "best.safetensors"
PICTURES = "pictures.npz"  # a few of its data set, where that has to be fetched; used until `data.root` names the whole


@target_kinds.register("zoo")
class ZooCheckpoint:
    """A checkpoint of the zoo: zoo/vit_digits_adversarial; VITRUVIUS_ZOO names another folder of checkpoints."""

    order = 7.0  # before run folders: the zoo's are run folders too, and their hashes shall be checked
    has_data = True

    def accepts(self, text: str) -> bool:
        return is_zoo(text)

    def open(self, text: str, overrides: Sequence[str], *, trust_plugins: bool) -> Target:
        """The checkpoint with its own data, or the few pictures beside it; only data and device can be changed.

        Results go to runs/.
        """
        folder = find_checkpoint(text)
        opened = RunFolder().open(str(folder), overrides, trust_plugins=trust_plugins)
        if (folder / PICTURES).is_file() and not any(word.startswith("data.root=") for word in overrides):
            data = replace(opened.config.data, root=str(folder / PICTURES))
            opened = replace(opened, config=replace(opened.config, data=data))
        return replace(opened, text=text, folder=folder_for(text), is_run=False)


def is_zoo(text: str) -> bool:
    """Whether `text` names a checkpoint of the zoo; a run folder of one's own under zoo/ has no card and does not."""
    own_run = (Path(text) / "config.yaml").is_file() and not (Path(text) / "card.json").is_file()
    return text.startswith(PREFIX) and not own_run


def find_checkpoint(text: str) -> Path:
    """The folder of a checkpoint whose files are what its card says; `text` is as in zoo/vit_digits_adversarial."""
    name = text.removeprefix(PREFIX)
    cards = zoo_cards()
    if name not in cards:
        raise UnknownName(_not_there(name, list(cards)))
    folder = cards[name].parent
    stated = read_card(name)["sha256"]
    found = hash_file(folder / WEIGHTS)
    if found != stated:
        raise CheckpointError(
            f"{folder / WEIGHTS} is not the file that card.json describes: its SHA-256 is {found[:16]}…, the card says "
            f"{stated[:16]}…. Get it anew (git checkout, git lfs pull), or make it again: python -m experiments.zoo."
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


def _not_there(name: str, known: list[str]) -> str:
    folder = zoo_folder()
    if not folder.is_dir():
        return (
            f"zoo/{name} is not here: {folder} is not a folder. Name the folder of checkpoints with {ZOO}=…, or "
            "install the package again, which brings one."
        )
    return f"no checkpoint named {name!r} in {folder}{suggest(name, known)} Known: {', '.join(known) or 'none'}."
