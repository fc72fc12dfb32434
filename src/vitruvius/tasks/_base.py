"""What tasks share: their registry, and the penalties that stages of attention ask for.

A task is called with pixels (B, C, H, W) and labels (B,), or distributions (B, K).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.task import ClassificationTask
from torch import Tensor, nn

from vitruvius._checks import check_weight
from vitruvius._errors import ConfigError
from vitruvius._registry import Registry

tasks: Registry[Callable[..., Objective]] = Registry("task", homes=["vitruvius.tasks"])


class BatchDraws:
    """Keys for the random numbers of a batch's images, the same however many processes share the batch.

    Alone, they come from torch's global generator, which the loop seeds for every batch. Of several processes each
    draws for the whole batch and keeps the rows that are its own: images are dealt out like cards.

    `rank` is this process (default 0) of `world_size` (default 1).
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self._generator: torch.Generator | None = None

    def begin(self, seed: int, device: torch.device) -> None:
        """Before a batch: the seed that a process alone would have.

        `device` is that of the batch.
        """
        if self.world_size > 1:
            self._generator = torch.Generator(device).manual_seed(seed)

    def keys(self, x: Tensor) -> Tensor:
        """(B,) a number for each image. `x` is this process's part of the batch, (B, ...)."""
        rows = len(x) * self.world_size
        drawn = torch.randint(2**62, (rows,), device=x.device, generator=self._generator)
        return drawn[self.rank :: self.world_size]


class Objective(ClassificationTask):
    """A task whose loss adds, with a weight, the penalties of attention stages; the base of all tasks here.

    The loop of a training run looks at four more things, which a task may override: `replays` (how often it is given
    each batch, every time with an update of its own), `threat` (norm and final eps of the attack it trains against, or
    None), `radius` (eps as it is now) and `at` (called before every update with how far the run has come).

    model: what is trained; takes pixels in [0, 1] and returns logits (B, K).
    criterion: the loss of logits and labels.
    penalty: weight of the penalties of attention stages such as low_rank; default 0, which does not compute them.

    `forward` takes `input`, pixels (B, C, H, W), and `target`, labels (B,) or distributions (B, K), and returns the
    loss, the logits that are judged, and numbers for the log. `module` and `ema`, which timm's loop passes on, say
    whose state is meant: that of the module trained (default), or of its average.
    """

    replays: int = 1
    threat: tuple[str, float] | None = None  # what the best weights must withstand

    def __init__(self, model: nn.Module, criterion: nn.Module, *, penalty: float = 0.0) -> None:
        check_weight(penalty, "task.penalty")
        super().__init__(model, criterion, verbose=False)
        self.draws = BatchDraws()
        self.penalty = penalty
        self.penalties = Penalties(model) if penalty else None
        if self.penalties is not None and not self.penalties.stages:
            raise ConfigError(
                f"task.penalty = {penalty}, but no part of the model's attention has a penalty. "
                "Leave it out, or add a part such as low_rank."
            )

    @property
    def radius(self) -> float:
        """eps of the attack it trains against now; the final one unless a task says otherwise, 0 without a threat."""
        if self.threat is None:
            return 0.0
        return self.threat[1]

    def at(self, *, epoch: int, update: int, updates_per_epoch: int) -> None:
        """Called before every update: how far the run has come.

        `epoch` counts epochs done, `update` the updates done in the whole run; `updates_per_epoch` is how many an epoch
        has.
        """

    def call_model(self, *inputs: Tensor) -> tuple[Any, Tensor | None]:
        """What the trainable module answers, and the penalty of its stages, a mean over the inputs.

        `inputs` are batches (B, C, H, W), one for each pass of the loss.
        """
        if self.penalties is None:
            return self.trainable_module(*inputs), None
        with self.penalties.collecting() as terms:
            answer = self.trainable_module(*inputs)
        return answer, torch.stack(terms).sum() / len(inputs)

    def ask(self, *inputs: Tensor) -> tuple[Any, Tensor | None]:
        """The old name of `call_model`.

        `inputs` are as for `call_model`.
        """
        warnings.warn("Objective.ask is now called Objective.call_model.", DeprecationWarning, stacklevel=2)
        return self.call_model(*inputs)

    def recording_key(self) -> Hashable:
        """All that decides a step besides its batch and changes as training goes on, such as an attack's radius."""
        return ()

    def read_settings_from(self, device: torch.device) -> None:
        """Keep what changes with every update in tensors on a device, so that one recording of a step serves them all.

        What cannot be kept there is part of `recording_key`. By default nothing changes.
        """

    def total(self, loss: Tensor, output: Tensor, penalty: Tensor | None, **numbers: Tensor) -> dict[str, Tensor]:
        """What a task returns: the whole loss, the logits that are judged, and numbers for the log.

        `loss` () without the penalty; `output` (B, K) the logits; `penalty` () as `call_model` returned it; `numbers`
        () by the name they are logged under.
        """
        if penalty is None:
            return {"loss": loss, "output": output, **numbers}
        return {"loss": loss + self.penalty * penalty, "output": output, "penalty": penalty, **numbers}


class Penalties:
    """Sums `stage.penalty(before, after)` over the stages of a model while it collects.

    Hooks watch the stages; a term counts only while `collecting` is open. The second forward of activation
    checkpointing runs in backward, when it is closed: it repeats the computation, as it must, and is not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        self.stages = [module for module in model.modules() if callable(getattr(module, "penalty", None))]
        self._terms: list[Tensor] = []
        self._open, self._silent = False, False
        for stage in self.stages:
            stage.register_forward_hook(self._note)

    @contextmanager
    def collecting(self) -> Iterator[list[Tensor]]:
        """Terms of the forwards inside the block."""
        self._terms = []
        self._open = True
        try:
            yield self._terms
        finally:
            self._open = False

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Nothing is computed inside the block: the passes of an attack, backward included."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def _note(self, stage: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled() and not self._silent:
            term = stage.penalty(inputs[0], output)
            if self._open:
                self._terms.append(term)
