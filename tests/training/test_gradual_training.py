"""Attention that is prepared for training: masks that tighten, and low rank that is fitted to the dense maps first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vitruvius
from small_run import small_config, small_run
from vitruvius._files import load_tensors
from vitruvius._processes import Process
from vitruvius.compression.files import load_maps, load_masks, save_maps, save_masks
from vitruvius.compression.maps import average_maps
from vitruvius.compression.masks import make_masks
from vitruvius.compression.rules import Ratio
from vitruvius.data import DataConfig, eval_loader
from vitruvius.models import load_model
from vitruvius.models.config import AttentionRule, ModelConfig
from vitruvius.surgery import calibrating
from vitruvius.surgery.base import inner
from vitruvius.training import Config, TrainConfig, train
from vitruvius.training.config import EvaluationPlan
from vitruvius.training.judging import keep_start
from vitruvius.training.session import open_session

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


PARTS = "attention=[{where: '*', parts: [{use: low_rank, rank: 2, start: START}]}]"


def test_a_calibrated_start_gives_the_dense_maps_and_resuming_does_not_calibrate_again(tmp_path, monkeypatch):
    dense = small_run(tmp_path / "dense")
    wanted = load_model(dense).eval()
    gaps = {}
    for start in ("svd", "calibrated"):
        config = small_config(tmp_path / start, f"model.weights={dense}", PARTS.replace("START", start))
        session = open_session(config, Process(device=torch.device("cpu")))
        x, _ = next(iter(session.train_loader))
        gaps[start] = (session.model.eval()(x) - wanted(x)).norm()
    assert gaps["calibrated"] < gaps["svd"] / 2
    overrides = f"model.weights={dense}", PARTS.replace("START", "calibrated")
    config, fitted = small_config(tmp_path / "judged", *overrides), []
    calibrate = calibrating.calibrate_low_rank
    with monkeypatch.context() as patch:
        patch.setattr("vitruvius.training.session.calibrate_low_rank", lambda *a: (fitted.append(1), calibrate(*a))[1])
        keep_start(config, [EvaluationPlan(threats=(), start=True)], Process(device=torch.device("cpu")))
        session = open_session(config, Process(device=torch.device("cpu")))
    assert len(fitted) == 1  # a start that was judged is the one that is trained
    kept = load_tensors(tmp_path / "judged" / "start" / "best.safetensors")[0]
    assert all(torch.equal(value, kept[name]) for name, value in session.weights().items())
    run = small_run(tmp_path / "run", *overrides)
    monkeypatch.setattr("vitruvius.training.session.calibrate_low_rank", lambda *_, **__: 1 / 0)
    again = small_run(run, *overrides)
    assert "blocks.0.attn.core.low_rank.q.0.weight" in inner(load_model(again)).state_dict()
