"""`train.compile: auto`: training steps by compiled blocks and recorded CUDA graphs, with the same result.

A step of a small model is a thousand launches, and the host needs longer for them than the GPU. The first steps of a
shape run as they are; then attack, forward and backward are recorded as one CUDA graph and the update as another, the
recorded gradients are compared with the step itself on the same batch, and from there on it is replayed. Random numbers
of the device follow its generator, which the loop seeds before every batch. What cannot be recorded (what waits for the
device, what draws the host's random numbers) runs as it is, and the log says why. On a CPU nothing is compiled or
recorded: waiting for the compiler costs more than small models take to train.    B images (B, C, H, W)
"""

from __future__ import annotations

import logging
import pickle
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from timm.layers import DropPath
from torch import Tensor, nn

from vitruvius._cuda_graphs import CudaGraphRecorder
from vitruvius._processes import Process
from vitruvius.tasks.base import Objective
from vitruvius.training.config import Config

logger = logging.getLogger(__name__)

Numbers = dict[str, Tensor]
Gradients = Sequence[Tensor | None]
WARM_UP = 3  # steps of a shape before it is recorded: compiling and lazy initialisation must be over
MOST = 4  # recordings kept, each with memory of its own: a full batch, the last one of an epoch, another radius
CLOSE = 0.05  # relative difference of gradients that rounding may cause; more if the step does not repeat itself
FEW = 4  # kinds with this many times fewer blocks than the most frequent one are not worth a graph


def make_fast_step(
    config: Config,
    process: Process,
    model: nn.Module,
    task: Objective,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Numbers]],
    update: Callable[[], None],
) -> StepRecorder | None:
    """What `train.compile: auto` makes of the steps of a session; None, and a line in the log, if it makes nothing.

    `forward` gives the loss and the numbers for the log; `update` turns gradients into weights.
    """
    if config.train.compile != "auto":
        return None
    reason = why_not_recorded(config, process, task)
    if reason:
        logger.debug("train.compile = auto: steps are run as they are, since %s", reason)
        return None
    task.read_settings_from(process.device)
    has_penalties = task.penalties is not None  # hooks inside the blocks
    regions = None if has_penalties else Regions(model)
    return StepRecorder(SessionStep(task, optimizer, forward, update, regions=regions), CudaGraphRecorder())


def why_not_recorded(config: Config, process: Process, task: Objective) -> str:
    """Why the steps of a session are run as they are; nothing if they can be faster."""
    train = config.train
    if not hasattr(torch.get_device_module(process.device), "CUDAGraph"):
        return f"on a {process.device.type} device steps are not recorded"
    if process.grouped:
        return "steps of a process group wait for each other"
    if train.precision == "fp16":
        return "the gradient scaler of fp16 waits for the device"
    if train.nonfinite == "skip":
        return "train.nonfinite = skip looks at every loss"
    if max(train.grad_accum_steps, task.replays) > 1:
        return "an update is not one batch"
    if config.gradual is not None:
        return "gradual masks change between epochs"
    return ""


class SessionStep:
    """Forward, backward and update of a session, as the recorder wants them."""

    def __init__(
        self,
        task: Objective,
        optimizer: torch.optim.Optimizer,
        forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Numbers]],
        update: Callable[[], None],
        *,
        regions: Regions | None,
    ) -> None:
        self.task, self.optimizer, self.forward, self.update, self.regions = task, optimizer, forward, update, regions
        groups = optimizer.param_groups
        self.parameters: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        self.rates = torch.zeros(len(groups), device=self.parameters[0].device)
        self.records_update = is_capturable(optimizer)

    def begin(self) -> None:
        """Copy the learning rates to where a recorded update finds them."""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.rates.copy_(torch.tensor(rates), non_blocking=True)

    def gradients(self, x: Tensor, y: Tensor, labels: Tensor) -> tuple[Numbers, Gradients]:
        """Forward and backward, by compiled blocks unless they cannot be compiled: numbers for the log, gradients."""
        if self.regions is not None:
            kept = [buffer.clone() for buffer in self.buffers()]
            try:
                return self._gradients(self.regions, x, y, labels)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                if x.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise
                reason = (str(error) or type(error).__name__).splitlines()[0]
                logger.warning("the model's blocks cannot be compiled, training continues without: %s", reason)
                self.regions = None
                self.put(None)
                copy_into(self.buffers(), kept)
        return self._gradients(None, x, y, labels)

    def put(self, gradients: Gradients | None) -> None:
        """Give every parameter its gradient, or none."""
        if gradients is None:
            gradients = [None] * len(self.parameters)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def apply(self) -> None:
        """The gradients that the parameters have into the weights; rates are read from the device if recorded."""
        with self._rates_on_device() if self.records_update else nullcontext():
            self.update()

    def buffers(self) -> list[Tensor]:
        """What a forward pass changes besides its result: running statistics."""
        return [buffer for buffer in self.task.buffers() if buffer is not None]

    def _gradients(self, regions: Regions | None, x: Tensor, y: Tensor, labels: Tensor) -> tuple[Numbers, Gradients]:
        with nullcontext() if regions is None else regions.compiled():
            loss, numbers = self.forward(x, y, labels)
            loss.backward()
        return numbers, [parameter.grad for parameter in self.parameters]

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """Inside, the optimiser reads its rates from a tensor; outside they are numbers, as schedulers write them."""
        groups = self.optimizer.param_groups
        before = [(group["lr"], group.get("capturable")) for group in groups]
        for group, rate in zip(groups, self.rates.unbind(), strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, (rate, capturable) in zip(groups, before, strict=True):
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = capturable


def is_capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update is PyTorch's own in one kernel, which keeps its step and its rate on the device."""
    own = type(optimizer).__module__.startswith("torch.optim")
    return own and all(group.get("fused") for group in optimizer.param_groups)


# recorded steps


Record = Callable[[Callable[[], None]], Callable[[], None]]  # work → what repeats it; the work itself is not done


class Recording:
    """Fixed places for a batch, for the numbers and gradients that come of it, and the replays between them."""

    def __init__(self, step: SessionStep, batch: Sequence[Tensor], record: Record) -> None:
        self.step = step
        self.batch = [tensor.clone() for tensor in batch]
        self.numbers: Numbers = {}
        self.gradients: Gradients = ()
        step.put(None)
        self._replay_gradients = record(self._differentiate)
        self.update = record(self._apply) if step.records_update else self._apply  # from the recorded gradients
        step.put(None)

    def differentiate(self, batch: Sequence[Tensor]) -> Numbers:
        """Numbers and gradients of a batch; nothing is updated."""
        for place, tensor in zip(self.batch, batch, strict=True):
            place.copy_(tensor)
        self._replay_gradients()
        return {name: value.clone() for name, value in self.numbers.items()}

    def _differentiate(self) -> None:
        self.numbers, self.gradients = self.step.gradients(*self.batch)

    def _apply(self) -> None:
        self.step.put(self.gradients)
        self.step.apply()


class StepRecorder:
    """Runs training steps, and replays their recordings where it has them."""

    def __init__(self, step: SessionStep, record: Record) -> None:
        self.step = step
        self.record = record
        self.given_up = False
        self._seen: dict[Hashable, int] = {}
        self._recordings: dict[Hashable, Recording] = {}

    def __call__(self, x: Tensor, y: Tensor, labels: Tensor, *, settings: Hashable = ()) -> Numbers:
        """One step with its update; `settings` is all that decides it besides the batch, such as an attack's radius."""
        self.step.begin()
        batch = (x, y, labels)
        key = (x.shape, x.dtype, y.shape, y.dtype, settings)
        recording = self._recordings.get(key)
        if recording is not None:
            numbers = recording.differentiate(batch)
            recording.update()
            return numbers
        if self._is_due(key):
            return self._record(key, batch)
        numbers, _ = self.step.gradients(*batch)
        self.step.apply()
        return numbers

    def _is_due(self, key: Hashable) -> bool:
        if self.given_up or len(self._recordings) >= MOST:
            return False
        if len(self._seen) > 64:
            self._seen.clear()  # settings that change with every update are not worth a recording
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] > WARM_UP

    def _record(self, key: Hashable, batch: Sequence[Tensor]) -> Numbers:
        """A step as it is, and a recording of it if that repeats the gradients of this batch."""
        start = time.perf_counter()
        randomness = Randomness(batch[0])
        numbers, gradients = self.step.gradients(*batch)
        expected = copies(gradients)
        buffers = [buffer.clone() for buffer in self.step.buffers()]
        try:
            recording = self._recorded(batch, expected, randomness)
        except Exception as error:  # whatever cannot be recorded can still be run
            self.given_up = True
            reason = (str(error) or type(error).__name__).splitlines()[0]
            logger.info("training steps are not recorded as CUDA graphs: %s", reason)
        else:
            self._recordings[key] = recording
            seconds = time.perf_counter() - start
            logger.info("training steps of %d images are recorded as CUDA graphs: %.1f s", len(batch[0]), seconds)
        copy_into(self.step.buffers(), buffers)
        self.step.put(expected)
        self.step.apply()
        return numbers

    def _recorded(self, batch: Sequence[Tensor], expected: Gradients, randomness: Randomness) -> Recording:
        if randomness.host_has_drawn():
            raise RuntimeError("the step draws random numbers of the host")
        self.step.put(None)
        randomness.restore_device()
        again = copies(self.step.gradients(*batch)[1])
        recording = Recording(self.step, batch, self.record)
        randomness.restore_device()
        recording.differentiate(batch)
        spread = difference(again, expected)  # kernels that add in any order, and attacks that follow a sign
        found = difference(recording.gradients, expected)
        if not found <= max(CLOSE, 2 * spread):
            raise RuntimeError(
                f"recorded gradients differ by {found:.3g} of their size, the step from itself by {spread:.3g}"
            )
        return recording


class Randomness:
    """The states of all generators before a step: the device's, to repeat it; the host's, which would be frozen."""

    def __init__(self, x: Tensor) -> None:
        self.device = x.device
        self._host = self._host_states()
        if self.device.type == "cpu":
            self._state = torch.get_rng_state()
        else:
            self._state = torch.get_device_module(self.device).get_rng_state(self.device)

    def host_has_drawn(self) -> bool:
        """Whether Python's, numpy's or (of a step on another device) torch's CPU generator has moved."""
        return self._host_states() != self._host

    def restore_device(self) -> None:
        """As it was before the step."""
        if self.device.type == "cpu":
            torch.set_rng_state(self._state)
        else:
            torch.get_device_module(self.device).set_rng_state(self._state, self.device)

    def _host_states(self) -> list[object]:
        states: list[object] = [random.getstate(), pickle.dumps(np.random.get_state())]  # noqa: NPY002
        if self.device.type != "cpu":
            states.append(torch.get_rng_state().numpy().tobytes())
        return states


@torch.no_grad()
def copy_into(tensors: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def copies(gradients: Gradients) -> list[Tensor | None]:
    """Gradients that the next step does not write over."""
    return [None if gradient is None else gradient.clone() for gradient in gradients]


def difference(found: Gradients, expected: Gradients) -> float:
    """Relative difference of all gradients together; infinite where one of the two has none."""
    pairs = list(zip(found, expected, strict=True))
    if any((one is None) != (other is None) for one, other in pairs):
        return float("inf")
    both = [(one.float(), other.float()) for one, other in pairs if one is not None and other is not None]
    gap = torch.stack([(one - other).square().sum() for one, other in both]).sum()
    return float((gap / torch.stack([other.square().sum() for _, other in both]).sum()).sqrt())


# blocks compiled one by one


class Regions:
    """The repeated blocks of a model, each with a compiled form that is switched on inside `compiled()`.

    `torch.compile` of a whole transformer unrolls its blocks: a minute for twelve copies of one graph. Compiled one by
    one, blocks of the same shape share one graph. Three things would break that up, and are taken out of the way: drop
    rates, which differ from block to block and become tensors inside; kinds of block of which a model has only a few;
    and passes without a gradient, which a recorded step can afford as they are. Weights and their names stay.
    """

    def __init__(self, model: nn.Module, *, backend: str = "inductor") -> None:
        self.blocks = frequent_blocks(repeated_blocks(model))
        self._forms = [_with_gradient(block, backend) for block in self.blocks]
        self._drops = _differing_drops(self.blocks)

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Inside, calling a block calls its compiled form: a training step, and nothing else.

        Evaluation comes in batches of other sizes, each of which would be compiled again.
        """
        for block, form in zip(self.blocks, self._forms, strict=True):
            block._compiled_call_impl = form
        for drop in self._drops:
            drop.swap_in()
        try:
            with warnings.catch_warnings():  # of the compiler looking at the inputs of a block
                warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
                yield
        finally:
            for drop in self._drops:
                drop.swap_out()
            for block in self.blocks:
                block._compiled_call_impl = None


def _with_gradient(block: nn.Module, backend: str) -> Callable[..., Any]:
    """The block's compiled form where gradients are asked for, else the block as it is."""
    form = torch.compile(block._call_impl, backend=backend, dynamic=False)

    def call(*inputs: Any, **named: Any) -> Any:
        return (form if torch.is_grad_enabled() else block._call_impl)(*inputs, **named)

    return call


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The innermost modules that stand in a row with others of their class: a transformer's or a ResNet's blocks."""
    rows = Counter(type(child) for module in model.modules() for child in _row(module))
    kinds = {kind for kind, count in rows.items() if count > 1}

    def collect(module: nn.Module) -> list[nn.Module]:
        found: list[nn.Module] = []
        for child in module.children():
            found += collect(child) or ([child] if type(child) in kinds and child not in found else [])
        return found

    return collect(model)


def frequent_blocks(blocks: list[nn.Module]) -> list[nn.Module]:
    """Blocks of the most frequent kinds: two class-attention layers beside twelve others are left as they are."""
    counts = Counter(type(block) for block in blocks)
    most = max(counts.values(), default=0)
    return [block for block in blocks if counts[type(block)] * FEW > most]


def _row(module: nn.Module) -> list[nn.Module]:
    """The children of a list of modules that are themselves made of modules."""
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        return []
    containers = (nn.Sequential, nn.ModuleList)
    return [child for child in module.children() if any(child.children()) and not isinstance(child, containers)]


class TensorDropPath(nn.Module):
    """timm's DropPath; its rate is a tensor, which compiled blocks take as an input: a number makes a graph a block."""

    keep: Tensor

    def __init__(self, keep: Tensor, *, scale: bool) -> None:
        """`keep`: () the probability that an image keeps the branch; `scale`: divide what is kept by it."""
        super().__init__()
        self.register_buffer("keep", keep, persistent=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = (torch.rand(len(x), device=x.device) < self.keep).float()  # (B,)
        if self.scale:
            kept = kept / self.keep
        return x * kept.to(x.dtype).view(-1, *[1] * (x.ndim - 1))


class _Drop:
    """A place in a block: what stands there, and what stands there inside `compiled()`."""

    def __init__(self, block: nn.Module, path: str) -> None:
        parent, _, self.name = path.rpartition(".")
        self.parent = block.get_submodule(parent)
        self.original = block.get_submodule(path)
        weight = next(block.parameters())
        keep = weight.new_tensor(1.0 - _rate(self.original), dtype=torch.float32)
        self.stand_in = TensorDropPath(keep, scale=getattr(self.original, "scale_by_keep", True))

    def swap_in(self) -> None:
        self.stand_in.training = self.original.training
        self.parent._modules[self.name] = self.stand_in

    def swap_out(self) -> None:
        self.parent._modules[self.name] = self.original


def _differing_drops(blocks: list[nn.Module]) -> list[_Drop]:
    """The places of stochastic depth whose rate is not the same in all blocks of a kind; no rate is an identity."""
    found: list[_Drop] = []
    for kind in {type(block) for block in blocks}:
        alike = [block for block in blocks if type(block) is kind]
        named = [dict(block.named_modules()) for block in alike]
        for path in sorted({path for modules in named for path, module in modules.items() if type(module) is DropPath}):
            places = [modules.get(path) for modules in named]
            have_drop = all(type(place) in (DropPath, nn.Identity) for place in places)
            if have_drop and len({_rate(place) for place in places}) > 1:
                found += [_Drop(block, path) for block in alike]
    return found


def _rate(module: nn.Module | None) -> float:
    """The probability with which an image loses the branch."""
    return float(getattr(module, "drop_prob", None) or 0.0)
