"""Free adversarial training: every batch is played again and again, and the gradient of each update also moves the
perturbation, so that x' costs no passes of its own (Shafahi et al. 2019, arXiv:1904.12843, algorithm 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import device_of
from vitruvius._dice import Dice
from vitruvius._errors import ConfigError
from vitruvius.attacks.base import as_norm
from vitruvius.tasks._base import Objective, tasks
from vitruvius.tasks._losses import Criterion
from vitruvius.tasks._schedules import make_schedule


@tasks.register("free")
class Free(Objective):
    """Cross-entropy at x + delta; delta takes a step with the gradient of each of the `replays` updates of a batch.

    A batch begins with the delta that the last one has left, which is part of the task's state.

    eps: radius of the perturbation at the end of the schedule, for pixels in [0, 1]
    norm: linf, l2 or l1
    replays: updates on each batch; divide the epochs by it
    step: length of a step, in eps
    carry: begin with the last batch's delta; false: with a random one
    schedule: how eps grows: constant, linear:epochs=10 or {use: sine, epochs: 10}
    smoothing: label smoothing of hard labels; the data's if the recipe does not say
    binary: binary cross-entropy for each class instead of cross-entropy over the classes
    penalty: weight of the penalties of attention stages such as low_rank
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        eps: float,
        norm: str = "linf",
        replays: int = 4,
        step: float = 1.0,
        carry: bool = True,
        schedule: str | dict[str, Any] = "constant",
        smoothing: float = 0.0,
        binary: bool = False,
        penalty: float = 0.0,
    ) -> None:
        if replays < 1:
            raise ConfigError(f"task.replays = {replays}, expected at least 1.")
        super().__init__(model, Criterion(smoothing=smoothing, binary=binary), penalty=penalty)
        self.norm = as_norm(norm)
        self.final = eps
        self.threat = (self.norm.name, eps)
        self.schedule = make_schedule(schedule)
        self.replays = replays
        self.step = step
        self.carry = carry
        self.delta: Tensor | None = None
        self.turn = 0  # replays of this batch done
        self.at(epoch=0, update=0, updates_per_epoch=1)

    def at(self, *, epoch: int, update: int, updates_per_epoch: int) -> None:
        """Told before every batch: how far training has come."""
        share = self.schedule.share(epoch=epoch, update=update, updates_per_epoch=updates_per_epoch)
        self.eps = share * self.final

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        delta = self.begun(input)
        self.turn = (self.turn + 1) % self.replays
        attacked = (input + delta).clamp(0, 1).requires_grad_(self.eps > 0)
        if self.eps > 0:
            attacked.register_hook(self._climb)
        output, penalty = self.call_model(attacked)
        return self.total(self.criterion(output, target), output, penalty, eps=input.new_full((), self.eps))

    def begun(self, x: Tensor) -> Tensor:
        """The delta of this replay, in the ball of the present eps; (B, C, H, W).

        `x` are the pixels of the batch.
        """
        if self.delta is None or len(self.delta) < len(x) or (self.turn == 0 and not self.carry):
            dice = Dice(self.draws.keys(x), owner="free")
            self.delta = self.norm.random(x, self.eps, dice)
        return self.norm.project(self.delta[: len(x)], self.eps)

    def _climb(self, grad: Tensor) -> None:
        """A step along the gradient that this update has computed anyway; a gradient without numbers moves nothing."""
        assert self.delta is not None
        rows, eps = len(grad), self.eps
        way = self.norm.steepest(grad.nan_to_num(0.0, 0.0, 0.0))
        moved = self.norm.project(self.delta[:rows] + self.step * eps * way, eps)
        self.delta = torch.cat([moved, self.delta[rows:]])

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """The delta that the next batch begins with."""
        return {"delta": self.delta} if self.carry and self.delta is not None else {}

    def load_task_state(
        self, state: dict[str, Any] | None, strict: bool = True, module: nn.Module | None = None, ema: bool = False
    ) -> None:
        """Put back what `get_task_state` returned: `state`, or None for a run that has none.

        `strict`, `module` and `ema` are as timm's loop passes them on, and change nothing here.
        """
        if state:
            self.delta = state["delta"].to(device_of(self.trainable_module))
