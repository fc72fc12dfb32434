"""The structured recipes: one for each data set and start, with fixed positions; tests/test_recipes.py tries them."""

from __future__ import annotations

from pathlib import Path

from vitruvius.training.config import read_recipe

RECIPES = {path.stem: path for path in (Path(__file__).parents[2] / "recipes" / "structured").glob("*.yaml")}
STARTS = ("default", "skip", "mimetic", "impulse3", "impulse5", "impulse3_optimised", "impulse5_optimised")


def test_there_is_a_recipe_for_every_data_set_and_start_with_fixed_positions():
    for data in ("cifar10", "cifar100", "svhn", "imagenet"):
        assert {f"{data}_{start}" for start in STARTS} <= RECIPES.keys()
    for stem, path in RECIPES.items():
        config = read_recipe(path)
        assert "convmixer" in stem or (config.model.positions == "sincos" and config.init is not None), stem
