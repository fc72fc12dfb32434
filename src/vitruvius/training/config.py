"""The recipe of a training run and the file of a sweep: sections that pydantic checks, timm's option names kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from vitruvius._config import Spec, build, key, override, required, section
from vitruvius._errors import ConfigError
from vitruvius._recipes import find_recipe
from vitruvius._yaml import read_yaml, to_plain
from vitruvius.data import DataConfig
from vitruvius.models.config import AttentionRule, ModelConfig

logger = logging.getLogger(__name__)

SEEDS = 2**63  # what PyTorch takes as a seed
DEFAULT_RATE = 1e-3


@section("train.keep")
class Keep:
    """Which epochs' weights stay in the run folder, as kept/epoch_0010.safetensors, counted from 1."""

    every: int = key(0, "those of every Nth epoch; 0: none", ge=0)
    best: int = key(0, "those of the N epochs that did best on the held-out images; 0: none", ge=0)


@section("train")
class TrainConfig:
    """How a model is trained; docs/keys.md lists every key."""

    epochs: int = key(10, "passes over the training images, warm-up included unless warmup_prefix", ge=1)
    opt: str = key("adamw", "the optimiser, by timm's name")
    lr: float | None = key(None, "peak learning rate; null: from lr_base if that is given, else 1e-3", gt=0)
    lr_base: float | None = key(None, "learning rate for lr_base_size images, scaled to the global batch", gt=0)
    lr_base_size: int = key(256, "images per update that lr_base is meant for", ge=1)
    lr_base_scale: Literal["", "linear", "sqrt"] = key(
        "", "how lr_base is scaled; empty: sqrt for Adam- and LAMB-type optimisers, linear for others"
    )
    weight_decay: float = key(0.05, "weight decay, decoupled where the optimiser is", ge=0)
    momentum: float = key(0.9, "momentum of optimisers that have one", ge=0)
    opt_eps: float | None = key(None, "eps of the optimiser; null: its own", ge=0)
    opt_betas: tuple[float, float] | None = key(None, "betas of the optimiser; null: its own")
    opt_kwargs: dict[str, Any] = key({}, "anything else that the optimiser takes")
    filter_bias_and_bn: bool = key(True, "no weight decay on biases, norms and other vectors")
    layer_decay: float | None = key(None, "factor of the rate from a layer to the one before; null: none", gt=0, le=1)
    layer_decay_min_scale: float = key(0.0, "the smallest factor that layer_decay reaches", ge=0, le=1)
    sched: Literal["cosine", "tanh", "step", "multistep", "plateau", "poly", "none"] = key(
        "cosine", "the schedule of the learning rate, by timm's name; none: constant"
    )
    sched_on_updates: bool = key(True, "move the rate at every update; false: after whole epochs, as timm by default")
    warmup_epochs: int = key(0, "epochs in which the rate rises from warmup_lr to lr", ge=0)
    warmup_lr: float = key(1e-6, "learning rate at the start of the warm-up", ge=0)
    warmup_prefix: bool = key(False, "the warm-up comes before the schedule and lengthens the run")
    min_lr: float = key(1e-6, "learning rate at the end of the schedule", ge=0)
    cooldown_epochs: int = key(0, "epochs at min_lr after the schedule, which lengthen the run", ge=0)
    decay_epochs: int = key(30, "sched step: epochs between two decays", ge=1)
    decay_milestones: tuple[int, ...] = key((90, 180, 270), "sched multistep: epochs at which the rate decays")
    decay_rate: float = key(0.1, "sched step, multistep, plateau: factor of a decay; sched poly: its power", gt=0)
    patience_epochs: int = key(10, "sched plateau: epochs without progress before a decay", ge=0)
    lr_noise: tuple[float, ...] | None = key(None, "parts of the run with a noisy rate, e.g. [0.4, 0.9]; null: never")
    lr_noise_pct: float = key(0.67, "the largest share by which noise changes the rate", ge=0)
    lr_noise_std: float = key(1.0, "standard deviation of that noise", ge=0)
    lr_cycle_mul: float = key(1.0, "sched cosine, tanh, poly: each cycle is so many times as long as the last", gt=0)
    lr_cycle_decay: float = key(0.5, "factor of the peak rate from each cycle to the next", ge=0)
    lr_cycle_limit: int = key(1, "number of cycles", ge=1)
    lr_k_decay: float = key(1.0, "sched cosine, poly: exponent of the share of the run that is done", gt=0)
    clip_grad: float | None = key(None, "limit for gradients; null: none", gt=0)
    clip_mode: Literal["norm", "value", "agc"] = key(
        "norm",
        "what is limited: the norm of all gradients, every value, or unit-wise norms relative to the weights (agc)",
    )
    grad_accum_steps: int = key(1, "batches per update", ge=1)
    model_ema: bool = key(False, "keep a running average of the weights, evaluated and saved beside them")
    model_ema_decay: float = key(0.9998, "decay of that average per update", ge=0, lt=1)
    model_ema_warmup: bool = key(False, "let that decay rise from 0 at the start of a run")
    precision: Literal["fp32", "bf16", "fp16", "auto"] = key(
        "fp32", "of the forward and backward passes; weights stay fp32; auto: bf16 where the device is faster in it"
    )
    compile: bool | str = key(
        "auto",
        "auto: blocks and recorded steps on a GPU where that is safe; true: the whole model; or a backend's name",
    )
    compile_mode: str | None = key(None, "torch.compile's mode; reduce-overhead replays CUDA graphs")
    grad_checkpointing: bool = key(False, "compute activations again in the backward pass to save memory")
    channels_last: bool = key(False, "keep images and convolutions in channels-last layout")
    device: str = key("auto", "auto: the accelerator that PyTorch finds, else the CPU; or a device such as cuda:1")
    parallel: Literal["ddp", "fsdp"] = key("ddp", "what processes hold: a whole model each, or a share of the weights")
    sync_bn: bool = key(False, "batch norms take their statistics from the batches of all processes together")
    dist_bn: Literal["reduce", "broadcast", "none"] = key(
        "reduce", "running statistics of batch norms before an evaluation: their mean over processes, or the first's"
    )
    nonfinite: Literal["stop", "skip"] = key("stop", "a loss that is not finite: end the run, or leave the update out")
    save_every: int = key(0, "save the state every N updates; 0: after epochs only", ge=0)
    save_minutes: float = key(0.0, "and every N minutes; 0: not by the clock", ge=0)
    keep: Keep = key(Keep(), "weights of more epochs than the best and the last: {every: 10, best: 3}")
    holdout: float = key(0.1, "share of training images that choose the weights; 0: the validation split", ge=0, lt=1)
    evaluate_every: int = key(1, "epochs between two evaluations", ge=1)
    select: Literal["auto", "clean", "robust"] = key(
        "auto", "what chooses the best weights: clean or robust accuracy; auto: robust if the task has a threat"
    )
    select_threat: str | None = key(
        None, "the attack that chooses; null: fgsm, then pgd with 10 steps, its worst iterate, in the task's ball"
    )
    select_images: int | None = key(None, "held-out images attacked; null: for a tenth of an epoch, 64 or more", ge=1)
    alarm: Literal["auto", "none", "report", "stop", "rollback"] = key(
        "auto", "what catastrophic overfitting does; auto: report if the task has a threat"
    )
    alarm_gap: float = key(0.25, "single-step minus multi-step accuracy above which training has collapsed", gt=0, le=1)
    alarm_images: int | None = key(None, "held-out images that it attacks; null: as many as choose, at most 128", ge=1)
    alarm_steps: int = key(10, "steps of the alarm's multi-step attack", ge=2)
    alarm_every: int = key(0, "updates between two looks of the alarm; 0: after epochs only", ge=0)
    alarm_lr: float = key(0.5, "a rollback multiplies the learning rate by this", gt=0, le=1)
    alarm_rollbacks: int = key(3, "rollbacks before the run is stopped", ge=0)
    analyse_every: int = key(1, "epochs between two analyses, where the recipe names any", ge=1)
    analyse_images: int = key(64, "images analysed, the same each time, of the training and of the held-out set", ge=1)

    def __post_init__(self) -> None:
        if self.sched == "none":
            if self.warmup_epochs:
                raise ConfigError(f"train.warmup_epochs = {self.warmup_epochs}, but train.sched = none never moves.")
            if not self.sched_on_updates:
                raise ConfigError("train.sched_on_updates = False, expected true where train.sched = none.")
        elif self.warmup_epochs >= self.epochs and not self.warmup_prefix:
            expected = f"expected fewer than the {self.epochs} of train.epochs."
            raise ConfigError(f"train.warmup_epochs = {self.warmup_epochs}, {expected}")
        peak = self.lr or DEFAULT_RATE
        ends_low = self.sched in ("cosine", "tanh", "poly", "plateau")
        if self.lr_base is None and self.min_lr > peak and ends_low:  # a base rate is scaled to the batch later
            raise ConfigError(f"train.min_lr = {self.min_lr:g}, expected at most the peak rate, train.lr = {peak:g}.")


@section("gradual")
class Gradual:
    """Masks that tighten while training, from the files that `vitruvius masks` and `vitruvius maps` write."""

    masks: str = required("file with the final masks")
    maps: str = required("file with the average attention maps, which say in what order connections go")
    epochs: int = required("epochs until the masks are final", ge=1)
    power: float = key(3.0, "exponent of the way there; larger prunes earlier", gt=0)


@section("recipe")
class Config:
    """A whole recipe."""

    model: ModelConfig = required("which model, and the weights it starts from")
    attention: tuple[AttentionRule, ...] = key((), "rules that give attention sites their parts, applied in order")
    init: str | dict[str, Any] | None = key(None, "initial attention weights: mimetic, or {use: impulse, size: 3}")
    data: DataConfig = key(DataConfig(), "images, and how they are augmented")
    task: str | dict[str, Any] = key("supervised", "the objective: supervised, trades:eps=4/255, {use: free, eps: 0.1}")
    gradual: Gradual | None = key(None, "masks that tighten: {masks: file, maps: file, epochs: 10, power: 3}")
    analyses: list[str] = key([], "asked while training, e.g. reconstruction:variant=reproduction")
    tracking: list[Spec] = key([], "where metrics go, too: csv, tensorboard, {use: wandb, mode: offline}")
    train: TrainConfig = key(TrainConfig(), "optimisation, precision, what is saved, and what chooses the best weights")
    seed: int = key(0, "of weights, order, augmentation and attacks", ge=-SEEDS, lt=SEEDS)
    plugins: list[str] = key([], "modules that are imported first, with pieces of your own")
    out: str | None = key(None, "the run folder, or an fsspec URL; null: runs/<name of the recipe>")
    versions: dict[str, str] = key({}, "written into a run's config.yaml, ignored in a recipe")
    started: str | None = key(None, "written into a run's config.yaml, ignored in a recipe")
    processes: tuple[int, ...] = key((), "how many have trained the run, in turn; written there, ignored in a recipe")


def read_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """A recipe file with `section.key=value` overrides applied, checked whole."""
    overrides = list(overrides)
    data = shorten_warmup(override(read_yaml(path), overrides), overrides)
    if data.get("out") is None:
        data["out"] = str(Path("runs") / Path(path).stem)
    return build(Config, data, source=str(path))


def shorten_warmup(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A recipe tried with fewer epochs than its warm-up has gets a shorter one, unless that was asked for too."""
    asked = {text.partition("=")[0] for text in overrides}
    train = data.get("train")
    if "train.epochs" not in asked or not isinstance(train, dict) or "train.warmup_epochs" in asked:
        return data
    epochs, warmup = train["epochs"], train.get("warmup_epochs", 0)
    if not isinstance(epochs, int) or not isinstance(warmup, int) or train.get("warmup_prefix"):
        return data
    if 0 < epochs <= warmup:
        logger.warning(
            "train.epochs=%d: the recipe's warm-up of %d epochs is shortened to %d.", epochs, warmup, epochs - 1
        )
        return {**data, "train": {**train, "warmup_epochs": epochs - 1}}
    return data


Recipe = Config | Mapping[str, Any] | str | Path


def as_config(recipe: Recipe, overrides: Iterable[str] = ()) -> Config:
    """A recipe in any of its forms as a checked Config.

    recipe: a Config; the name of a packaged recipe, such as "digits/softmax"; the path of a YAML file; or a mapping
    with the sections of a recipe. overrides: `section.key=value` settings applied on top, none by default.
    """
    if isinstance(recipe, str | Path):
        return read_recipe(find_recipe(recipe), overrides)
    overrides = list(overrides)
    if isinstance(recipe, Config) and not overrides:
        return recipe
    if isinstance(recipe, Config):
        recipe = to_plain(recipe)
    if not isinstance(recipe, Mapping):
        expected = "a name such as 'digits/softmax', the path of a YAML file, a mapping with its sections, or a Config"
        raise ConfigError(f"{recipe!r} is not a recipe; expected {expected}.")
    return build(Config, shorten_warmup(override(recipe, overrides), overrides), source="the recipe")


@section("sweep.evaluate")
class EvaluationPlan:
    """How each run is judged when it is trained, as by `vitruvius evaluate`."""

    threats: tuple[str, ...] = required("as `vitruvius evaluate --threat` takes them: pgd:eps=4/255")
    images: int | None = key(None, "how many images, a fixed random choice; null: all", ge=1)
    overrides: tuple[str, ...] = key((), "settings such as data.dataset=…, for other images than the run's own")
    out: str = key("evaluation", "folder inside the run")
    runs: tuple[str, ...] = key(("*",), "patterns of the names of the runs that are judged so")
    start: bool = key(False, "judge the model as the run begins, before its first update, in the folder start/")
    sanity: str | float | None = key(None, "also check for gradient masking at this radius: 8/255, l2:0.5; null: no")
    speed: int = key(0, "also time the forward pass in batches of this many images; 0: no", ge=0)
    cycles: bool = key(False, "also count the cycles of ViTCoD's accelerator; the run must have masks")

    def is_for(self, name: str) -> bool:
        """Whether the run of this `name` is judged so."""
        return any(fnmatchcase(name, pattern) for pattern in self.runs)


@section("sweep.maps")
class MapsPlan:
    """Average attention maps of a trained run, as `vitruvius maps` makes them."""

    of: str = required("the run folder whose attention is averaged")
    file: str = required("where the maps go; made once")
    images: int | None = key(None, "how many training images, a fixed random choice; null: all", ge=1)


@section("sweep.masks")
class MaskPlan:
    """One file of masks, as `vitruvius masks` makes it of the sweep's maps."""

    file: str = required("where the masks go, and what runs name under `file`; made once")
    rule: str = key("information", "which pairs stay: information, random, ratio:…")
    sparsity: float | None = key(None, "share of all pairs that is removed; null: as the rule says")
    budget: Literal["global", "layer", "head"] = key("global", "what removes that share: all sites, every site or head")
    tiles: int | None = key(None, "remove whole tiles of this many queries and keys; null: single pairs", ge=1)


@section("sweep")
class SweepConfig:
    """A sweep file."""

    recipe: str = required("a path, or the name of a packaged recipe")
    grid: dict[str, Any] = key({}, "key: list of values; every combination is a run")
    list: tuple[dict[str, Any], ...] = key((), "sets of overrides, a run each")
    out: str | None = key(None, "folder of the runs; null: runs/sweeps/<name of the file>")
    metric: str | None = key(None, "a column of metrics.jsonl; null: what chooses the best weights")
    order: Literal["max", "min"] = key("max", "whether a larger or a smaller metric is better")
    evaluate: tuple[EvaluationPlan, ...] = key((), "how each run is judged after training, in order")
    maps: MapsPlan | None = key(None, "attention maps of another run, for masks; null: none")
    masks: tuple[MaskPlan, ...] = key((), "files of masks, made of those maps before the first run begins")
