"""The structured recipes: each one reads, and each start can be made on its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitruvius.models.create import create_from_config
from vitruvius.training.config import read_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "structured").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_reads_and_names_itself_in_its_command(recipe):
    config = read_recipe(recipe)
    assert f"structured/{recipe.stem} " in recipe.read_text()
    if "convmixer" not in recipe.stem:
        assert config.model.positions == "sincos"
        assert config.init is not None


STARTS = ("default", "skip", "mimetic", "impulse3", "impulse5", "impulse3_optimised", "impulse5_optimised")


def test_there_is_a_recipe_for_every_data_set_and_start():
    names = {path.stem for path in RECIPES}
    for data in ("cifar10", "cifar100", "svhn", "imagenet"):
        assert {f"{data}_{start}" for start in STARTS} <= names


@pytest.mark.parametrize("stem", ["cifar10_default", "svhn_mimetic", "imagenet_impulse5", "cifar10_impulse3_optimised"])
def test_the_model_of_a_recipe_can_be_made(stem):
    recipe = next(path for path in RECIPES if path.stem == stem)
    short = ["init.steps=2"] if stem.endswith("optimised") else []
    config = read_recipe(recipe, ["model.kwargs.depth=2", *short])
    model = create_from_config(config.model, config.attention, init=config.init, seed=config.seed)
    assert len(model.model.blocks) == 2
    assert not model.model.pos_embed.requires_grad
    assert model.model.cls_token is None
