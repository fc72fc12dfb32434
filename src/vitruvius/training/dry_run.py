"""A dry run: what a recipe would do, how large it is and how long it takes, without writing anything.

Parameters are counted. The optimiser's memory, activations (what autograd keeps), the passes that an attack makes and
the time of a step are measured on random images, a few steps in a small batch, on the device that would train. Where
that device is not here, all but the time is measured on the CPU. Where a step would take minutes, memory is measured on
tensors without numbers (PyTorch's meta device), and the rest is left out.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitruvius._errors import ConfigError, DataError, NoSiteError, UnsuitableSite
from vitruvius._format import format_duration
from vitruvius._processes import choose_device, process_group
from vitruvius._random import preserve_rng
from vitruvius._registry import load_plugins
from vitruvius._yaml import dump_yaml
from vitruvius.models import create_model
from vitruvius.surgery import head_weights, survey
from vitruvius.surgery.base import cores_of
from vitruvius.training.config import Config
from vitruvius.training.loop import Trainer
from vitruvius.training.session import (
    Session,
    image_shape,
    make_loaders,
    make_optimizer,
    open_session,
    with_classes,
    with_rate,
)

SLOW = 1e10  # floating-point operations a second that any processor can do
PATIENCE = 3.0  # seconds for the timed steps
LONGEST = 120.0  # seconds for one step, at the speed of SLOW; most processors are ten times as fast
PASSES = 12  # forward passes' worth of work in a step of adversarial training with a few steps
BUSY = 1.25  # times that a step on a CPU takes longer than the processor works on it


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a few real steps have shown; nothing where none was made."""

    images: int = 0  # in a step
    seconds: float | None = None  # per step
    busy: float = 1.0  # times that a step took longer than this thread could compute
    activations: int  # bytes per image
    optimizer: int  # bytes of its state
    forwards: float | None = None  # passes of an image through the model in a step, those of an attack included
    backwards: float | None = None
    how: str  # it was measured


def dry_run(config: Config, *, processes: int | None = None) -> str:
    """The resolved recipe, schedule, sites and cores, parameters, memory and time, as text.

    config: the recipe. processes: how many its command is written for; default: those that run.
    """
    load_plugins(config.plugins)
    device, remarks = config.train.device, []
    try:
        choose_device(device)
    except ConfigError as error:
        device, remarks = "cpu", [str(error)]
    with process_group(device) as process, preserve_rng(process.device):
        batches, classes = None, int(config.data.num_classes or config.model.kwargs.get("num_classes") or 1000)
        try:
            loader, _ = make_loaders(replace(config, data=replace(config.data, cache="none")), process)
            batches, classes = len(loader), loader.num_classes
        except DataError as error:
            remarks.append(f"the data cannot be opened here: {error}")
        config = with_classes(config, classes)
        session = open_session(pretended(config), process, fresh=False)
        flops = forward_flops(config)
        if process.device.type == "cpu" and PASSES * session.config.data.batch_size * flops / SLOW > LONGEST:
            probe = measure_without_numbers(session)
        else:
            probe = measure(session, config.data.batch_size, remarks)
    if device != config.train.device:
        probe = replace(probe, seconds=None)
    statistics = {name: getattr(session.config.model, name) for name in ("mean", "std")}
    config = replace(config, model=replace(config.model, **statistics))
    sections = [dump_yaml(config).strip(), schedule(config, processes or process.world_size), describe_sites(session)]
    sections += [describe_parameters(session), describe_memory(config, session, probe)]
    sections += [describe_time(config, session, probe, flops, batches), *(f"note: {remark}" for remark in remarks)]
    return "\n\n".join(sections)


# measuring


def forward_flops(config: Config) -> int:
    """Floating-point operations of one image's forward pass, counted on a model without numbers."""
    with torch.device("meta"):
        model = create_model(config.model.name, restride=config.model.restride, **config.model.kwargs)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(torch.empty(1, *image_shape(model, config)))
    return int(counter.get_total_flops())


def pretended(config: Config) -> Config:
    """The recipe on random images, without files: two small batches, nothing compiled, no pretrained weights."""
    images = min(config.data.batch_size, 2)  # batch norms of a head need two
    data = replace(
        config.data, dataset="fake", root=None, subset=None, classes=None, class_map=None, mix=None, cache="none",
        num_classes=config.model.kwargs["num_classes"], no_aug=config.data.aug_splits == 0, aug_repeats=0, workers=0,
        batch_size=images, train_num_samples=2 * images, val_num_samples=1, eval_batch_size=1,
    )  # fmt: skip
    train = replace(config.train, holdout=0.0, compile=False, grad_accum_steps=1)
    model = replace(config.model, weights=None, pretrained=False)
    return replace(config, data=data, train=train, model=model, init=None, analyses=[], gradual=None)


def measure(session: Session, most: int, remarks: list[str]) -> Probe:
    """Steps as they would be trained: a small one, which warms up and shows the memory; large ones, which are timed.

    `session` was opened on the pretended recipe; `most` images are trained at once. Of a small batch the work that does
    not grow with it would be too large a share of the time, so as many images are timed as patience and memory allow,
    and of some steps the fastest counts: the first one of a size prepares its memory.
    """
    passes: Counter[str] = Counter()

    def count(model: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        images = len(inputs[0])
        passes["forward"] += images
        logits = output[0] if isinstance(output, tuple) else output
        if isinstance(logits, Tensor) and logits.requires_grad:
            logits.register_hook(lambda _: passes.update(backward=images))

    def timed(x: Tensor, y: Tensor, number: int) -> tuple[float, float]:
        """Seconds of a step, and those that this thread computed in it."""
        start, computed = time.perf_counter(), time.thread_time()
        trainer.train_batch(x, y, number)
        if session.process.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start, time.thread_time() - computed

    session.epoch = session.num_epochs - 1  # when an attack has grown to its full strength
    session.updates = session.epoch * session.updates_per_epoch
    session.task.train()
    trainer, saved = Trainer(session), SavedTensors(session.model)
    (x, y), (more_x, more_y) = session.train_loader
    images = session.config.data.batch_size
    shown = images * max(1, session.config.data.aug_splits)
    handle = session.model.register_forward_hook(count)
    with saved.hooks:
        timed(x, y, 0)
    handle.remove()
    steps, times, end = [timed(more_x, more_y, 1)], 1, time.perf_counter() + PATIENCE
    if session.process.world_size == 1 and session.task.replays == 1:  # replays keep what they found for a batch
        times = max(1, min(most // images, int(PATIENCE / max(steps[0][0], 1e-9))))
    while times > 1:
        batch = more_x.repeat(times, 1, 1, 1), more_y.repeat(times, *[1] * (y.ndim - 1))
        try:
            steps = [timed(*batch, 1)]
            while len(steps) < 4 and time.perf_counter() + steps[0][0] < end:
                steps.append(timed(*batch, 1))
            break
        except torch.OutOfMemoryError:
            remarks.append(f"a step with {count_images(images * times)} does not fit into the memory of this device.")
            times //= 2
    seconds, computed = min(steps)
    return Probe(
        images=images * times,
        seconds=seconds,
        busy=seconds / max(computed, 1e-9) if session.process.device.type == "cpu" else 1.0,
        activations=saved.peak // images,
        optimizer=optimizer_bytes(session.optimizer),
        forwards=passes["forward"] / shown,
        backwards=passes["backward"] / shown,
        how=f"measured with {count_images(images)}",
    )


def measure_without_numbers(session: Session) -> Probe:
    """Memory alone, of one pass there and back on the meta device; `session` was opened on the pretended recipe."""
    images = session.config.data.batch_size
    model = copy.deepcopy(session.model).to("meta").train()
    saved = SavedTensors(model)
    with saved.hooks:
        x = torch.empty(images, *image_shape(session.model, session.config), device="meta")
        model(x).float().sum().backward()
    config = replace(session.config, train=replace(session.config.train, opt_kwargs={}))
    optimizer = make_optimizer(config, model, session.task)
    optimizer.step()
    how = "measured without numbers, of one pass there and back"
    return Probe(activations=saved.peak // images, optimizer=optimizer_bytes(optimizer), how=how)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the tensors that the optimiser remembers."""
    states: Any = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in states if isinstance(value, Tensor))


class SavedTensors:
    """`with SavedTensors(model).hooks: step()`; then `peak` is the most bytes that autograd kept, weights left out."""

    def __init__(self, model: nn.Module) -> None:
        self.peak = self.now = 0
        self.own = {storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.holders: Counter[int] = Counter()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Held(tensor, self), lambda held: held.tensor
        )

    def count(self, tensor: Tensor, holders: int) -> None:
        """One holder more (or, with -1, less) of a tensor's storage, whose bytes count while there is any."""
        storage = storage_key(tensor)
        if storage in self.own:
            return
        before, self.holders[storage] = self.holders[storage], self.holders[storage] + holders
        if 0 in (before, before + holders):
            self.now += holders * tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self.now)


class _Held:
    """A tensor in the graph; counted until the graph lets it go."""

    def __init__(self, tensor: Tensor, saved: SavedTensors) -> None:
        self.tensor, self.saved = tensor, saved
        saved.count(tensor, 1)

    def __del__(self) -> None:
        self.saved.count(self.tensor, -1)


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # also of a tensor without numbers, whose address is 0


# what is said


def schedule(config: Config, processes: int) -> str:
    """Epochs that run, peak rate and global batch, with this number of processes."""
    train = with_rate(config, processes).train
    epochs = train.epochs + train.cooldown_epochs * (train.sched in ("cosine", "tanh", "poly"))
    epochs += train.warmup_epochs * train.warmup_prefix
    batch = config.data.batch_size * processes * train.grad_accum_steps
    count = "1 process" if processes == 1 else f"{processes} processes"
    return f"schedule with {count}: {epochs} epochs, peak rate {train.lr:.6g}, {batch:,} images an update"


def describe_sites(session: Session) -> str:
    try:
        sites = survey(session.model)
    except NoSiteError:
        return "attention sites: none; attacks, training and evaluation work, surgery does not"
    cores, lines, width = cores_of(session.model), ["attention sites"], max(map(len, sites))
    for name, site in sites.items():
        what = cores[name].describe() if name in cores else "upstream"
        shape = f"{site.num_heads} heads of {site.key_dim}, {site.num_queries} × {site.num_keys} {site.attends}"
        lines.append(f"  {name:<{width}}  {site.family:<8} {shape:<40} {what}")
    return "\n".join(lines)


def describe_parameters(session: Session) -> str:
    """How many there are, are trained, and are idle: kept in timm's layout though no core looks at them."""
    parameters = list(session.model.parameters())
    total = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    names = [name for name, core in cores_of(session.model).items() if core.ignores_queries]
    try:
        views = head_weights(session.model, names) if names else {}
    except UnsuitableSite:
        views = {}
    queries = [tensor for _, weights in views.values() for tensor in (weights.q, weights.q_bias)]
    idle = sum(tensor.numel() for tensor in queries if tensor is not None)
    return f"parameters\n  total      {total:>13,}\n  trainable  {trainable:>13,}\n  idle       {idle:>13,}"


def describe_memory(config: Config, session: Session, probe: Probe) -> str:
    parameters = list(session.model.parameters())
    weights = sum(p.nbytes for p in parameters)
    batch = config.data.batch_size * max(1, config.data.aug_splits)
    parts = {
        "parameters": weights,
        "gradients": sum(p.nbytes for p in parameters if p.requires_grad),
        "optimiser": probe.optimizer,
        "average": weights if config.train.model_ema else 0,
        f"activations of {count_images(batch)}": probe.activations * batch,
    }
    how = f"optimiser and activations {probe.how}; buffers of kernels come on top"
    lines = [f"memory of a process: about {format_bytes(sum(parts.values()))} ({how})"]
    return "\n".join([*lines, *(f"  {name:<28} {format_bytes(size)}" for name, size in parts.items())])


def describe_time(config: Config, session: Session, probe: Probe, flops: int, batches: int | None) -> str:
    work = f"{flops / 1e9:.2f} GFLOP per image and forward pass"
    if probe.forwards is not None and probe.backwards is not None:
        work += f"; a step makes {probe.forwards:.3g} forward and {probe.backwards:.3g} backward passes of each image"
        work += f", {flops * (probe.forwards + 2 * probe.backwards) / 1e9:,.2f} GFLOP"
    if probe.seconds is None:
        return f"time: not measured here; {work}"
    device, rate = session.process.device.type, probe.images / probe.seconds
    text = f"time: {rate:,.1f} images/s on one {device}, measured with {count_images(probe.images)} a step; {work}"
    if config.train.compile and (config.train.compile != "auto" or device != "cpu"):
        text += "; measured before compiling"
    if probe.busy > BUSY:
        text += f"\n  this machine is busy with other work: alone it would be about {rate * probe.busy:,.1f} images/s"
    if batches is None:
        return text
    epoch, epochs = batches * config.data.batch_size / rate, session.num_epochs
    whole = format_duration(epoch * epochs)
    return f"{text}\n  an epoch {format_duration(epoch)}, {epochs} epochs {whole}, without evaluation"


def count_images(number: int) -> str:
    """`1 image`, `1,024 images`."""
    return f"{number:,} image{'' if number == 1 else 's'}"


def format_bytes(number: float) -> str:
    """1536 → 1.5 KiB."""
    units = ["B", "KiB", "MiB", "GiB"]
    while number >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:,.1f} {units[0]}"
