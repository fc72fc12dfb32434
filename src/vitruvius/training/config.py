"""The recipe of a training run: sections as frozen dataclasses, timm's option names kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitruvius._config import build, override
from vitruvius._errors import ConfigError
from vitruvius._yaml import read_yaml
from vitruvius.data import DataConfig
from vitruvius.models import AttentionRule, ModelConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The `train:` section: optimisation, precision and how often to look."""

    epochs: int = 10
    opt: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    momentum: float = 0.9
    opt_eps: float | None = None
    opt_betas: tuple[float, float] | None = None
    layer_decay: float | None = None
    sched: Literal["cosine", "tanh", "step", "multistep", "plateau", "poly", "none"] = "cosine"
    warmup_epochs: int = 0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-6
    cooldown_epochs: int = 0
    decay_epochs: int = 30  # step
    decay_milestones: tuple[int, ...] = (90, 180, 270)  # multistep, in epochs
    decay_rate: float = 0.1  # step, multistep, plateau; the power of poly
    patience_epochs: int = 10  # plateau
    clip_grad: float | None = None
    clip_mode: Literal["norm", "value", "agc"] = "norm"
    grad_accum_steps: int = 1
    model_ema: bool = False
    model_ema_decay: float = 0.9998
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool | str = False  # true, or the name of a torch.compile backend
    grad_checkpointing: bool = False
    channels_last: bool = False
    device: str = "auto"
    holdout: float = 0.1  # part of the training set that chooses the best weights; 0: the validation split does
    evaluate_every: int = 1  # epochs
    analyse_every: int = 1  # epochs, where the recipe names analyses
    analyse_images: int = 64  # fixed images of the training and of the choosing set


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole recipe."""

    model: ModelConfig
    attention: tuple[AttentionRule, ...] = ()
    init: str | dict[str, Any] | None = None  # a start for the attention weights, before surgery
    data: DataConfig = field(default_factory=DataConfig)
    task: str | dict[str, Any] = "supervised"
    gradual: dict[str, Any] | None = None  # masks that tighten: {masks: file, maps: file, epochs: 10, power: 3}
    analyses: list[str] = field(default_factory=list)  # asked while training, e.g. reconstruction:variant=reproduction
    train: TrainConfig = field(default_factory=TrainConfig)
    seed: int = 0
    plugins: list[str] = field(default_factory=list)
    out: str | None = None  # the run folder; null: runs/<name of the recipe>
    # written into a run's config.yaml, ignored in a recipe:
    versions: dict[str, str] = field(default_factory=dict)
    started: str | None = None


def read_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """A recipe file with `section.key=value` overrides applied, checked whole."""
    data = override(read_yaml(path), overrides)
    if data.get("out") is None:
        data["out"] = str(Path("runs") / Path(path).stem)
    config = build(Config, data, source=str(path))
    check(config, str(path))
    return config


def check(config: Config, source: str) -> None:
    """What types alone cannot say."""
    train = config.train
    warm = train.sched == "none" or train.warmup_epochs < train.epochs
    expectations = {
        "epochs": (train.epochs >= 1, "at least 1"),
        "lr": (train.lr > 0, "a number above 0"),
        "grad_accum_steps": (train.grad_accum_steps >= 1, "at least 1"),
        "evaluate_every": (train.evaluate_every >= 1, "at least 1"),
        "analyse_every": (train.analyse_every >= 1, "at least 1"),
        "analyse_images": (train.analyse_images >= 1, "at least 1"),
        "holdout": (0 <= train.holdout < 1, "a number from 0 to below 1"),
        "model_ema_decay": (0 <= train.model_ema_decay < 1, "a number from 0 to below 1"),
        "clip_grad": (train.clip_grad is None or train.clip_grad > 0, "a number above 0, or null for none"),
        "warmup_epochs": (warm and train.warmup_epochs >= 0, f"fewer than the {train.epochs} of train.epochs"),
    }
    for name, (fine, expected) in expectations.items():
        if not fine:
            raise ConfigError(f"{source}: train.{name} = {getattr(train, name)}, expected {expected}.")
    if train.sched == "none" and train.warmup_epochs:
        raise ConfigError(f"{source}: train.warmup_epochs = {train.warmup_epochs}, but train.sched = none never moves.")
