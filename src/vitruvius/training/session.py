"""Everything one training run works with, each part made from its section of the recipe."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.task import TrainingTask
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitruvius._checks import check_takes, device_of, in_eval_mode
from vitruvius._errors import ConfigError
from vitruvius._files import is_url, load_tensors, local_path
from vitruvius._processes import Process
from vitruvius._random import BatchDraws
from vitruvius._registry import read_spec
from vitruvius.analysis.callback import first_images
from vitruvius.attention.low_rank import LowRank
from vitruvius.attention.softmax import multiplies_bfloat16
from vitruvius.data import eval_loader, train_loader
from vitruvius.data.augmentation.mixup import Mixer, make_mixup
from vitruvius.data.identity import Identity, identity_of
from vitruvius.data.loader import Loader
from vitruvius.data.loading import held_out
from vitruvius.data.preprocessing import resolve
from vitruvius.models import PixelModel, create_model
from vitruvius.models.create import create_from_config
from vitruvius.surgery.base import inner
from vitruvius.surgery.calibrating import calibrate_low_rank
from vitruvius.surgery.rewiring import attend_through_sockets
from vitruvius.tasks import Objective, tasks
from vitruvius.training.config import DEFAULT_RATE, Config
from vitruvius.training.fast_step import StepRecorder
from vitruvius.training.losses import Means
from vitruvius.training.parallel import (
    agree_on_statistics,
    bare,
    batch_norms,
    full_weights,
    shard,
    synchronise_batch_norms,
)

logger = logging.getLogger(__name__)

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
CALIBRATION_IMAGES = 512
CALIBRATION_BATCH = 64
TIMED_PIXELS, TIMED_TURNS, TIMED_SECONDS = 2**19, 5, 3.0  # of the gradients that choose a precision
PAYS_FROM = 1.1  # times that a gradient in bfloat16 must be faster


@dataclass(kw_only=True)
class Counters:
    """How far a run has come; every field is saved with the state and restored when the run resumes."""

    epoch: int = 0  # epochs done
    batch: int = 0  # batches of this epoch done
    updates: int = 0  # in the whole run
    elapsed: float = 0.0  # seconds of training in this epoch
    rate: float = 0.0  # learning rate of the last batch
    skipped: int = 0  # updates of this epoch that were left out
    best: float = float("-inf")  # accuracy of the best weights so far
    best_epoch: int = -1
    best_is_ema: bool = False  # whether the best weights are the running average
    rows: list[dict[str, Any]] = field(default_factory=list)  # metrics, one row per epoch
    alarms: int = 0
    rollbacks: int = 0
    group_nonfinite: bool = False  # whether a loss since the last update was not finite


@dataclass(kw_only=True)
class Session(Counters):
    """Model, task, data and optimisation of one run, and how far it has come."""

    config: Config
    process: Process
    model: PixelModel
    task: Objective
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler
    train_loader: Loader
    val_loader: Loader
    mixer: Mixer | None
    num_epochs: int
    updates_per_epoch: int
    means: Means
    fast_step: StepRecorder | None  # compiled blocks and recorded steps, where that is safe
    data_identity: dict[str, Identity]  # of the images trained on, and of those held out
    replica: nn.Module | None  # where weights are sharded: a whole copy to evaluate

    @property
    def is_sharded(self) -> bool:
        """Whether processes share the weights out, and save each their own part."""
        return self.config.train.parallel == "fsdp"

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS.get(self.config.train.precision)
        return nullcontext() if dtype is None else torch.autocast(self.process.device.type, dtype)

    def modules(self) -> dict[str, nn.Module]:
        """The module that is trained and its average, if there is one, by their names in a state."""
        names = ("model", "ema") if self.task.has_ema() else ("model",)
        return {name: bare(self.task, ema=name == "ema") for name in names}

    def eval_model(self, *, ema: bool = False) -> nn.Module:
        """The module to evaluate, whole and unwrapped. Every process must call this."""
        wrapped = bare(self.task, ema=ema)
        if self.replica is None:
            return wrapped
        self.replica.load_state_dict(self.process.broadcast(full_weights(wrapped)))
        return self.replica.train(wrapped.training)

    def weights(self, *, ema: bool = False) -> dict[str, Tensor]:
        """The whole weights under their own names. Every process must call this."""
        wrapped = inner(bare(self.task, ema=ema))
        return wrapped.state_dict() if self.replica is None else full_weights(wrapped)

    def agree_on_statistics(self) -> None:
        """Make the running statistics of batch norms the same everywhere. Every process must call this."""
        for module in self.modules().values():
            agree_on_statistics(module, self.config.train.dist_bn, self.process)


def open_session(config: Config, process: Process, *, fresh: bool = True) -> Session:
    """Data first, since it may be missing; then the model, the task and the optimiser.

    A `fresh` session has no state to resume from: what is fitted to the data before training is fitted now.
    """
    config = with_rate(config, process.world_size)
    loaders = make_loaders(config, process)
    config = with_classes(config, loaders[0].num_classes)
    model = make_model(config, process)
    if config.data.image_size is not None or config.data.in_chans is not None:
        check_takes(model, resolve(config.data, model.data_config).size)
    mean, std = model.statistics  # the normalisation that the model really uses: it is not in the weights
    config = replace(config, model=replace(config.model, mean=mean, std=std))
    config = with_precision(config, model, process)
    if fresh:
        calibrate(model, loaders[0], process, start_folder(config) / "best.safetensors")
    task = make_task(config, model)
    task.draws = BatchDraws(process.rank, process.world_size)
    task.to(process.device)
    if config.train.model_ema:
        together = config.train.parallel != "fsdp"  # sharded weights and whole buffers are averaged one by one
        task.setup_ema(decay=config.train.model_ema_decay, use_warmup=config.train.model_ema_warmup, foreach=together)
    replica = shard(task, config, process)
    optimizer = make_optimizer(config, model, task)
    every = config.train.grad_accum_steps
    if task.replays > 1 and every > 1:
        times = f"the task replays every batch {task.replays} times"
        raise ConfigError(f"train.grad_accum_steps = {every}, but {times}; use 1.")
    updates = math.ceil(len(loaders[0]) / every) * task.replays  # the last of an epoch may see fewer batches
    scheduler, num_epochs = make_scheduler(config, optimizer, updates)
    wrap(task, model, config, process)
    role = "held-out images" if config.train.holdout else "validation images"
    identity = process.on_first(lambda: {"training images": identity_of(loaders[0]), role: identity_of(loaders[1])})
    return Session(
        config=config,
        process=process,
        model=model,
        task=task,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=torch.amp.GradScaler(process.device.type, enabled=config.train.precision == "fp16"),
        train_loader=loaders[0],
        val_loader=loaders[1],
        mixer=make_mixup(config.data, model.num_classes, seed=config.seed, rank=process.rank),
        num_epochs=num_epochs,
        updates_per_epoch=updates,
        means=Means(process),
        fast_step=None,
        data_identity=identity,
        replica=replica,
    )


def describe_session(session: Session) -> list[str]:
    """`data digits: 1,294 images to train on, 143 held out, 10 classes`, and a line about the model."""
    config, process, images = session.config, session.process, session.train_loader
    role = "held out" if config.train.holdout else "for validation"
    data = f"{images.num_images:,} images to train on, {session.val_loader.num_images:,} {role}"
    model = f"{sum(p.numel() for p in session.model.parameters()):,} parameters on {process.device}"
    if process.grouped:
        model += f", {config.train.parallel} in a group of {process.world_size} by {torch.distributed.get_backend()}"
    return [
        f"data {config.data.dataset}: {data}, {images.num_classes:,} classes",
        f"model {config.model.name}: {model}",
    ]


def with_rate(config: Config, world_size: int) -> Config:
    """The recipe with its learning rate as a number: given, or scaled from a base rate to the global batch.

    Linear: Goyal et al. 2017, arXiv:1706.02677; square root: Krizhevsky 2014, arXiv:1404.5997. The global batch is
    images per process × processes × accumulated batches. Unless told otherwise the rule is timm's: the square root for
    Adam- and LAMB-type optimisers, linear for others.
    """
    train = config.train
    if train.lr_base is None:
        return config if train.lr is not None else replace(config, train=replace(train, lr=DEFAULT_RATE))
    batch = config.data.batch_size * world_size * train.grad_accum_steps
    is_adaptive = any(name in train.opt.lower() for name in ("ada", "lamb"))
    rule = train.lr_base_scale or ("sqrt" if is_adaptive else "linear")
    ratio = batch / train.lr_base_size
    rate = train.lr_base * (math.sqrt(ratio) if rule == "sqrt" else ratio)
    if train.lr is not None and not math.isclose(train.lr, rate, rel_tol=1e-9):
        scaled = f"{rate:.6g} for a global batch of {batch} ({rule}, base {train.lr_base_size})"
        raise ConfigError(
            f"train.lr = {train.lr}, but train.lr_base = {train.lr_base} means {scaled}. Give one of them."
        )
    logger.debug("learning rate %.6g: %s from %g at %d to %d", rate, rule, train.lr_base, train.lr_base_size, batch)
    return replace(config, train=replace(train, lr=rate, lr_base_scale=rule))


# data


def shares_of(process: Process, model: PixelModel) -> dict[str, Any]:
    """What every loader of a run is told: the model's preprocessing, and the part of this process."""
    share = {"rank": process.rank, "world_size": process.world_size, "device": process.device}
    return {"input_size": model.data_config, **share}


def make_loaders(config: Config, process: Process) -> tuple[Loader, Loader]:
    """Training images, and those that choose the best weights: a held-out part, or the validation split."""
    with torch.device("meta"):  # what matters of it is known without allocating it
        data, shares = config.data, shares_of(process, create_model(config.model.name, **config.model.kwargs))
    if not config.train.holdout:
        return train_loader(data, seed=config.seed, **shares), eval_loader(data, **shares)
    chosen = held_out(data, config.train.holdout, seed=config.seed)
    train = train_loader(data, seed=config.seed, exclude=chosen, **shares)
    return train, eval_loader(data, split=data.train_split, only=chosen, **shares)


def selection_loader(session: Session, images: int, *, whole: bool = False) -> Loader:
    """At most this many of the images that choose, a fixed random choice; `whole`: all of them on every process."""
    config, process = session.config, session.process
    if not whole and images >= session.val_loader.num_images:
        return session.val_loader
    shares = shares_of(replace(process, rank=0, world_size=1) if whole else process, session.model)
    if not config.train.holdout:
        images = min(images, session.val_loader.num_images)
        return eval_loader(replace(config.data, val_num_samples=images), **shares)
    chosen = held_out(config.data, config.train.holdout, seed=config.seed)
    if images < len(chosen):
        generator = torch.Generator().manual_seed(config.seed)
        chosen = chosen[torch.randperm(len(chosen), generator=generator)[:images].sort().values]
    return eval_loader(config.data, split=config.data.train_split, only=chosen, **shares)


def with_classes(config: Config, num_classes: int) -> Config:
    """The recipe with the data's number of classes, unless it names one itself."""
    named = config.model.kwargs.get("num_classes")
    if named is None:
        kwargs = {**config.model.kwargs, "num_classes": num_classes}
        return replace(config, model=replace(config.model, kwargs=kwargs))
    if named < num_classes:
        raise ConfigError(f"model.kwargs.num_classes = {named}, but {config.data.dataset} has {num_classes} classes.")
    return config


# model and task


def make_model(config: Config, process: Process) -> PixelModel:
    model = create_from_config(config.model, config.attention, init=config.init, seed=config.seed)
    model.to(process.device)
    if config.train.channels_last:
        model.to(memory_format=torch.channels_last)
    if config.train.sync_bn and process.world_size > 1:
        synchronise_batch_norms(model)
    if config.train.grad_checkpointing:
        try:
            model.model.set_grad_checkpointing()  # type: ignore[operator]
        except (AttributeError, AssertionError):
            raise ConfigError(f"train.grad_checkpointing = true, but {config.model.name} does not offer it.") from None
    return model


def start_folder(config: Config) -> Path:
    """Where a run keeps its model as it starts, if a sweep judges that."""
    folder = str(config.out)
    return (local_path(folder) if is_url(folder) else Path(folder)) / "start"


def calibrate(model: PixelModel, loader: Loader, process: Process, kept: Path) -> None:
    """Fit the auto-encoders with `start: calibrated` to the dense model's attention maps on training images.

    The first process does it, the others take its weights; `kept` are those of a start that was judged already.
    """
    if not any(isinstance(part, LowRank) and part.start == "calibrated" for part in model.modules()):
        return

    def fitted() -> dict[str, Tensor]:
        if kept.is_file():
            return load_tensors(kept)[0]
        images = first_images(loader, CALIBRATION_IMAGES)
        calibrate_low_rank(model, images.to(device_of(model)).split(CALIBRATION_BATCH))
        return {name: value.detach().cpu() for name, value in inner(model).state_dict().items()}

    inner(model).load_state_dict(process.on_first(fitted))


def make_task(config: Config, model: nn.Module) -> Objective:
    """The objective the recipe names; label smoothing is the data's unless the task says otherwise."""
    name, settings = read_spec(config.task, where="task")
    if "smoothing" in inspect.signature(tasks.get(name, where="task")).parameters:
        settings.setdefault("smoothing", config.data.smoothing)
    task = tasks.make({"use": name, **settings}, model, where="task")
    if not isinstance(task, Objective):
        raise ConfigError(f"task {name!r} makes a {type(task).__name__}; expected a vitruvius.tasks.Objective.")
    return task


def wrap(task: TrainingTask, model: PixelModel, config: Config, process: Process) -> None:
    """The compiler, then the other processes, in the order that timm's tasks expect."""
    if config.train.compile and config.train.compile != "auto":  # auto: see fast_step.py
        how, mode = config.train.compile, config.train.compile_mode
        try:
            task.compile(backend=how if isinstance(how, str) else "inductor", mode=mode)
        except Exception as error:  # nothing is compiled yet: only the settings can be wrong
            text = f"train.compile = {how!r} with compile_mode = {mode!r} cannot be used: {error}"
            raise ConfigError(text) from error
    if process.grouped and config.train.parallel == "ddp":
        task.prepare_distributed(**ddp_settings(model, config, process))
        # Have DDP let go of its reducer before the process group: attributes go in the order in which they came. A
        # group that the reducer is the last to hold is freed with the GIL, waiting for gloo's thread, which may be
        # waiting for the GIL: with torch 2.11 on CPUs, one run in a few never ended.
        for module in task.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                vars(module)["group_held_to_the_end"] = module.process_group


def ddp_settings(model: PixelModel, config: Config, process: Process) -> dict[str, Any]:
    """How DistributedDataParallel wraps a model."""
    with in_eval_mode(model), torch.enable_grad():  # weights without a gradient, as of queries that a core discards
        model(grey_images(model, config, 2)).float().sum().backward()
    idle = any(weight.requires_grad and weight.grad is None for weight in model.parameters())
    model.zero_grad(set_to_none=True)
    settings: dict[str, Any] = {"find_unused_parameters": idle}
    if config.train.dist_bn == "reduce" and batch_norms(model):
        # or the first process's images alone would count; older torch calls the setting broadcast_buffers
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        settings["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
    if process.device.type != "cpu":
        settings["device_ids"] = [process.device]
    return settings


def image_shape(model: PixelModel, config: Config) -> tuple[int, int, int]:
    """Channels, height and width of the images that are trained on."""
    return resolve(config.data, model.data_config).size


def grey_images(model: PixelModel, config: Config, number: int) -> Tensor:
    """(number, C, H, W) of that size."""
    return torch.full((number, *image_shape(model, config)), 0.5, device=device_of(model))


# precision


def with_precision(config: Config, model: PixelModel, process: Process) -> Config:
    """The recipe with `train.precision: auto` resolved: bf16 where this device computes faster in it, else fp32.

    A processor is asked by timing a gradient; a GPU that multiplies bfloat16 is always faster in it. On a processor
    that trains in bfloat16 a model without sockets gets some.
    """
    on_cpu = process.device.type == "cpu"
    if config.train.precision == "auto":
        if on_cpu:
            pays = process.on_first(lambda: multiplies_bfloat16() and bfloat16_pays(model, config))
        else:
            pays = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
        precision: Literal["bf16", "fp32"] = "bf16" if pays else "fp32"
        logger.info("train.precision = auto: %s on this %s", precision, process.device.type)
        config = replace(config, train=replace(config.train, precision=precision))
    if on_cpu and config.train.precision == "bf16" and multiplies_bfloat16():
        attend_through_sockets(model)
    return config


def bfloat16_pays(model: PixelModel, config: Config) -> bool:
    """Whether a gradient of a small batch takes less time in bfloat16 than in float32, by the fastest of a few."""
    pixels = grey_images(model, config, 1).numel()
    x = grey_images(model, config, max(1, min(config.data.batch_size, TIMED_PIXELS // pixels)))
    models = {True: attend_through_sockets(copy.deepcopy(model)), False: model}
    fastest, end = {True: math.inf, False: math.inf}, time.perf_counter() + TIMED_SECONDS
    with in_eval_mode(models[True]), in_eval_mode(model), torch.enable_grad():
        for turn in range(TIMED_TURNS):
            for lower, timed in models.items():
                start = time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16, enabled=lower):
                    timed(x).float().sum().backward()
                fastest[lower] = min(fastest[lower], time.perf_counter() - start)
            if turn and time.perf_counter() > end:  # the first turn warms up
                break
    model.zero_grad(set_to_none=True)
    logger.debug("a gradient of %d images takes %.4f s in bfloat16, %.4f in float32", len(x), *fastest.values())
    return fastest[True] * PAYS_FROM < fastest[False]


# optimisation


def make_optimizer(config: Config, model: nn.Module, task: TrainingTask) -> torch.optim.Optimizer:
    """timm's optimiser of that name, with its parameter groups; frozen weights stay out of it."""
    train = config.train
    shared = ("opt", "lr", "weight_decay", "momentum", "filter_bias_and_bn", "layer_decay", "layer_decay_min_scale")
    settings: dict[str, Any] = {name: getattr(train, name) for name in shared}
    settings |= {
        name: value for name, value in (("eps", train.opt_eps), ("betas", train.opt_betas)) if value is not None
    }
    settings |= fused_setting(train.opt, train.opt_kwargs, model)
    try:
        optimizer = create_optimizer_v2(inner(model), **settings, **train.opt_kwargs)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise ConfigError(f"train.opt = {train.opt!r} cannot be made: {error}") from error
    # what a task trains besides the model, such as the projection of a feature distillation
    of_model = {id(p) for p in model.parameters()}
    trained: Any = task.get_trainable_module()
    of_task = [p for p in trained.parameters() if p.requires_grad and id(p) not in of_model]
    if of_task:
        optimizer.add_param_group({"params": of_task, "weight_decay": train.weight_decay})
    return optimizer


def fused_setting(name: str, opt_kwargs: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """On an NVIDIA GPU and on a CPU PyTorch's own optimisers are fused, unless the recipe says how.

    Operation by operation, DeiT-Tiny keeps the host longer than the GPU, and the digits' ViT a CPU twice as long.
    """
    has_kernels = all(parameter.is_cuda or parameter.is_cpu for parameter in model.parameters())
    if not has_kernels or {"fused", "foreach"} & set(opt_kwargs) or name not in list_optimizers():
        return {}
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return {"fused": True} if can_fuse(get_optimizer_info(name).opt_class, sharded=sharded) else {}


def can_fuse(optimizer_class: Any, *, sharded: bool) -> bool:
    """Whether an optimiser has one kernel for all weights; for `sharded` ones (FSDP2) only Adam and AdamW have."""
    if sharded and optimizer_class not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    return optimizer_class.__module__.startswith("torch.") and "fused" in inspect.signature(optimizer_class).parameters


def make_scheduler(config: Config, optimizer: torch.optim.Optimizer, updates: int) -> tuple[Any, int]:
    """timm's scheduler, moved by every update (or every epoch); and the number of epochs, cool-down included."""
    train = config.train
    shared = ("sched", "warmup_epochs", "warmup_lr", "warmup_prefix", "min_lr", "cooldown_epochs", "decay_epochs")
    settings = {name: getattr(train, name) for name in (*shared, "decay_rate", "patience_epochs")}
    of_rate = ("noise_pct", "noise_std", "cycle_mul", "cycle_decay", "cycle_limit", "k_decay")
    settings |= {name: getattr(train, f"lr_{name}") for name in of_rate}
    with warnings.catch_warnings():  # timm does not save the counters of a plateau; the state of a run does
        warnings.filterwarnings("ignore", "PlateauLRScheduler is deprecated", FutureWarning)
        return create_scheduler_v2(
            optimizer,
            num_epochs=train.epochs,
            decay_milestones=list(train.decay_milestones),
            noise=None if train.lr_noise is None else list(train.lr_noise),
            noise_seed=config.seed,
            step_on_epochs=train.sched == "plateau" or not train.sched_on_updates,
            updates_per_epoch=updates,
            **settings,
        )
