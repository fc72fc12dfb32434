"""Every recipe of ViTCoD can be read, fits its model, and says its command and what to expect."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vitruvius
from vitruvius._config import bind
from vitruvius._registry import read_spec
from vitruvius.attention import attentions, part
from vitruvius.surgery.sites import match
from vitruvius.training import read_recipe

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = [*sorted((FOLDER / "vitcod").glob("*.yaml")), FOLDER / "digits/low_rank.yaml", FOLDER / "digits/masked.yaml"]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_fits_its_model(file: Path) -> None:
    head = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert any(f"vitruvius train {file.parent.name}/{file.stem}" in line for line in head)
    assert any("Expected:" in line for line in head)
    config = read_recipe(file)
    with torch.device("meta"):
        model = vitruvius.create_model(config.model.name, **config.model.kwargs)
    sites = vitruvius.survey(model)
    for rule in config.attention:
        for name in match(model, list(sites), rule.where):
            for item in rule.parts:
                use, settings = read_spec(item, where=file.stem)
                bound = bind(use, attentions[use], settings)
                if use == "mask":
                    assert str(bound.pop("file")).startswith("runs/masks")
                    bound["keep"] = "all"
                part(use, **bound)(sites[name])


def test_both_steps_exist_for_each_model() -> None:
    names = {file.stem for file in (FOLDER / "vitcod").glob("*.yaml")}
    models = ("deit_tiny", "deit_small", "deit_base", "levit_128", "levit_192", "levit_256")
    expected = {f"{step}_{model}" for step in ("1_low_rank", "2_masked") for model in models}
    assert names == expected | {f"2_masked_deit_tiny_{percent}" for percent in (50, 80, 95)}
