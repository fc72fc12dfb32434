"""A dry run: what a recipe would do, how large it is and how long it takes, without writing anything.

Parameters are counted. The optimiser's memory, activations (what autograd keeps), the passes that an attack makes and
the time of a step are measured on random images, a few steps in a small batch, on the device that would train. Where
that device is not here, all but the time is measured on the CPU. Where a step would take minutes, memory is measured on
tensors without numbers (PyTorch's meta device), and the rest is left out.
"""

from __future__ import annotations

import copy
import inspect
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
from vitruvius._registry import load_plugins, read_spec
from vitruvius.analysis import ask_all
from vitruvius.data import Loader
from vitruvius.init import inits
from vitruvius.models import create_model
from vitruvius.tracking import Trackers
from vitruvius.training import _build as make
from vitruvius.training._estimates import Findings, describe, images_in_words
from vitruvius.training._guards.alarm import Alarm
from vitruvius.training._run.folder import Run
from vitruvius.training._seeding import preserve_rng
from vitruvius.training._selection import Selection
from vitruvius.training._session import Session, open_session
from vitruvius.training._step import train_batch
from vitruvius.training.config import Config

STEPS = 3  # the first warms up
SLOW = 1e10  # floating-point operations a second that any processor can do
PATIENCE = 10.0  # seconds for a few steps
LONGEST = 120.0  # seconds for one step, at that speed; most processors are ten times as fast
PASSES = 12  # forward passes' worth of work in a step of adversarial training with a few steps


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a few real steps have shown; nothing where none was made."""

    images: int = 0  # in a step
    seconds: float | None = None  # per step
    activations: int | None = None  # bytes per image
    optimizer: int | None = None  # bytes of its state
    forwards: float | None = None  # passes of an image through the model in a step, those of an attack included
    backwards: float | None = None
    how: str = ""  # on what it was measured


def dry_run(config: Config, *, processes: int | None = None) -> str:
    """The resolved recipe, schedule, sites and cores, parameters, memory and time, as text.

    config: the recipe. processes: how many its command is written for; default: those that run.
    """
    load_plugins(config.plugins)
    device, remarks = _device(config)
    with process_group(device) as process, preserve_rng(process.device):
        loader = _training_images(config, process, remarks)
        config = make.with_classes(config, _num_classes(config, loader))
        flops = forward_flops(config)
        session, probe = _probe(config, process, flops, remarks)
    if device != config.train.device:
        probe = replace(probe, seconds=None)
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
        forwards=probe.forwards,
        backwards=probe.backwards,
        how=probe.how,
        remarks=tuple(remarks),
    )
    return describe(found)


def rehearse(config: Config) -> None:
    """Do all that `train` does before it writes a file, and nothing else: what would fail there fails here.

    An init that is optimised takes one step, and low rank is not calibrated: only settings and sites are of interest.

    config: the recipe.
    """
    load_plugins(config.plugins)
    Trackers.of(config.tracking)
    ask_all(config.analyses)
    with process_group(config.train.device) as process, preserve_rng(process.device):
        quick = replace(config, data=replace(config.data, cache="none"), init=_one_step(config.init))
        opened = open_session(quick, process, fresh=False)
        Alarm.of(opened)
        Selection(opened)
        Run(config.out or "runs/unnamed").check(replace(opened.config, data=config.data, init=config.init))


def _one_step(init: Any) -> Any:
    """An init that makes a number of `steps`, with one of them; any other as it is."""
    if not init:
        return init
    name, settings = read_spec(init, where="init")
    if name not in inits or "steps" not in inspect.signature(inits.get(name, where="init")).parameters:
        return init
    asked = settings.get("steps", 1)
    if not isinstance(asked, int) or asked < 1:
        return init  # refused, as it will be
    return {"use": name, **settings, "steps": 1}


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


def _probe(config: Config, process: Process, flops: int, remarks: list[str]) -> tuple[Session, Probe]:
    """A session on random images and what its steps have shown; on a device that is too small, with fewer images."""
    images, steps = probe_plan(config, process, flops)
    if not images:
        session = open_session(pretended(config, _fewest(config), 1), process, fresh=False)
        return session, measure_without_numbers(session)
    most = config.data.batch_size
    while True:
        session = open_session(pretended(config, images, steps), process, fresh=False)
        try:
            return session, measure(session, most)
        except torch.OutOfMemoryError:
            remarks.append(f"a step with {images_in_words(images)} does not fit into the memory of this device.")
            if images == 1:
                return session, Probe()
            most = images = images // 2


def probe_plan(config: Config, process: Process, flops: int) -> tuple[int, int]:
    """Images in a measured step, and steps: as many as trained at once; few on a processor; 0 if that takes minutes.

    `config` is the recipe; `process` says whether there is a GPU; `flops` are those of one image's forward pass.
    """
    if process.device.type != "cpu":
        return config.data.batch_size, STEPS
    images = min(config.data.batch_size, 8)
    while images > _fewest(config) and STEPS * PASSES * images * flops / SLOW > PATIENCE:
        images //= 2
    if STEPS * PASSES * images * flops / SLOW <= PATIENCE:
        return images, STEPS
    if PASSES * images * flops / SLOW <= LONGEST:
        return images, 2
    return 0, 0


def _fewest(config: Config) -> int:
    """Images that a step needs: batch norms of a head need two."""
    return min(config.data.batch_size, 2)


def pretended(config: Config, images: int, steps: int = STEPS) -> Config:
    """The recipe on random images, without files: a few batches, nothing compiled, no pretrained weights.

    `config` is the recipe as given; `images` of a batch; `steps` are how many batches there are.
    """
    splits = config.data.aug_splits
    data = replace(
        config.data, dataset="fake", root=None, subset=None, classes=None, class_map=None, mix=None, cache="none",
        num_classes=config.model.kwargs["num_classes"], no_aug=splits == 0, aug_repeats=0, workers=0, batch_size=images,
        train_num_samples=steps * images, val_num_samples=1, eval_batch_size=1,
    )  # fmt: skip
    train = replace(config.train, holdout=0.0, compile=False, grad_accum_steps=1)
    model = replace(config.model, weights=None, pretrained=False)
    return replace(config, data=data, train=train, model=model, init=None, analyses=[], gradual=None)


def measure(session: Session, most: int) -> Probe:
    """A few steps as they would be trained, on random images; the first one warms up and shows the memory.

    `session` was opened on the pretended recipe; `most` images are trained at once. Of a small batch the work that does
    not grow with it would be too large a share of the time, so the timed ones are as large as patience allows.
    """
    saved = SavedTensors(session.model)
    passes = CountedPasses(session.model)
    seconds: list[float] = []
    shown = images = session.config.data.batch_size
    grown = 1
    session.epoch = session.num_epochs - 1  # when an attack has grown to its full strength
    session.updates = session.epoch * session.updates_per_epoch
    session.task.train()
    for number, (x, y) in enumerate(session.train_loader):
        if number == 1:
            grown = _growth(session, most, seconds[0])
        if number:
            x, y = x.repeat(grown, 1, 1, 1), y.repeat(grown, *[1] * (y.ndim - 1))
            shown += grown * images
        begun = time.perf_counter()
        with saved if number == 0 else torch.enable_grad(), passes:
            train_batch(session, x, y, number, len(session.train_loader))
        if session.process.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - begun)
    shown *= max(1, session.config.data.aug_splits)
    return Probe(
        images=images * grown,
        seconds=min(seconds[1:] or seconds),
        activations=saved.peak // images,
        optimizer=_optimizer_bytes(session.optimizer),
        forwards=passes.forwards / shown,
        backwards=passes.backwards / shown,
        how=f"measured with {images_in_words(images)}",
    )


def _growth(session: Session, most: int, first: float) -> int:
    """How many times larger a timed step may be than the first, which took `first` seconds, all processes alike."""
    if session.process.world_size > 1 or session.task.replays > 1:  # replays keep what they found for a batch
        return 1
    fits = int(PATIENCE / max(first, 1e-9))
    return max(1, min(most // session.config.data.batch_size, fits))


def measure_without_numbers(session: Session) -> Probe:
    """Memory alone, of one pass there and back on the meta device.

    `session` was opened on the pretended recipe.
    """
    images = session.config.data.batch_size
    model = copy.deepcopy(session.model).to("meta").train()
    channels, height, width = session.model.data_config["input_size"]
    side = session.config.data.image_size
    saved = SavedTensors(model)
    with saved:
        model(torch.empty(images, channels, side or height, side or width, device="meta")).float().sum().backward()
    config = replace(session.config, train=replace(session.config.train, opt_kwargs={}))
    optimizer = make.optimizer(config, model, session.task)
    optimizer.step()
    return Probe(
        activations=saved.peak // images,
        optimizer=_optimizer_bytes(optimizer),
        how="measured without numbers, of one pass there and back",
    )


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
    return tensor.untyped_storage()._cdata  # also of a tensor without numbers, whose address is 0


class CountedPasses:
    """`with CountedPasses(model) as passes: step()`; then how many images went through it, forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        self.forwards = 0
        self.backwards = 0
        self._model = model
        self._handle: Any = None

    def __enter__(self) -> CountedPasses:
        self._handle = self._model.register_forward_hook(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _count(self, model: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        images = len(inputs[0])
        self.forwards += images
        first = output
        if isinstance(output, tuple):
            first = output[0]
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(lambda _: self._count_back(images))

    def _count_back(self, images: int) -> None:
        self.backwards += images
