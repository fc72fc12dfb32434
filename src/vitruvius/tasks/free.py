"""Free adversarial training: every batch is played again and again, and the gradient of each update also moves the
perturbation, so that x' costs no passes of its own (Shafahi et al. 2019, arXiv:1904.12843, algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import device_of
from vitruvius._config import key, required
from vitruvius._errors import ConfigError
from vitruvius._random import Dice
from vitruvius.attacks.base import as_norm
from vitruvius.tasks.base import Objective, tasks
from vitruvius.tasks.inner import make_schedule


@tasks.register("free")
@dataclass(eq=False, repr=False, kw_only=True)
class Free(Objective):
    """Cross-entropy at x + delta; delta takes a step with the gradient of each of the `replays` updates of a batch.

    A batch begins with the delta that the last one has left, which is part of the task's state.
    """

    eps: float = required("radius of the perturbation at the end of the schedule, for pixels in [0, 1]")
    norm: str = key("linf", "linf, l2 or l1")
    replays: int = key(4, "updates on each batch; divide the epochs by it")
    step: float = key(1.0, "length of a step, in eps")
    carry: bool = key(True, "begin with the last batch's delta; false: with a random one")
    schedule: str | dict[str, Any] = key("constant", "how eps grows: constant, linear:epochs=10, or {use: sine, …}")

    def __post_init__(self, model: nn.Module) -> None:
        if self.replays < 1:
            raise ConfigError(f"task.replays = {self.replays}, expected at least 1.")
        super().__post_init__(model)
        self._norm, self._schedule = as_norm(self.norm), make_schedule(self.schedule)
        self.threat = (self._norm.name, self.eps)
        self.delta: Tensor | None = None
        self.turn = 0  # replays of this batch done
        self.at(epoch=0, update=0, updates_per_epoch=1)

    def at(self, *, epoch: int, update: int, updates_per_epoch: int) -> None:
        share = self._schedule.share(epoch=epoch, update=update, updates_per_epoch=updates_per_epoch)
        self.current_eps = share * self.eps

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        delta = self.start_delta(input)
        self.turn = (self.turn + 1) % self.replays
        attacked = (input + delta).clamp(0, 1).requires_grad_(self.current_eps > 0)
        if self.current_eps > 0:
            attacked.register_hook(self._climb)
        output, penalty = self.call_model(attacked)
        return self.total(self.criterion(output, target), output, penalty, eps=input.new_full((), self.current_eps))

    def start_delta(self, x: Tensor) -> Tensor:
        """The delta that this replay starts with, in the ball of the present eps; (B, C, H, W)."""
        if self.delta is None or len(self.delta) < len(x) or (self.turn == 0 and not self.carry):
            dice = Dice(self.draws.keys(x), owner="free")
            self.delta = self._norm.random(x, self.current_eps, dice)
        return self._norm.project(self.delta[: len(x)], self.current_eps)

    def _climb(self, grad: Tensor) -> None:
        """A step along the gradient that this update has computed anyway; a gradient without numbers moves nothing."""
        assert self.delta is not None
        rows, eps = len(grad), self.current_eps
        way = self._norm.steepest(grad.nan_to_num(0.0, 0.0, 0.0))
        moved = self._norm.project(self.delta[:rows] + self.step * eps * way, eps)
        self.delta = torch.cat([moved, self.delta[rows:]])

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """The delta that the next batch begins with."""
        return {"delta": self.delta} if self.carry and self.delta is not None else {}

    def load_task_state(
        self, state: dict[str, Any] | None, strict: bool = True, module: nn.Module | None = None, ema: bool = False
    ) -> None:
        if state:
            self.delta = state["delta"].to(device_of(self.trainable_module))
