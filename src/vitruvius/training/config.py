"""The recipe of a training run: sections as frozen dataclasses, timm's option names kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitruvius._checks import check_finite
from vitruvius._config import build, override
from vitruvius._errors import ConfigError
from vitruvius._keys import key, key_from
from vitruvius._recipes import find_recipe
from vitruvius._yaml import read_yaml, to_plain
from vitruvius.data import DataConfig
from vitruvius.models import AttentionRule, ModelConfig

__all__ = ["Config", "Keep", "Recipe", "TrainConfig", "as_config", "check", "read_recipe"]


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which epochs' weights stay in the run folder, as kept/epoch_0010.safetensors, counted from 1."""

    every: int = key(0, "those of every Nth epoch; 0: none")
    best: int = key(0, "those of the N epochs that did best on the held-out images; 0: none")

    def __post_init__(self) -> None:
        for name in ("every", "best"):
            if getattr(self, name) < 0:
                raise ConfigError(f"train.keep.{name} = {getattr(self, name)}, expected 0 or more.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained; docs/keys.md lists every key."""

    epochs: int = key(10, "passes over the training images, warm-up included unless warmup_prefix")
    opt: str = key("adamw", "the optimiser, by timm's name")
    lr: float | None = key(None, "peak learning rate; null: from lr_base if that is given, else 1e-3")
    lr_base: float | None = key(None, "learning rate for lr_base_size images per update, scaled to the global batch")
    lr_base_size: int = key(256, "images per update that lr_base is meant for")
    lr_base_scale: Literal["", "linear", "sqrt"] = key(
        "", "how lr_base is scaled; empty: sqrt for the kin of Adam and LAMB, linear for others"
    )
    weight_decay: float = key(0.05, "weight decay, decoupled where the optimiser is")
    momentum: float = key(0.9, "momentum of optimisers that have one")
    opt_eps: float | None = key(None, "eps of the optimiser; null: its own")
    opt_betas: tuple[float, float] | None = key(None, "betas of the optimiser; null: its own")
    opt_kwargs: dict[str, Any] = key_from(dict, "anything else that the optimiser takes")
    filter_bias_and_bn: bool = key(True, "no weight decay on biases, norms and other vectors")
    layer_decay: float | None = key(
        None, "factor of the learning rate from each layer to the one before it; null: none"
    )
    layer_decay_min_scale: float = key(0.0, "the smallest factor that layer_decay reaches")
    sched: Literal["cosine", "tanh", "step", "multistep", "plateau", "poly", "none"] = key(
        "cosine", "the schedule of the learning rate, by timm's name; none: constant"
    )
    sched_on_updates: bool = key(
        True, "move the rate at every update; false: after whole epochs only, as timm does by default"
    )
    warmup_epochs: int = key(0, "epochs in which the rate rises from warmup_lr to lr")
    warmup_lr: float = key(1e-6, "learning rate at the start of the warm-up")
    warmup_prefix: bool = key(False, "the warm-up comes before the schedule and lengthens the run")
    min_lr: float = key(1e-6, "learning rate at the end of the schedule")
    cooldown_epochs: int = key(0, "epochs at min_lr after the schedule, which lengthen the run")
    decay_epochs: int = key(30, "sched step: epochs between two decays")
    decay_milestones: tuple[int, ...] = key((90, 180, 270), "sched multistep: epochs at which the rate decays")
    decay_rate: float = key(0.1, "sched step, multistep, plateau: factor of a decay; sched poly: its power")
    patience_epochs: int = key(10, "sched plateau: epochs without progress before a decay")
    lr_noise: tuple[float, ...] | None = key(
        None, "parts of the run in which the rate is noisy, e.g. [0.4, 0.9]; null: never"
    )
    lr_noise_pct: float = key(0.67, "the largest share by which noise changes the rate")
    lr_noise_std: float = key(1.0, "standard deviation of that noise")
    lr_cycle_mul: float = key(1.0, "sched cosine, tanh, poly: each cycle is this many times as long as the one before")
    lr_cycle_decay: float = key(0.5, "factor of the peak rate from each cycle to the next")
    lr_cycle_limit: int = key(1, "number of cycles")
    lr_k_decay: float = key(1.0, "sched cosine, poly: exponent of the share of the run that is done")
    clip_grad: float | None = key(None, "limit for gradients; null: none")
    clip_mode: Literal["norm", "value", "agc"] = key(
        "norm",
        "what is limited: the norm of all gradients, every value, or unit-wise norms relative to the weights (agc)",
    )
    grad_accum_steps: int = key(1, "batches per update")
    model_ema: bool = key(False, "keep a running average of the weights, evaluated and saved beside them")
    model_ema_decay: float = key(0.9998, "decay of that average per update")
    model_ema_warmup: bool = key(False, "let that decay rise from 0 at the start of a run")
    precision: Literal["fp32", "bf16", "fp16"] = key("fp32", "of the forward and backward passes; weights stay fp32")
    compile: bool | str = key(
        "auto",
        "auto: blocks and recorded steps on a GPU where that is safe; true: the whole model; or a backend's name",
    )
    compile_mode: str | None = key(None, "torch.compile's mode; reduce-overhead replays CUDA graphs")
    grad_checkpointing: bool = key(False, "compute activations again in the backward pass to save memory")
    channels_last: bool = key(False, "keep images and convolutions in channels-last layout")
    device: str = key("auto", "auto: the accelerator that PyTorch finds, else the CPU; or a device such as cuda:1")
    parallel: Literal["ddp", "fsdp"] = key(
        "ddp", "how several processes share the work: a copy of the model each, or weights shared out"
    )
    sync_bn: bool = key(False, "batch norms take their statistics from the batches of all processes together")
    dist_bn: Literal["reduce", "broadcast", "none"] = key(
        "reduce", "running statistics of batch norms before an evaluation: their mean over processes, or the first's"
    )
    nonfinite: Literal["stop", "skip"] = key(
        "stop", "what a loss that is not finite does: end the run, or leave that update out"
    )
    save_every: int = key(0, "save the state every N updates; 0: after epochs only")
    save_minutes: float = key(0.0, "and every N minutes; 0: not by the clock")
    keep: Keep = key_from(Keep, "weights of more epochs than the best and the last: {every: 10, best: 3}")
    holdout: float = key(
        0.1, "share of the training images that chooses the best weights; 0: the validation split does"
    )
    evaluate_every: int = key(1, "epochs between two evaluations")
    select: Literal["auto", "clean", "robust"] = key(
        "auto", "what chooses the best weights: clean or robust accuracy; auto: robust if the task has a threat"
    )
    select_threat: str | None = key(
        None, "the attack that chooses; null: pgd with 10 steps, its worst iterate, in the task's ball"
    )
    select_images: int | None = key(None, "number of held-out images attacked to choose; null: all")
    alarm: Literal["auto", "none", "report", "stop", "rollback"] = key(
        "auto", "what catastrophic overfitting does; auto: report if the task has a threat"
    )
    alarm_gap: float = key(0.25, "single-step minus multi-step accuracy above which training has collapsed")
    alarm_images: int = key(128, "held-out images that the alarm attacks, always the same")
    alarm_steps: int = key(10, "steps of the alarm's multi-step attack")
    alarm_every: int = key(0, "updates between two looks of the alarm; 0: after epochs only")
    alarm_lr: float = key(0.5, "a rollback multiplies the learning rate by this")
    alarm_rollbacks: int = key(3, "rollbacks before the run is stopped")
    analyse_every: int = key(1, "epochs between two analyses, where the recipe names any")
    analyse_images: int = key(64, "images analysed, the same each time, of the training and of the held-out set")


LEAST = {  # the smallest value of keys that are numbers
    "epochs": 1,
    "lr_base_size": 1,
    "warmup_epochs": 0,
    "warmup_lr": 0,
    "min_lr": 0,
    "weight_decay": 0,
    "momentum": 0,
    "grad_accum_steps": 1,
    "save_every": 0,
    "save_minutes": 0,
    "evaluate_every": 1,
    "select_images": 1,
    "alarm_images": 1,
    "alarm_steps": 2,
    "alarm_every": 0,
    "alarm_rollbacks": 0,
    "analyse_every": 1,
    "analyse_images": 1,
}
SEEDS = 2**63  # what PyTorch takes as a seed
POSITIVE = ("lr", "lr_base", "clip_grad")
SHARES = ("holdout", "model_ema_decay")  # from 0 to below 1
FACTORS = ("alarm_gap", "alarm_lr")  # above 0, at most 1


def check_train(train: TrainConfig, source: str) -> None:
    """What types alone cannot say.

    `train` is that section; `source` is where it comes from, for an error.
    """
    check_finite(train, f"{source}: train")
    for name, least in LEAST.items():
        _expect(train, name, lambda value, least=least: value >= least, f"at least {least}", source)  # type: ignore[misc]
    for name in POSITIVE:
        _expect(train, name, lambda value: value > 0, "a number above 0", source)
    for name in SHARES:
        _expect(train, name, lambda value: 0 <= value < 1, "a number from 0 to below 1", source)
    for name in FACTORS:
        _expect(train, name, lambda value: 0 < value <= 1, "a number above 0 and at most 1", source)
    _check_schedule(train, source)


def _expect(train: TrainConfig, name: str, fine: Callable[[float], bool], expected: str, source: str) -> None:
    """Refuse a value out of its range; null is left alone, its type allows it or not."""
    value = getattr(train, name)
    if value is not None and not fine(value):
        raise ConfigError(f"{source}: train.{name} = {value}, expected {expected}.")


def _check_schedule(train: TrainConfig, source: str) -> None:
    if train.sched == "none":
        if train.warmup_epochs:
            raise ConfigError(
                f"{source}: train.warmup_epochs = {train.warmup_epochs}, but train.sched = none never moves."
            )
        if not train.sched_on_updates:
            raise ConfigError(f"{source}: train.sched_on_updates = False, expected true where train.sched = none.")
    elif train.warmup_epochs >= train.epochs and not train.warmup_prefix:
        raise ConfigError(
            f"{source}: train.warmup_epochs = {train.warmup_epochs}, "
            f"expected fewer than the {train.epochs} of train.epochs."
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole recipe."""

    model: ModelConfig = field(metadata={"help": "which model, and the weights it starts from"})
    attention: tuple[AttentionRule, ...] = key((), "rules that give attention sites their parts, applied in order")
    init: str | dict[str, Any] | None = key(
        None, "a start for the attention weights, before surgery: mimetic, or {use: impulse, size: 3}"
    )
    data: DataConfig = key_from(DataConfig, "images, and how they are augmented")
    task: str | dict[str, Any] = key(
        "supervised", "the objective: supervised, adversarial:eps=4/255, or {use: adversarial, eps: 4/255}"
    )
    gradual: dict[str, Any] | None = key(
        None, "masks that tighten while training: {masks: file, maps: file, epochs: 10, power: 3}"
    )
    analyses: list[str] = key_from(list, "asked while training, e.g. reconstruction:variant=reproduction")
    tracking: list[Any] = key_from(
        list, "where metrics go beside metrics.jsonl: csv, tensorboard, {use: wandb, mode: offline}"
    )
    train: TrainConfig = key_from(
        TrainConfig, "optimisation, precision, what is saved, and what chooses the best weights"
    )
    seed: int = key(0, "of weights, order, augmentation and attacks")
    plugins: list[str] = key_from(list, "modules that are imported first, with pieces of your own")
    out: str | None = key(None, "the run folder, or an fsspec URL; null: runs/<name of the recipe>")
    versions: dict[str, str] = key_from(dict, "written into a run's config.yaml, ignored in a recipe")
    started: str | None = key(None, "written into a run's config.yaml, ignored in a recipe")


def read_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """A recipe file with `section.key=value` overrides applied, checked whole.

    `path` is the YAML file, `overrides` are applied in order (default: none).
    """
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
    """What types alone cannot say.

    `config` is the whole recipe; `source` is where it comes from, for an error.
    """
    check_train(config.train, source)
    if not -SEEDS <= config.seed < SEEDS:
        raise ConfigError(f"{source}: seed = {config.seed}, expected a number of at most 63 bits.")
