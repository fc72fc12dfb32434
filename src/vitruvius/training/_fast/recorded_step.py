"""A training step recorded as CUDA graphs: attack, forward and backward in one launch, the update in another.

A step of a small model is a thousand launches, and the host needs longer for them than the GPU. The first steps of a
shape run as they are; then the step is recorded, its gradients are compared with the step itself on the same batch, and
from there on it is replayed. Random numbers of the device follow its generator, which the loop seeds before every
batch. What cannot be recorded (what waits for the device, what draws the host's random numbers) runs as it is, and the
log says why.    B images (B, C, H, W)
"""

from __future__ import annotations

import logging
import pickle
import random
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Numbers = dict[str, Tensor]
Gradients = Sequence[Tensor | None]
WARM_UP = 3  # steps of a shape before it is recorded: compiling and lazy initialisation must be over
MOST = 4  # recordings kept, each with memory of its own: a full batch, the last one of an epoch, another radius
CLOSE = 0.05  # relative difference of gradients that rounding may cause; more if the step does not repeat itself


class Step(Protocol):
    """What is recorded, in two halves."""

    def gradients(self, x: Tensor, y: Tensor, labels: Tensor) -> tuple[Numbers, Gradients]:
        """Forward and backward: numbers for the log, and a gradient (or None) for every parameter."""
        ...

    def put(self, gradients: Gradients | None) -> None:
        """Give every parameter its gradient, or none."""
        ...

    def apply(self) -> None:
        """The gradients that the parameters have into the weights and their average; then they have none."""
        ...

    def buffers(self) -> list[Tensor]:
        """What a forward pass changes besides its result: running statistics."""
        ...


class Record(Protocol):
    """Work → what repeats it. The work itself is not done."""

    def __call__(self, work: Callable[[], None], /) -> Callable[[], None]: ...


class Recording:
    """Fixed places for a batch, for the numbers and gradients that come of it, and the replays between them."""

    def __init__(self, step: Step, batch: Sequence[Tensor], record: Record, *, whole: bool) -> None:
        """`whole`: the update is recorded too; else it is made as it is, from the recorded gradients."""
        self.step = step
        self.batch = [tensor.clone() for tensor in batch]
        self.numbers: Numbers = {}
        self.gradients: Gradients = ()
        step.put(None)
        self._replay_gradients = record(self._differentiate)
        self._update = self._apply
        if whole:
            self._update = record(self._apply)
        step.put(None)

    def differentiate(self, batch: Sequence[Tensor]) -> Numbers:
        """Numbers and gradients of a batch; nothing is updated."""
        for place, tensor in zip(self.batch, batch, strict=True):
            place.copy_(tensor)
        self._replay_gradients()
        return {name: value.clone() for name, value in self.numbers.items()}

    def update(self) -> None:
        """The gradients of the last batch into the weights."""
        self._update()

    def _differentiate(self) -> None:
        self.numbers, self.gradients = self.step.gradients(*self.batch)

    def _apply(self) -> None:
        self.step.put(self.gradients)
        self.step.apply()


class StepRecorder:
    """Runs training steps, and replays their recordings where it has them."""

    def __init__(self, step: Step, record: Record, *, whole: bool) -> None:
        self.step = step
        self.record = record
        self.whole = whole
        self.given_up = False
        self._seen: dict[Hashable, int] = {}
        self._recordings: dict[Hashable, Recording] = {}

    def __call__(self, x: Tensor, y: Tensor, labels: Tensor, *, settings: Hashable = ()) -> Numbers:
        """One step with its update; `settings` is all that decides it besides the batch, such as an attack's radius."""
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
        with torch.no_grad():
            for buffer, kept in zip(self.step.buffers(), buffers, strict=True):
                buffer.copy_(kept)
        self.step.put(expected)
        self.step.apply()
        return numbers

    def _recorded(self, batch: Sequence[Tensor], expected: Gradients, randomness: Randomness) -> Recording:
        if randomness.host_has_drawn():
            raise RuntimeError("the step draws random numbers of the host")
        self.step.put(None)
        randomness.restore_device()
        again = copies(self.step.gradients(*batch)[1])
        recording = Recording(self.step, batch, self.record, whole=self.whole)
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


def copies(gradients: Gradients) -> list[Tensor | None]:
    """Gradients that the next step does not write over."""
    return [None if gradient is None else gradient.clone() for gradient in gradients]


def difference(found: Gradients, expected: Gradients) -> float:
    """Relative difference of all gradients together; infinite where one of the two has none."""
    differences: list[Tensor] = []
    sizes: list[Tensor] = []
    for one, other in zip(found, expected, strict=True):
        if (one is None) != (other is None):
            return float("inf")
        if one is not None and other is not None:
            differences.append((one.float() - other.float()).square().sum())
            sizes.append(other.float().square().sum())
    return float((torch.stack(differences).sum() / torch.stack(sizes).sum()).sqrt())
