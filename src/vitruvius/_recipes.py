"""The recipes and checkpoints that come with the package: where they lie, and how one is found by its name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from vitruvius._errors import ConfigError, suggest

ZOO = "VITRUVIUS_ZOO"  # the environment variable that names another folder of checkpoints


def shipped(name: str) -> Path:
    """The folder `name` inside the package when installed, at the root of the repository in a checkout."""
    packaged = Path(__file__).parent / name
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / name


def recipes_folder() -> Path:
    """Where the packaged recipes lie."""
    return shipped("recipes")


def recipe_files() -> dict[str, Path]:
    """Every packaged recipe by its name, such as digits/softmax."""
    folder = recipes_folder()
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.glob("*/*.yaml"))}


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe: a path as it is, or the name of a packaged one, with or without `.yaml`."""
    path = Path(name)
    if path.is_dir():
        if (path / "config.yaml").exists():
            raise ConfigError(f"{path} is a run folder; its recipe is {path / 'config.yaml'}.")
        raise ConfigError(f"{path} is a folder; expected a recipe's YAML file, or a name (vitruvius list recipes).")
    if path.exists():
        return path
    packaged = recipes_folder() / f"{str(name).removesuffix('.yaml').removeprefix('recipes/')}.yaml"
    if packaged.exists():
        return packaged
    hint = suggest(str(name), recipe_files())
    raise ConfigError(f"no recipe at {name}{hint} `vitruvius list recipes` shows what comes with it.")


def zoo_folder() -> Path:
    """Where checkpoints lie: $VITRUVIUS_ZOO, by default those that come with the package."""
    named = os.environ.get(ZOO)
    return Path(named) if named else shipped("zoo")


def zoo_cards() -> dict[str, Path]:
    """The card of every checkpoint by its name."""
    return {file.parent.name: file for file in sorted(zoo_folder().glob("*/card.json"))}


def describe_zoo() -> list[tuple[str, str, str]]:
    """Name, data and model, and what was measured, of every checkpoint of the zoo."""
    rows = []
    for name, file in zoo_cards().items():
        card = json.loads(file.read_text(encoding="utf-8"))
        figures = ", ".join(f"{row['label']} {100 * row['accuracy']:.1f} %" for row in card["figures"])
        about, _, _ = card["about"].partition(". ")
        rows.append((f"zoo/{name}", f"{card['model']} on {card['data']['name']}: {figures}", f"{about.rstrip('.')}."))
    return rows


def processes_of(recipe: Path) -> int | None:
    """How many processes the command at the head of a recipe starts; None where it starts one, or there is none."""
    found = re.search(r"^#.*--nproc-per-node (\d+)", recipe.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) if found else None
