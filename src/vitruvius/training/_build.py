"""What a training session is made of, piece by piece, each from its section of the recipe."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.task import TrainingTask
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitruvius._checks import device_of
from vitruvius._errors import ConfigError
from vitruvius._processes import Process
from vitruvius._registry import read_spec
from vitruvius.analysis import first_images
from vitruvius.attention.low_rank import LowRank
from vitruvius.data import Loader, eval_loader, held_out, train_loader
from vitruvius.models import PixelModel, create_from_config, create_model
from vitruvius.surgery import inner
from vitruvius.surgery.calibrating import calibrate_low_rank
from vitruvius.tasks import Objective, evaluating, tasks
from vitruvius.training._parallel import batch_norms, synchronise_batch_norms
from vitruvius.training.config import Config

CALIBRATION_IMAGES = 512
CALIBRATION_BATCH = 64


def preprocessing(config: Config) -> dict[str, Any]:
    """Input size, interpolation and crop of the model, learned without allocating it."""
    with torch.device("meta"):
        model = create_model(config.model.name, **config.model.kwargs)
    return model.data_config


def with_classes(config: Config, num_classes: int) -> Config:
    """The recipe with the data's number of classes, unless it names one itself."""
    named = config.model.kwargs.get("num_classes")
    if named is None:
        kwargs = {**config.model.kwargs, "num_classes": num_classes}
        return replace(config, model=replace(config.model, kwargs=kwargs))
    if named < num_classes:
        raise ConfigError(f"model.kwargs.num_classes = {named}, but {config.data.dataset} has {num_classes} classes.")
    return config


def with_statistics(config: Config, model: PixelModel) -> Config:
    """The recipe with the normalisation that the model really uses: it is not in the weights."""
    mean, std = model.statistics
    return replace(config, model=replace(config.model, mean=mean, std=std))


def loaders(config: Config, process: Process) -> tuple[Loader, Loader]:
    """Training images, and those that choose the best weights: a held-out part, or the validation split."""
    shares: dict[str, Any] = {
        "input_size": preprocessing(config),
        "rank": process.rank,
        "world_size": process.world_size,
        "device": process.device,
    }
    data = config.data
    holdout = config.train.holdout
    if not holdout:
        return train_loader(data, seed=config.seed, **shares), eval_loader(data, **shares)
    chosen = held_out(data, holdout, seed=config.seed)
    train = train_loader(data, seed=config.seed, exclude=chosen, **shares)
    return train, eval_loader(data, split=data.train_split, only=chosen, **shares)


def model(config: Config, process: Process) -> PixelModel:
    """The recipe's model on this process's device."""
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


def task(config: Config, model: nn.Module) -> Objective:
    """The objective the recipe names; label smoothing is the data's unless the task says otherwise."""
    name, settings = read_spec(config.task, where="task")
    if "smoothing" in inspect.signature(tasks.get(name, where="task")).parameters:
        settings.setdefault("smoothing", config.data.smoothing)
    made = tasks.make({"use": name, **settings}, model, where="task")
    if not isinstance(made, Objective):
        raise ConfigError(f"task {name!r} makes a {type(made).__name__}; expected a vitruvius.tasks.Objective.")
    return made


def wrap(task: TrainingTask, model: PixelModel, config: Config, process: Process) -> None:
    """The compiler, then the other processes, in the order that timm's tasks expect."""
    if config.train.compile and config.train.compile != "auto":  # auto: see training/_fast
        compile_task(task, config.train.compile, config.train.compile_mode)
    if process.grouped and config.train.parallel == "ddp":
        task.prepare_distributed(**ddp_settings(model, config, process))
        _hold_group(task)


def ddp_settings(model: PixelModel, config: Config, process: Process) -> dict[str, Any]:
    """How DistributedDataParallel wraps a model."""
    settings: dict[str, Any] = {"find_unused_parameters": bool(idle_parameters(model, config))}
    if config.train.dist_bn == "reduce" and batch_norms(model):
        settings[_buffer_setting()] = False  # or the first process's images alone would count
    if process.device.type != "cpu":
        settings["device_ids"] = [process.device]
    return settings


def _buffer_setting() -> str:
    """DDP's name for sending the first process's buffers around before every pass; older torch has another."""
    if "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters:
        return "forward_sync_buffers"
    return "broadcast_buffers"


def idle_parameters(model: PixelModel, config: Config) -> list[str]:
    """Weights that get no gradient, such as the norm of queries that a core discards; found by one backward pass."""
    channels, height, width = model.data_config["input_size"]
    data = config.data
    shape = (2, data.in_chans or channels, data.image_size or height, data.image_size or width)
    with evaluating(model), torch.enable_grad():
        logits: Tensor = model(torch.full(shape, 0.5, device=device_of(model)))
        logits.float().sum().backward()
    idle = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    model.zero_grad(set_to_none=True)
    return idle


def _hold_group(task: TrainingTask) -> None:
    """Have DDP let go of its reducer before the process group: attributes go in the order in which they came.

    A group that the reducer is the last to hold is freed with the GIL, waiting for gloo's thread, which may be waiting
    for the GIL: with torch 2.11 on CPUs, one run in a few never ended.
    """
    for module in task.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            vars(module)["group_held_to_the_end"] = module.process_group


def updates_per_epoch(config: Config, loader: Loader, task: Objective) -> int:
    """Updates in an epoch; the last may see fewer batches. A task that replays its batches updates after each."""
    every = config.train.grad_accum_steps
    if task.replays > 1 and every > 1:
        raise ConfigError(
            f"train.grad_accum_steps = {every}, but the task replays every batch {task.replays} times; use 1."
        )
    return math.ceil(len(loader) / every) * task.replays


def compile_task(task: TrainingTask, how: bool | str, mode: str | None) -> None:
    """torch.compile; `how` may name its backend."""
    try:
        task.compile(backend=how if isinstance(how, str) else "inductor", mode=mode)
    except Exception as error:  # nothing is compiled yet: only the words can be wrong
        raise ConfigError(f"train.compile = {how!r} with compile_mode = {mode!r} cannot be used: {error}") from error


def optimizer(config: Config, model: nn.Module, task: TrainingTask) -> torch.optim.Optimizer:
    """timm's optimiser of that name, with its parameter groups; frozen weights stay out of it."""
    train = config.train
    extras = {"eps": train.opt_eps, "betas": train.opt_betas, **_in_one_kernel(train.opt, train.opt_kwargs, model)}
    try:
        made = create_optimizer_v2(
            inner(model),
            opt=train.opt,
            lr=train.lr,
            weight_decay=train.weight_decay,
            momentum=train.momentum,
            filter_bias_and_bn=train.filter_bias_and_bn,
            layer_decay=train.layer_decay,
            layer_decay_min_scale=train.layer_decay_min_scale,
            **{key: value for key, value in extras.items() if value is not None},
            **train.opt_kwargs,
        )
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise ConfigError(f"train.opt = {train.opt!r} cannot be made: {error}") from error
    own = _of_the_task(model, task)
    if own:
        made.add_param_group({"params": own, "weight_decay": train.weight_decay})
    return made


def _in_one_kernel(name: str, asked: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """On an NVIDIA GPU, PyTorch's own optimisers update all weights in one launch unless the recipe says how.

    An update of DeiT-Tiny in a hundred launches keeps the host longer than the GPU.
    """
    if not all(parameter.is_cuda for parameter in model.parameters()) or {"fused", "foreach"} & set(asked):
        return {}
    if name not in list_optimizers():
        return {}
    made = get_optimizer_info(name).opt_class
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if can_fuse(made, sharded=sharded):
        return {"fused": True}
    return {}


def can_fuse(made: Any, *, sharded: bool) -> bool:
    """Whether an optimiser has one kernel for all weights.

    made: its class.
    sharded: whether the weights are split over processes (FSDP2); PyTorch can then fuse Adam and AdamW alone.
    """
    if sharded and made not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    return made.__module__.startswith("torch.") and "fused" in inspect.signature(made).parameters


def _of_the_task(model: nn.Module, task: TrainingTask) -> list[nn.Parameter]:
    """What a task trains besides the model, such as the projection of a feature distillation."""
    known = {id(p) for p in model.parameters()}
    trained: Any = task.get_trainable_module()
    return [p for p in trained.parameters() if p.requires_grad and id(p) not in known]


def scheduler(config: Config, optimizer: torch.optim.Optimizer, updates: int) -> tuple[Any, int]:
    """timm's scheduler, moved by every update (or every epoch); and the number of epochs, cool-down included."""
    with warnings.catch_warnings():  # timm does not save the counters of a plateau; the state of a run does
        warnings.filterwarnings("ignore", "PlateauLRScheduler is deprecated", FutureWarning)
        return _make_scheduler(config, optimizer, updates)


def _make_scheduler(config: Config, optimizer: torch.optim.Optimizer, updates: int) -> tuple[Any, int]:
    train = config.train
    return create_scheduler_v2(
        optimizer,
        sched=train.sched,
        num_epochs=train.epochs,
        warmup_epochs=train.warmup_epochs,
        warmup_lr=train.warmup_lr,
        warmup_prefix=train.warmup_prefix,
        min_lr=train.min_lr,
        cooldown_epochs=train.cooldown_epochs,
        decay_epochs=train.decay_epochs,
        decay_milestones=list(train.decay_milestones),
        decay_rate=train.decay_rate,
        patience_epochs=train.patience_epochs,
        noise=None if train.lr_noise is None else list(train.lr_noise),
        noise_pct=train.lr_noise_pct,
        noise_std=train.lr_noise_std,
        noise_seed=config.seed,
        cycle_mul=train.lr_cycle_mul,
        cycle_decay=train.lr_cycle_decay,
        cycle_limit=train.lr_cycle_limit,
        k_decay=train.lr_k_decay,
        step_on_epochs=train.sched == "plateau" or not train.sched_on_updates,
        updates_per_epoch=updates,
    )


def calibrate(model: PixelModel, loader: Loader, process: Process, tell: Callable[[str], None]) -> None:
    """Fit the auto-encoders with `start: calibrated` to the dense model's attention maps on training images.

    The first process does it, the others take its weights. `tell` is given a line about every site.
    """
    if not any(isinstance(part, LowRank) and part.start == "calibrated" for part in model.modules()):
        return
    weights: dict[str, Tensor] = process.on_first(lambda: _fitted(model, loader, tell))
    model.load_state_dict(weights)


def _fitted(model: PixelModel, loader: Loader, tell: Callable[[str], None]) -> dict[str, Tensor]:
    images = first_images(loader, CALIBRATION_IMAGES)
    calibrate_low_rank(model, images.to(device_of(model)).split(CALIBRATION_BATCH))
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}
