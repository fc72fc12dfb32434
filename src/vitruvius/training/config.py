"""The recipe of a training run: sections as frozen dataclasses, timm's option names kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitruvius._config import build, override
from vitruvius._errors import ConfigError
from vitruvius._recipes import find_recipe
from vitruvius._yaml import read_yaml, to_plain
from vitruvius.data import DataConfig
from vitruvius.models import AttentionRule, ModelConfig

__all__ = ["Config", "Recipe", "TrainConfig", "as_config", "check", "read_recipe"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained; docs/training.md explains every key."""

    epochs: int = 10
    opt: str = "adamw"
    lr: float | None = None  # null: from lr_base if that is given, else 1e-3
    lr_base: float | None = None  # for lr_base_size images an update; scaled to the global batch
    lr_base_size: int = 256
    lr_base_scale: Literal["", "linear", "sqrt"] = ""  # empty: sqrt for adam's and lamb's kin, linear for others
    weight_decay: float = 0.05
    momentum: float = 0.9
    opt_eps: float | None = None
    opt_betas: tuple[float, float] | None = None
    opt_kwargs: dict[str, Any] = field(default_factory=dict)  # anything else the optimiser takes
    filter_bias_and_bn: bool = True  # no weight decay on vectors
    layer_decay: float | None = None
    layer_decay_min_scale: float = 0.0
    sched: Literal["cosine", "tanh", "step", "multistep", "plateau", "poly", "none"] = "cosine"
    sched_on_updates: bool = True  # false: the rate moves after whole epochs only, as timm's does by default
    warmup_epochs: int = 0
    warmup_lr: float = 1e-6
    warmup_prefix: bool = False  # the warm-up comes before the schedule and lengthens the run
    min_lr: float = 1e-6
    cooldown_epochs: int = 0
    decay_epochs: int = 30  # step
    decay_milestones: tuple[int, ...] = (90, 180, 270)  # multistep, in epochs
    decay_rate: float = 0.1  # step, multistep, plateau; the power of poly
    patience_epochs: int = 10  # plateau
    lr_noise: tuple[float, ...] | None = None  # parts of the run in which the rate is noisy, e.g. [0.4, 0.9]
    lr_noise_pct: float = 0.67
    lr_noise_std: float = 1.0
    lr_cycle_mul: float = 1.0
    lr_cycle_decay: float = 0.5
    lr_cycle_limit: int = 1
    lr_k_decay: float = 1.0
    clip_grad: float | None = None
    clip_mode: Literal["norm", "value", "agc"] = "norm"
    grad_accum_steps: int = 1
    model_ema: bool = False
    model_ema_decay: float = 0.9998
    model_ema_warmup: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool | str = "auto"  # auto: blocks compiled and steps recorded on a GPU where safe; true: the whole model;
    # or the name of a torch.compile backend
    compile_mode: str | None = None  # torch.compile's mode; reduce-overhead replays CUDA graphs
    grad_checkpointing: bool = False
    channels_last: bool = False
    device: str = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"  # of several processes
    nonfinite: Literal["stop", "skip"] = "stop"  # a loss that is no number: end the run, or leave that update out
    save_every: int = 0  # updates; 0: after epochs only
    save_minutes: float = 0.0  # and so often by the clock; 0: not
    holdout: float = 0.1  # part of the training set that chooses the best weights; 0: the validation split does
    evaluate_every: int = 1  # epochs
    select: Literal["auto", "clean", "robust"] = "auto"  # auto: robust if the task has a threat
    select_threat: str | None = None  # null: pgd of 10 steps, its worst iterate, in the task's ball
    select_images: int | None = None  # of those that choose; null: all
    alarm: Literal["auto", "none", "report", "stop", "rollback"] = "auto"  # auto: report if the task has a threat
    alarm_gap: float = 0.25  # single-step minus multi-step accuracy above which training has collapsed
    alarm_images: int = 128  # fixed, of those that choose
    alarm_steps: int = 10  # of the multi-step attack
    alarm_every: int = 0  # updates; 0: after epochs only
    alarm_lr: float = 0.5  # a rollback multiplies the rate by this
    alarm_rollbacks: int = 3  # at most
    analyse_every: int = 1  # epochs, where the recipe names analyses
    analyse_images: int = 64  # fixed images of the training and of the choosing set


def check_train(train: TrainConfig, source: str) -> None:
    """What types alone cannot say."""
    warm = train.sched == "none" or train.warmup_prefix or train.warmup_epochs < train.epochs
    expectations = {
        "epochs": (train.epochs >= 1, "at least 1"),
        "lr": (train.lr is None or train.lr > 0, "a number above 0"),
        "lr_base": (train.lr_base is None or train.lr_base > 0, "a number above 0"),
        "holdout": (0 <= train.holdout < 1, "a number from 0 to below 1"),
        "model_ema_decay": (0 <= train.model_ema_decay < 1, "a number from 0 to below 1"),
        "clip_grad": (train.clip_grad is None or train.clip_grad > 0, "a number above 0, or null for none"),
        "warmup_epochs": (warm and train.warmup_epochs >= 0, f"fewer than the {train.epochs} of train.epochs"),
        "save_minutes": (train.save_minutes >= 0, "0 or more"),
        "select_images": (train.select_images is None or train.select_images >= 1, "at least 1, or null for all"),
        "alarm_gap": (0 < train.alarm_gap <= 1, "a share of the images, above 0 and at most 1"),
        "alarm_lr": (0 < train.alarm_lr <= 1, "a factor above 0 and at most 1"),
        "sched_on_updates": (train.sched_on_updates or train.sched != "none", "true where train.sched = none"),
    }
    counts = {"lr_base_size": 1, "grad_accum_steps": 1, "evaluate_every": 1, "analyse_every": 1, "analyse_images": 1}
    counts |= {"save_every": 0, "alarm_images": 1, "alarm_steps": 2, "alarm_every": 0, "alarm_rollbacks": 0}
    expectations |= {name: (getattr(train, name) >= least, f"at least {least}") for name, least in counts.items()}
    for name, (fine, expected) in expectations.items():
        if not fine:
            raise ConfigError(f"{source}: train.{name} = {getattr(train, name)}, expected {expected}.")
    if train.sched == "none" and train.warmup_epochs:
        raise ConfigError(f"{source}: train.warmup_epochs = {train.warmup_epochs}, but train.sched = none never moves.")


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
    tracking: list[Any] = field(default_factory=list)  # besides metrics.jsonl: csv, tensorboard, {use: wandb, …}
    train: TrainConfig = field(default_factory=TrainConfig)
    seed: int = 0
    plugins: list[str] = field(default_factory=list)
    out: str | None = None  # the run folder, or an fsspec URL; null: runs/<name of the recipe>
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


Recipe = Config | Mapping[str, Any] | str | Path


def as_config(recipe: Recipe, overrides: Iterable[str] = ()) -> Config:
    """A recipe in any of its forms as a checked Config.

    recipe: a Config; the name of a packaged recipe, such as "digits/softmax"; the path of a YAML file; or a mapping
    with the sections of a recipe. overrides: `section.key=value` settings applied on top, none by default.
    """
    if isinstance(recipe, str | Path):
        return read_recipe(find_recipe(recipe), overrides)
    overrides = list(overrides)
    if isinstance(recipe, Mapping):
        config = build(Config, override(recipe, overrides), source="the recipe")
    elif not isinstance(recipe, Config):
        raise ConfigError(
            f"{recipe!r} is not a recipe; expected a name such as 'digits/softmax', the path of a YAML file, "
            "a mapping with the recipe's sections, or a Config."
        )
    elif overrides:
        config = build(Config, override(to_plain(recipe), overrides), source="the recipe")
    else:
        config = recipe
    check(config, "the recipe")
    return config


def check(config: Config, source: str) -> None:
    """What types alone cannot say."""
    check_train(config.train, source)
