"""A data set from one file outside the package: trained on from a recipe, listed, and its mistakes named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vitruvius._errors import DataError
from vitruvius._registry import load_plugins
from vitruvius.cli import main
from vitruvius.data import DataConfig, eval_loader
from vitruvius.data.base import data_sources
from vitruvius.listing import listing

PLUGIN = '''
import torch

from vitruvius.data import TensorSet, data_source


@data_source("stripes")
def stripes(config, split, size):
    """Grey stripes, upright or level."""
    labels = torch.arange(64) % 2
    upright = torch.rand(64, 1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(-1, -1, 8, -1)
    images = torch.where(labels[:, None, None, None] == 0, upright, upright.transpose(2, 3))
    return TensorSet(name=f"stripes/{split}", images=images, labels=labels, num_classes=2)
'''
RECIPE = """
seed: 0
plugins: [stripes_plugin]
model: {name: vitruvius/vit_digits, kwargs: {num_classes: 2, depth: 1}}
data: {dataset: stripes, batch_size: 32}
train: {epochs: 1, warmup_epochs: 0, lr: 1e-3}
"""


@pytest.fixture(autouse=True)
def one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stripes_plugin.py").write_text(PLUGIN)
    (tmp_path / "stripes.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data_sources, "_pieces", {name: data_sources[name] for name in data_sources})
    monkeypatch.delitem(sys.modules, "stripes_plugin", raising=False)
    return tmp_path


def test_a_recipe_trains_on_it_and_the_run_is_evaluated_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "stripes.yaml", "--quiet", "out=run"]) == 0, capsys.readouterr().err
    assert main(["evaluate", "run"]) == 0, capsys.readouterr().err
    assert "64" in capsys.readouterr().out


def test_it_is_listed_and_suggested() -> None:
    load_plugins(["stripes_plugin"])
    assert "stripes" in listing("data")
    assert "Grey stripes, upright or level." in listing("data")
    with pytest.raises(DataError, match="no data set named 'stripe'; did you mean 'stripes'"):
        eval_loader(DataConfig(dataset="stripe"), input_size=(1, 8, 8))
    with pytest.raises(DataError, match="no data set named 'stripes/wide'"):
        eval_loader(DataConfig(dataset="stripes/wide"), input_size=(1, 8, 8))
    with pytest.raises(DataError, match=r"data\.classes chooses classes by name, stripes has none"):
        eval_loader(DataConfig(dataset="stripes", classes="imagenet-100"), input_size=(1, 8, 8))
