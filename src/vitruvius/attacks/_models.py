"""Models as attacks see them: parameters frozen, checked answers, gradients with respect to the image.

B images, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitruvius._checks import check_labels, check_logits
from vitruvius._errors import ConfigError, DataError
from vitruvius._linear import fast_linear
from vitruvius._progress import Progress, no_progress

HALF = (torch.float16, torch.bfloat16)
LOGITS = (
    "the model returned logits that are not finite during the search, for images near its own; "
    "check its weights and its precision."
)
GRADIENTS = (
    "the gradient of the model is not finite for some images, so the search says nothing about them; "
    "is there a square root, a logarithm or a division at 0 in its forward pass?"
)


class LossAndGrad(NamedTuple):
    """The model and the loss at a point."""

    logits: Tensor  # (B, K)
    loss: Tensor  # (B,)
    grad: Tensor  # of x's shape


def loss_and_grad(
    model: Callable[[Tensor], Tensor], x: Tensor, loss: Callable[[Tensor], Tensor], passes: int = 1
) -> LossAndGrad:
    """Logits, losses and the gradient of each image's own loss with respect to that image.

    `x` (B, ...) are the points, `loss` maps logits (B, K) to losses (B,). Several `passes` are averaged: expectation
    over transformation, for models that are random (Athalye et al. 2018).

    `model` returns logits (B, K) that depend on its input by operations with a gradient.
    """
    if passes == 1:
        return _one_pass(model, x, loss)
    results = [_one_pass(model, x, loss) for _ in range(passes)]
    return LossAndGrad(*(torch.stack(parts).mean(0) for parts in zip(*results, strict=True)))


def _one_pass(model: Callable[[Tensor], Tensor], x: Tensor, loss: Callable[[Tensor], Tensor]) -> LossAndGrad:
    with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
        x = x.detach().requires_grad_()
        logits = full_precision(model(x))
        losses = loss(logits)
        if not losses.requires_grad:
            raise ConfigError(
                "the model's output has no gradient with respect to the image (no_grad inside its forward?). "
                "Gradient attacks need that; square, spsa and hopskipjump do not."
            )
        grad = gradient_of(model, losses, x)
    return LossAndGrad(logits.detach(), losses.detach(), grad)


def gradient_of(model: Callable[[Tensor], Tensor], losses: Tensor, x: Tensor) -> Tensor:
    """Of the sum of `losses` (B,), by the engine itself: torch.autograd.grad takes 4 % of a small pass to call it."""
    ones = torch.ones_like(losses)
    if losses.device.type == "cpu":
        run_backward = torch.autograd.Variable._execution_engine.run_backward
        (grad,) = run_backward((losses,), (ones,), False, False, (x,), False, accumulate_grad=False)
    else:
        (grad,) = torch.autograd.grad(losses, x, ones)
    note_grad(model, grad)
    return grad


def full_precision(logits: Tensor) -> Tensor:
    """Logits in at least float32; `logits` may be bfloat16 or float16."""
    return logits.float() if logits.dtype in HALF else logits


def input_size_of(model: object) -> tuple[int, ...] | None:
    """(channels, height, width) that a model says it takes; None where it does not say."""
    config = getattr(model, "data_config", None)
    return None if config is None else tuple(config["input_size"])


def logits_in_batches(model: Callable[[Tensor], Tensor], x: Tensor, batch_size: int | None = None) -> Tensor:
    """(B, K) logits of images (B, ...), `batch_size` images at a time; default all at once."""
    return torch.cat([full_precision(model(part)) for part in x.split(batch_size or max(len(x), 1))])


class InPrecision(nn.Module):
    """A model that is given its images in another precision, `dtype`, than they are searched in."""

    def __init__(self, model: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.training = getattr(model, "training", False)

    def forward(self, x: Tensor) -> Tensor:
        return full_precision(self.model(x.to(self.dtype)))


def in_one_precision(model: Any, x: Tensor) -> tuple[Any, Tensor]:
    """A model and images (B, ...) in the precision of the search: float32, or float64 where the model is in it.

    A model in half precision is given what it takes, unless it converts the images itself.
    """
    if (
        x.dtype == torch.float32
        and isinstance(model, nn.Module)
        and any(p.dtype == x.dtype for p in _parameters_of(model))
    ):
        return model, x
    own = {p.dtype for p in model.parameters() if p.is_floating_point()} if isinstance(model, nn.Module) else set()
    half = x.dtype in HALF
    given = x.dtype
    x = x if x.dtype == torch.float64 and own <= {torch.float64} else x.float()
    if x.dtype in own or not (own or half):
        return model, x
    try:
        answers_in = model(x[:1]).dtype
    except (RuntimeError, TypeError, ValueError):
        answers_in = None
    if answers_in is not None and (answers_in == x.dtype or answers_in in HALF):
        return model, x
    if torch.float64 in own:
        return model, x.double()
    return InPrecision(model, next(iter(own), given)), x


def rounded_toward(moved: Tensor, x: Tensor) -> Tensor:
    """x' in the precision of the images `x`, each pixel rounded toward that of its image: it stays in every ball."""
    if moved.dtype == x.dtype:
        return moved
    moved, close = moved.double(), moved.to(x.dtype)
    too_far = (close.double() - x.double()).abs() > (moved - x.double()).abs()
    nearer = torch.nextafter(close.cpu(), x.cpu()).to(x.device)  # not every GPU has it in float16
    return torch.where(too_far, nearer, close)


@contextmanager
def frozen(model: object) -> Iterator[None]:
    """Inside, the parameters of `model` ask for no gradient; afterwards they ask for what they asked before."""
    parameters = [p for p in _parameters_of(model) if p.requires_grad] if isinstance(model, nn.Module) else []
    for p in parameters:
        p.requires_grad = False
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad = True


def _parameters_of(model: nn.Module) -> Iterator[Tensor]:
    """Those of `model.parameters()`, shared ones more than once; that would name them all, in three times the time."""
    modules: list[nn.Module | None] = [model]
    while modules:
        module = modules.pop()
        if module is not None:
            yield from (p for p in module._parameters.values() if p is not None)
            modules += module._modules.values()


class SurrogateGradient(nn.Module):
    """Answers like `model`, with the gradient of `surrogate`: for a model that masks its gradient.

    Backward pass differentiable approximation (BPDA), Athalye et al. 2018, arXiv:1802.00420.

    `x` (B, C, H, W) goes through both; the answer is always that of `model`.
    """

    def __init__(self, model: nn.Module, surrogate: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.surrogate = surrogate
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            answer: Tensor = self.model(x)
        if not torch.is_grad_enabled():
            return answer
        guide = self.surrogate(x)
        return answer + (guide - guide.detach())


class Wrapper:
    """Something around a model that checks it or makes it faster."""

    inner: Callable[[Tensor], Tensor]


def unwrapped(model: Any) -> Callable[[Tensor], Tensor]:
    """The model inside all wrappers. `model` may be none of them."""
    while isinstance(model, Wrapper):
        model = model.inner
    return model


@dataclass(eq=False)
class Searched(Wrapper):
    """A model while it is searched: what it answers is checked, and whoever watches is told how far the search is.

    The first logits are checked against the labels at once. Whether a later one is finite, and whether a gradient is
    NaN (which a signed step would take for 0), is noted and told by `check_finite`: an accelerator is read once, then.
    On a CPU numbers are noted, for a tensor that stays would move the memory of every later pass to a colder place.

    inner: answers with logits (B, K). y: (B,) or (B, K), labels of the images that are searched. progress: told how
    many steps are made, and of how many. verifier: the model that has the last word where `inner` is a faster view.
    """

    inner: Callable[[Tensor], Tensor]
    y: Tensor
    progress: Progress = no_progress
    verifier: Callable[[Tensor], Tensor] | None = None
    answered: bool = field(default=False, init=False)
    layers: AbstractContextManager[Any] | None = field(default=None, init=False)  # how linear ones are multiplied
    noted: list[tuple[str, Any]] = field(default_factory=list, init=False)  # numbers, finite if what they are of is

    def __call__(self, x: Tensor) -> Tensor:
        """Logits (B, K) of points `x` (B, C, H, W), noted as finite or not."""
        if self.layers is None:
            self.layers = fast_linear(self.inner, x)
        try:
            with self.layers:
                logits = self.inner(x)
        except (AssertionError, RuntimeError, ValueError) as error:
            if not self.answered:
                explain_images(self.inner, x, error)
            raise
        if self.answered:
            self.note(LOGITS, full_precision(logits.detach()))
            return logits
        check_logits(logits, len(x))
        if self.y.ndim == 1:
            check_labels(self.y, logits.shape[1])
        self.answered = True
        return logits

    def note(self, what: str, values: Tensor) -> None:
        """Take note of LOGITS or GRADIENTS."""
        if values.device.type != "cpu":
            self.noted.append((what, values.sum() if what == LOGITS else values.amax()))
            return
        number = values.sum().item()
        if not math.isfinite(number) and not (values.isnan() if what == GRADIENTS else ~values.isfinite()).any():
            number = 0.0  # large numbers have a sum that is not finite
        self.noted.append((what, number))

    def check_finite(self, moved: Tensor) -> None:
        """Refuse x' that come from logits that are not finite or from gradients that are not numbers."""
        self.note(GRADIENTS, moved)
        numbers = [number for _, number in self.noted]
        if isinstance(numbers[-1], Tensor):
            numbers = torch.stack(numbers).tolist()
        for (what, _), number in zip(self.noted, numbers, strict=True):
            if math.isnan(number) if what == GRADIENTS else not math.isfinite(number):
                raise DataError(what)


def explain_images(model: Callable[[Tensor], Tensor], x: Tensor, error: Exception) -> None:
    """Raise what is wrong with images (B, ...) that a model has failed on with `error`, if that can be seen."""
    expected, shape = input_size_of(unwrapped(model)), tuple(x.shape)
    channels_last = x.ndim == 4 and shape[3] in (1, 3, 4) and shape[1] not in (1, 3, 4)
    if channels_last:
        raise DataError(f"images {shape} have their channels last; write x.permute(0, 3, 1, 2).") from error
    if expected is not None and shape[1:] != expected:
        raise DataError(
            f"images {shape} for a model of {expected}; resize them, or build it for their size."
        ) from error


def note_grad(model: Callable[[Tensor], Tensor], grad: Tensor) -> None:
    """Tell a `model` that is being searched which gradient `grad` (B, …) was computed of it."""
    if isinstance(model, Searched):
        model.note(GRADIENTS, grad)


def progress_of(model: Callable[[Tensor], Tensor]) -> Progress:
    """Who watches the search of this model."""
    return model.progress if isinstance(model, Searched) else no_progress


def tell_step(model: Callable[[Tensor], Tensor], step: int, steps: int, run: int = 0, runs: int = 1) -> None:
    """Tell whoever watches the search of `model` that so many of the steps of a run are made; runs count from 0."""
    progress = progress_of(model)
    if progress is no_progress:
        return
    text = f"step {step} of {steps}"
    if runs > 1:
        text = f"run {run + 1} of {runs}, {text}"
    progress(run * steps + step, runs * steps, text)
