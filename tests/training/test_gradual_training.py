"""Masks that tighten while a recipe trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vitruvius
from vitruvius._files import load_tensors
from vitruvius.compression.files import load_maps, load_masks, save_maps, save_masks
from vitruvius.compression.maps import average_maps
from vitruvius.compression.masks import make_masks
from vitruvius.compression.rules import Ratio
from vitruvius.data import DataConfig, eval_loader
from vitruvius.models.config import AttentionRule, ModelConfig
from vitruvius.training import Config, TrainConfig, train

NAME = "vitruvius/vit_digits"
RULES = (AttentionRule(parts=[{"use": "mask", "keep": "all"}]),)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    model = vitruvius.create_model(NAME, depth=1)
    loader = eval_loader(DataConfig(val_num_samples=16), input_size=(3, 8, 8))
    save_maps(tmp_path / "maps.safetensors", average_maps(model, loader))
    maps, _ = load_maps(tmp_path / "maps.safetensors")
    save_masks(tmp_path / "masks.safetensors", make_masks(maps, Ratio(), sparsity=0.5))
    return {"masks": str(tmp_path / "masks.safetensors"), "maps": str(tmp_path / "maps.safetensors")}


def recipe(out: Path, gradual: dict[str, object] | None, **train_settings: object) -> Config:
    return Config(
        model=ModelConfig(name=NAME, kwargs={"depth": 1}),
        attention=RULES,
        data=DataConfig(train_num_samples=96, batch_size=32),
        gradual=gradual,  # type: ignore[arg-type]
        train=TrainConfig(epochs=3, device="cpu", **train_settings),  # type: ignore[arg-type]
        out=str(out),
    )


@pytest.mark.parametrize("ema", [False, True])
def test_the_run_ends_with_the_final_masks_and_its_best_weights_had_them(
    tmp_path: Path, files: dict[str, str], ema: bool
) -> None:
    folder = train(recipe(tmp_path / "run", {**files, "epochs": 2}, model_ema=ema), quiet=True)
    final = load_masks(files["masks"]).keep["blocks.0.attn"]
    for name in ("last", "best", *(["last_ema"] if ema else [])):
        keep = load_tensors(folder / f"{name}.safetensors")[0]["blocks.0.attn.core.mask.keep"]
        assert torch.equal(keep, final), name
    assert 0 < int(final.sum()) < final.numel()
