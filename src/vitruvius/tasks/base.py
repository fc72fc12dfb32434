"""What tasks share: their base class and registry, losses, the penalties that stages of attention ask for.

A task is called with pixels (B, C, H, W) and labels (B,), or distributions (B, K).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.task import ClassificationTask
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from vitruvius._checks import check_weight
from vitruvius._config import key
from vitruvius._errors import ConfigError
from vitruvius._random import BatchDraws
from vitruvius._registry import Registry

tasks: Registry[Callable[..., Objective]] = Registry("task", homes=["vitruvius.tasks"])


@dataclass(eq=False, repr=False)
class Objective(ClassificationTask):
    """A task whose loss adds, with a weight, the penalties of attention stages; the base of all tasks here.

    Its fields are the settings, beside the `model` that is trained, which takes pixels in [0, 1] and returns logits
    (B, K). A subclass is a dataclass too: it inherits them, adds its own, takes one away by giving its value with
    `field(init=False)`, and defines `forward`, which takes `input`, pixels, and `target`, labels, and returns the loss,
    the logits that are judged, and numbers for the log (see `total`). What else it needs it makes in `__post_init__`.

    The loop of a training run looks at four more things, which a task may override: `replays` (how often it is given
    each batch, every time with an update of its own), `threat` (norm and final eps of the attack it trains against, or
    None), `radius` (eps as it is now) and `at` (called before every update with how far the run has come).
    """

    replays = 1

    model: InitVar[nn.Module]
    _: KW_ONLY
    smoothing: float = key(0.0, "label smoothing of hard labels; the data's if the recipe does not say")
    binary: bool = key(False, "binary cross-entropy for each class instead of cross-entropy over the classes")
    penalty: float = key(0.0, "weight of the penalties of attention stages such as low_rank")

    def __post_init__(self, model: nn.Module) -> None:
        check_weight(self.penalty, "task.penalty")
        super().__init__(model, Criterion(smoothing=self.smoothing, binary=self.binary), verbose=False)
        self.threat: tuple[str, float] | None = None  # what the best weights must withstand
        self.draws = BatchDraws()
        self.penalties = Penalties(model) if self.penalty else None
        if self.penalties is not None and not self.penalties.stages:
            raise ConfigError(
                f"task.penalty = {self.penalty}, but no part of the model's attention has a penalty. "
                "Leave it out, or add a part such as low_rank."
            )

    @property
    def passes_per_image(self) -> float:
        """Of the model, for an image in an epoch; a gradient counts as three."""
        return 3.0 * self.replays

    @property
    def radius(self) -> float:
        """eps of the attack it trains against now; the final one unless a task says otherwise, 0 without a threat."""
        return 0.0 if self.threat is None else self.threat[1]

    def at(self, *, epoch: int, update: int, updates_per_epoch: int) -> None:
        """Called before every update: how many epochs are done, and how many updates in the whole run."""

    def call_model(self, *inputs: Tensor) -> tuple[Any, Tensor | None]:
        """What the trainable module answers to a batch (B, C, H, W) for each pass, and the penalty, a mean of them."""
        if self.penalties is None:
            return self.trainable_module(*inputs), None
        with self.penalties.collecting() as terms:
            answer = self.trainable_module(*inputs)
        return answer, torch.stack(terms).sum() / len(inputs)

    def recording_key(self) -> Hashable:
        """All that decides a step besides its batch and changes as training goes on, such as an attack's radius."""
        return ()

    def read_settings_from(self, device: torch.device) -> None:
        """Keep what changes with every update in tensors on a device, so that one recording of a step serves them all.

        What cannot be kept there is part of `recording_key`. By default nothing changes.
        """

    def total(self, loss: Tensor, output: Tensor, penalty: Tensor | None, **numbers: Tensor) -> dict[str, Tensor]:
        """What a task returns: the whole loss, the logits (B, K) that are judged, and numbers for the log."""
        if penalty is None:
            return {"loss": loss, "output": output, **numbers}
        return {"loss": loss + self.penalty * penalty, "output": output, "penalty": penalty, **numbers}


class Wrapped(nn.Module):
    """A model inside what a loss needs of it; for surgery, checkpoints and evaluation this is the model itself."""

    looks_through: ClassVar[bool] = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def module(self) -> nn.Module:
        """The model, by the name under which timm's `unwrap_model` looks for it."""
        return self.model


class Penalties:
    """Sums `stage.penalty(before, after)` over the stages of a model while it collects.

    Hooks observe the stages; a term counts only while `collecting` is open. The second forward of activation
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


class Criterion(nn.Module):
    """Cross-entropy, or with `binary` one for each class, on labels (B) or distributions (B, K)."""

    def __init__(self, *, smoothing: float = 0.0, binary: bool = False) -> None:
        super().__init__()
        if not 0 <= smoothing < 1:
            raise ConfigError(f"task.smoothing = {smoothing}, expected a number from 0 to below 1.")
        self.smoothing, self.binary = smoothing, binary

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The mean loss ()."""
        if not self.binary:
            return F.cross_entropy(logits, target, label_smoothing=self.smoothing if target.dim() == 1 else 0.0)
        if target.dim() == 1:
            target = F.one_hot(target, logits.shape[1]).to(logits)
            target = target * (1 - self.smoothing) + self.smoothing / logits.shape[1]
        return F.binary_cross_entropy_with_logits(logits, target)


def divergence(logits: Tensor, other: Tensor) -> Tensor:
    """(B,) KL(softmax(logits) ‖ softmax(other)) of logits (B, K); gradients flow through both."""
    p, q = log_probabilities(logits), log_probabilities(other)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(1)


def log_probabilities(logits: Tensor) -> Tensor:
    """(B, K) in float32 at least, also under autocast."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)


def accuracy(logits: Tensor, target: Tensor) -> Tensor:
    """The share of images whose largest logit is the label's; a mixed label counts as its largest part."""
    labels = target.argmax(1) if target.dim() == 2 else target
    return (logits.detach().argmax(1) == labels).float().mean()


@contextmanager
def batch_norm_frozen(model: nn.Module) -> Iterator[None]:
    """Batch norms use the statistics of the batch, as in training, and do not add them to their running ones."""
    tracking = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    for module in tracking:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True
