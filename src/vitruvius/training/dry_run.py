"""A dry run: what a recipe would do, how large it is and how long it takes, without writing anything.

Parameters are counted. The optimiser's memory, activations (what autograd keeps) and the time of a step are measured on
random images, a few steps in a small batch, on the device that would train. Where that would take minutes, or the
device is not here, the time is left out and the operations of a forward pass are given instead.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitruvius._errors import ConfigError, DataError
from vitruvius._processes import Process, choose_device, process_group
from vitruvius._registry import load_plugins
from vitruvius.analysis import ask_all
from vitruvius.data import Loader
from vitruvius.models import create_model
from vitruvius.tracking import Trackers
from vitruvius.training import _build as make
from vitruvius.training._estimates import Findings, describe
from vitruvius.training._guards.alarm import Alarm
from vitruvius.training._run.folder import Run
from vitruvius.training._seeding import preserve_rng
from vitruvius.training._selection import Selection
from vitruvius.training._session import Session, open_session
from vitruvius.training._step import train_batch
from vitruvius.training.config import Config, check

STEPS = 3  # the first warms up
SLOW = 1e10  # floating-point operations a second that any processor can do
PATIENCE = 10.0  # seconds
PASSES = 12  # forward passes' worth of work in a step of adversarial training with a few steps


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a few real steps have shown; nothing where none was made."""

    images: int = 0  # in a step
    seconds: float | None = None  # per step
    activations: int | None = None  # bytes per image
    optimizer: int | None = None  # bytes of its state


def dry_run(config: Config, *, processes: int | None = None) -> str:
    """The resolved recipe, schedule, sites and cores, parameters, memory and time, as text.

    config: the recipe. processes: how many its command is written for; default: those that run.
    """
    check(config, "the recipe")
    load_plugins(config.plugins)
    device, remarks = _device(config)
    with process_group(device) as process, preserve_rng(process.device):
        loader = _training_images(config, process, remarks)
        config = make.with_classes(config, _num_classes(config, loader))
        flops = forward_flops(config)
        images = 0
        if device == config.train.device:
            images = probe_batch(config, process, flops)
        session = open_session(pretended(config, max(1, images)), process)
        probe = Probe()
        if images:
            probe = measure(session)
    known = session.config.model
    config = replace(config, model=replace(config.model, mean=known.mean, std=known.std))
    found = Findings(
        config=config,
        processes=processes or process.world_size,
        session=session,
        batches=None if loader is None else len(loader),
        flops=flops,
        images=probe.images,
        seconds=probe.seconds,
        activations=probe.activations,
        optimizer=probe.optimizer,
        remarks=tuple(remarks),
    )
    return describe(found)


def rehearse(config: Config) -> None:
    """Do all that `train` does before it writes a file, and nothing else: what would fail there fails here.

    config: the recipe.
    """
    check(config, "the recipe")
    load_plugins(config.plugins)
    Trackers.of(config.tracking)
    ask_all(config.analyses)
    with process_group(config.train.device) as process, preserve_rng(process.device):
        opened = open_session(replace(config, data=replace(config.data, cache="none")), process)
        Alarm.of(opened)
        Selection(opened)
        Run(config.out or "runs/unnamed").check(replace(opened.config, data=config.data))


def _num_classes(config: Config, loader: Loader | None) -> int:
    """Of the data; of the recipe where the data are not here; else ImageNet's."""
    if loader is not None:
        return loader.num_classes
    return int(config.data.num_classes or config.model.kwargs.get("num_classes") or 1000)


def forward_flops(config: Config) -> int:
    """Floating-point operations of one image's forward pass, counted on a model without numbers.

    `config` is the recipe.
    """
    with torch.device("meta"):
        model = create_model(config.model.name, restride=config.model.restride, **config.model.kwargs)
        channels, height, width = model.data_config["input_size"]
        size = config.data.image_size
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(torch.empty(1, channels, size or height, size or width))
    return int(counter.get_total_flops())


def probe_batch(config: Config, process: Process, flops: int) -> int:
    """Images in a measured step: as many as trained at once, fewer on a processor, none where it would take minutes.

    `config` is the recipe; `process` says whether there is a GPU; `flops` are those of one image's forward pass.
    """
    if process.device.type != "cpu":
        return config.data.batch_size
    images = min(config.data.batch_size, 8)
    while images > 1 and STEPS * PASSES * images * flops / SLOW > PATIENCE:
        images //= 2
    return images if STEPS * PASSES * images * flops / SLOW <= PATIENCE else 0


def pretended(config: Config, images: int) -> Config:
    """The recipe on random images, without files: a few batches, nothing compiled, no pretrained weights.

    `config` is the recipe as given; `images` of a batch.
    """
    splits = config.data.aug_splits
    data = replace(
        config.data, dataset="fake", root=None, subset=None, classes=None, class_map=None, mix=None, cache="none",
        num_classes=config.model.kwargs["num_classes"], no_aug=splits == 0, aug_repeats=0, workers=0, batch_size=images,
        train_num_samples=STEPS * images, val_num_samples=1, eval_batch_size=1,
    )  # fmt: skip
    train = replace(config.train, holdout=0.0, compile=False, grad_accum_steps=1)
    model = replace(config.model, weights=None, pretrained=False)
    return replace(config, data=data, train=train, model=model, init=None, analyses=[], gradual=None)


def measure(session: Session) -> Probe:
    """A few steps as they would be trained, on random images.

    `session` was opened on the pretended recipe.
    """
    saved = SavedTensors(session.model)
    seconds = []
    session.task.train()
    for number, (x, y) in enumerate(session.train_loader):
        begun = time.perf_counter()
        with saved if number == 0 else torch.enable_grad():
            train_batch(session, x, y, number, len(session.train_loader))
        if session.process.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - begun)
    images = session.config.data.batch_size
    memory = _optimizer_bytes(session.optimizer)
    return Probe(images=images, seconds=min(seconds[1:]), activations=saved.peak // images, optimizer=memory)


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the tensors that the optimiser remembers."""
    states: Any = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in states if isinstance(value, torch.Tensor))


def _device(config: Config) -> tuple[str, list[str]]:
    """The device that would train; the CPU, with a remark, if it is not here."""
    try:
        choose_device(config.train.device)
    except ConfigError as error:
        return "cpu", [str(error)]
    return config.train.device, []


def _training_images(config: Config, process: Process, remarks: list[str]) -> Loader | None:
    """Opened for their number alone; data that are not here are a remark."""
    try:
        return make.loaders(replace(config, data=replace(config.data, cache="none")), process)[0]
    except DataError as error:
        remarks.append(f"the data cannot be opened here: {error}")
        return None


class SavedTensors:
    """`with SavedTensors(model) as kept: step()`; then `kept.peak` is the most that was kept at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.peak = self.now = 0
        self._own = {_place(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._holders: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Held:
        place = _place(tensor)
        if place in self._own:
            return _Held(tensor, None, place)
        if self._holders[place] == 0:
            self.now += tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self.now)
        self._holders[place] += 1
        return _Held(tensor, self, place)

    def release(self, tensor: Tensor, place: int) -> None:
        """One holder of a storage is gone.

        `tensor` is any view of that storage, `place` its address.
        """
        self._holders[place] -= 1
        if self._holders[place] == 0:
            self.now -= tensor.untyped_storage().nbytes()


class _Held:
    """A tensor in the graph; says goodbye when the graph lets it go."""

    def __init__(self, tensor: Tensor, kept: SavedTensors | None, place: int) -> None:
        self.tensor, self.kept, self.place = tensor, kept, place

    def __del__(self) -> None:
        if self.kept is not None:
            self.kept.release(self.tensor, self.place)


def _unpack(held: Any) -> Tensor:
    tensor: Tensor = held.tensor
    return tensor


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
