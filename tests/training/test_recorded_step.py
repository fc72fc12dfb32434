"""Recorded training steps: the same numbers as the steps themselves, or no recording at all.

A stand-in records on the CPU: what is replayed is the work done again, on the same places in memory.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vitruvius.training.fast_step import WARM_UP, Gradients, Numbers, StepRecorder


class SmallStep:
    """A model with batch norm and dropout, trained by Adam."""

    def __init__(self, noise: Callable[[], float] = lambda: 0.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.idle = nn.Parameter(torch.zeros(2))
        self.parameters = [*self.model.parameters(), self.idle]
        self.optimizer = torch.optim.Adam(self.parameters, lr=0.1)
        self.noise = noise

    def gradients(self, x: Tensor, y: Tensor, labels: Tensor) -> tuple[Numbers, Gradients]:
        loss = nn.functional.cross_entropy(self.model(x), y) + self.noise()
        loss.backward()
        return {"loss": loss.detach()}, [p.grad for p in self.parameters]

    records_update = True

    def begin(self) -> None:
        """No rates to copy."""

    def put(self, gradients: Gradients | None) -> None:
        for place, p in enumerate(self.parameters):
            p.grad = None if gradients is None else gradients[place]

    def apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def buffers(self) -> list[Tensor]:
        return list(self.model.buffers())

    def weights(self) -> Tensor:
        return torch.cat([t.detach().double().flatten() for t in self.model.state_dict().values()])


def again(work: Callable[[], None]) -> Callable[[], None]:
    return work


def batches(count: int, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def trained(step: SmallStep, run: Callable[..., Numbers], count: int = 8) -> list[float]:
    losses = []
    for number, (x, y) in enumerate(batches(count)):
        torch.manual_seed(number)
        losses.append(float(run(x, y, y)["loss"]))
    return losses


def plainly(step: SmallStep) -> Callable[..., Numbers]:
    def run(x: Tensor, y: Tensor, labels: Tensor) -> Numbers:
        numbers, _ = step.gradients(x, y, labels)
        step.apply()
        return numbers

    return run


@pytest.mark.parametrize("whole", [True, False])
def test_recorded_steps_train_as_the_steps_themselves(whole: bool) -> None:
    plain, recorded = SmallStep(), SmallStep()
    recorded.records_update = whole
    recorder = StepRecorder(recorded, again)
    assert trained(recorded, recorder) == trained(plain, plainly(plain))
    assert torch.equal(recorded.weights(), plain.weights())
    assert len(recorder._recordings) == 1


def test_a_batch_of_another_size_is_run_as_it_is() -> None:
    step = SmallStep()
    recorder = StepRecorder(step, again)
    trained(step, recorder)
    x, y = batches(1, size=5)[0]
    recorder(x, y, y)
    assert len(recorder._recordings) == 1
    assert not recorder.given_up


def test_settings_that_change_with_every_step_are_never_recorded() -> None:
    step = SmallStep()
    recorder = StepRecorder(step, again)
    for number, (x, y) in enumerate(batches(200)):
        recorder(x, y, y, settings=number)
    assert not recorder._recordings


def test_a_step_that_draws_the_hosts_random_numbers_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    step = SmallStep(noise=random.random)
    recorder = StepRecorder(step, again)
    with caplog.at_level(logging.DEBUG):
        trained(step, recorder)
    assert recorder.given_up
    assert "random numbers of the host" in caplog.text


def test_a_recording_that_says_something_else_is_dropped_and_nothing_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, recorded = SmallStep(), SmallStep()

    def wrong(work: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            with torch.no_grad():
                recorded.model[0].weight.add_(0)  # as a recording may touch what it reads
            work()
            for p in recorded.parameters:
                if p.grad is not None:
                    p.grad.mul_(1.5)

        return replay

    recorder = StepRecorder(recorded, wrong)
    with caplog.at_level(logging.DEBUG):
        assert trained(recorded, recorder) == trained(plain, plainly(plain))
    assert torch.equal(recorded.weights(), plain.weights())
    assert "recorded gradients differ by 0.5 of their size, the step from itself by 0" in caplog.text


def test_a_recording_that_fails_leaves_the_run_as_it_was() -> None:
    plain, recorded = SmallStep(), SmallStep()

    def failing(work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder = StepRecorder(recorded, failing)
    assert trained(recorded, recorder) == trained(plain, plainly(plain))
    assert torch.equal(recorded.weights(), plain.weights())
    assert recorder.given_up


def test_nothing_is_recorded_before_the_warm_up_is_over() -> None:
    step = SmallStep()
    recorder = StepRecorder(step, again)
    trained(step, recorder, count=WARM_UP)
    assert not recorder._recordings
