"""What an attack is: frozen settings, called with (model, x, y), giving x' in the ball and in the image.

B images (B, C, H, W) of pixels in [0, 1], K classes. An attack leaves the train or eval mode as it finds it.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from vitruvius._checks import check_labels, check_pixels
from vitruvius._dice import Dice, image_ids
from vitruvius._errors import ConfigError, DataError
from vitruvius._registry import Registry
from vitruvius.attacks._ensemble.result import Outcome
from vitruvius.attacks._losses import KL
from vitruvius.attacks._models import CheckedModel, frozen
from vitruvius.attacks._norms import LINF, Norm, as_norm

Model: TypeAlias = Callable[[Tensor], Tensor]


class Threat(Protocol):
    """Anything that disturbs images: (model, x, y) → x'.

    One that also takes `ids=` (B,) int64 gives an image the same x' in every batch, if the ids are the same.

    `model` returns logits (B, K) for images `x` (B, C, H, W) in [0, 1]; `y` (B,) are their labels.
    """

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, /) -> Tensor: ...


@runtime_checkable
class Ensemble(Protocol):
    """Several attacks run as one: each on the images that are still robust, with a record of which one broke which.

    Whatever has these three members is an ensemble, AutoAttack or your own class: an evaluation calls `run` instead of
    the threat itself, hands it several batches at once, and writes down which images were robust after each stage.
    It is also a threat: `__call__(model, x, y, *, ids=None)` returns `run(...).x`. Its `run` may also take `on_event`,
    called with a `StageEvent` as stages advance, and `journal`, a `Journal` that keeps what they decide, the stages
    under the names that its `stage_labels()` lists: then an evaluation shows how far it is, and loses no more than a
    batch when it is killed.
    """

    @property
    def batch_size(self) -> int | None:
        """Images searched at once; None leaves it to the caller."""
        ...

    @property
    def pool_batches(self) -> int:
        """Batches of an evaluation given to one `run`, so that batches stay full while images drop out; 1 or more."""
        ...

    def run(
        self, model: nn.Module, x: Tensor, y: Tensor, *, ids: Tensor | None = None, batch_size: int | None = None
    ) -> Outcome:
        """Attack images (B, C, H, W) with labels (B,).

        `ids` (B,) int64 name the images for the random numbers; `batch_size` is used where the ensemble has none.
        """
        ...


class Work(NamedTuple):
    """At most what an attack spends on an image: runs (restarts, targets), steps of each, passes of the model in each.

    A pass with its gradient counts as three.
    """

    runs: int = 1
    steps: int = 1
    passes: float = 3.0

    @property
    def total(self) -> float:
        """Passes of the model."""
        return self.runs * self.steps * self.passes


def work_of(threat: object) -> Work:
    """What a threat spends on an image: as an attack of ours says, else one pass.

    `threat` is any threat; of an ensemble, whose stages depend on what is left, endless passes are told.
    """
    if isinstance(threat, Attack):
        return threat.work()
    if isinstance(threat, Ensemble):
        return Work(passes=math.inf)
    return Work(passes=1.0)


attacks: Registry[Callable[..., Threat]] = Registry(
    "attack", homes=["vitruvius.attacks", "vitruvius.evaluation.patch_fool", "vitruvius.evaluation.transfer"]
)


def disturb(threat: Threat, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    """x' by a threat, which is told the ids (B,) of the images if it takes them.

    `threat` is called with `model`, images `x` (B, C, H, W) and labels `y` (B,); `ids` are int64.
    """
    if "ids" in inspect.signature(threat).parameters:
        return threat(model, x, y, ids=ids)  # type: ignore[call-arg]
    return threat(model, x, y)


@dataclass(frozen=True, kw_only=True)
class Ball:
    """What attacks and ensembles share: a ball around each image and a seed, checked when they are made."""

    norms: ClassVar[tuple[str, ...]] = ("linf", "l2", "l1")  # those it works in
    finds_nearest: ClassVar[bool] = False  # seeks the nearest point that fools the model, so any eps will do, inf too

    eps: float  # radius, in pixels of images in [0, 1]
    norm: Norm = LINF
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", as_norm(self.norm))
        if self.norm.name not in self.norms:
            name = type(self).__name__
            raise ConfigError(f"{name} works in {' and '.join(self.norms)}, not in {self.norm}.")
        check_eps(self.eps)
        if not self.finds_nearest:
            self._check_radius()

    def image_range(self) -> tuple[float, float]:
        """Least and largest pixel."""
        return 0.0, 1.0

    def _check_radius(self) -> None:
        """Refuse a radius that allows every image, which was most likely meant in 1/255."""
        low, high = self.image_range()
        if math.isinf(self.eps) and not math.isinf(high - low):
            raise ConfigError(f"{type(self).__name__} needs a finite eps, such as 4/255; got {self.eps}.")
        if self.norm == LINF and self.eps > high - low:
            raise ConfigError(
                f"eps={self.eps:g} in linf allows every image, since pixels are in [{low:g}, {high:g}]; "
                f"did you mean {self.eps:g}/255?"
            )


@dataclass(frozen=True, kw_only=True)
class Attack(Ball, ABC):
    """A search for x', with checks before it."""

    radius_may_be_tensor: ClassVar[bool] = False  # whether a search reads eps in tensor arithmetic alone
    batches_itself: ClassVar[bool] = False  # takes any number of images and has a batch_size of its own

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, /, *, ids: Tensor | None = None) -> Tensor:
        """Check, then search. `ids` (B,) int64 name the images for the dice; default: a hash of their pixels.

        `model` returns logits (B, K), in train or eval mode; `x` (B, C, H, W) are images in [0, 1]; `y` (B,) their
        labels, or (B, K) probabilities where the loss compares with them.
        """
        check_inputs(x, y, *self.image_range())
        check_not_empty(x)
        self._check_kind_of_labels(y)
        with torch.inference_mode(False), torch.no_grad(), frozen(model):
            x = outside_inference_mode(x)
            y = outside_inference_mode(whole_labels(y))
            dice = Dice(known_ids(x, ids), self.seed, self.tag())
            checked = CheckedModel(self.prepare(model, x), y)
            moved = self.search(checked, x, y, dice)
            checked.check_finite(moved)
            return moved

    @abstractmethod
    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        """The attack itself, without checks; called under no_grad with the parameters frozen.

        model: answers with logits (B, K), which are checked as they come.
        x: (B, C, H, W), the images.
        y: (B,) int64 labels, or (B, K) probabilities.
        dice: random numbers that belong to the images, and not to their batch.
        """

    def prepare(self, model: nn.Module, x: Tensor) -> nn.Module:
        """The model as it is searched, or a faster view of it that answers the same.

        `model` as it was given; `x` (B, C, H, W) the images of the first batch, for their shape.
        """
        return model

    def polish(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor) -> Tensor:
        """Search again where a faster search has failed; `start` is the worst point known. Shorter where it can be.

        `model`, `x`, `y` and `dice` are as for `search`.
        """
        return self.search(model, x, y, dice)

    def work(self) -> Work:
        """At most what an image takes, for the time left: by the settings that say how long our attacks search."""
        counts = {name: int(getattr(self, name, 1)) for name in ("restarts", "targets", "search_steps", "steps")}
        runs = counts["restarts"] * counts["targets"] * counts["search_steps"]
        return Work(runs, counts["steps"], 3.0 * getattr(self, "eot_iterations", 1))

    def tag(self) -> str:
        """Whose dice these are."""
        return type(self).__name__

    def _check_kind_of_labels(self, y: Tensor) -> None:
        """Refuse probabilities (B, K), except for a loss that compares with them and nothing else."""
        name = type(self).__name__
        if getattr(self, "loss", None) != KL:
            check_hard_labels(y, name)
        elif y.ndim != 2:
            raise DataError(f"{name} with loss=kl compares with probabilities (B, K); labels have shape {_shape(y)}.")


def outside_inference_mode(tensor: Tensor) -> Tensor:
    """The tensor without its history; a copy where it was made in inference mode, which autograd refuses."""
    if tensor.is_inference():
        return tensor.clone()
    return tensor.detach()


def known_ids(x: Tensor, ids: Tensor | None) -> Tensor:
    """(B,) the ids as given, or else a hash of the pixels."""
    if ids is None:
        return image_ids(x)
    return ids.to(x.device)


def whole_labels(y: Tensor) -> Tensor:
    """Labels (B,) of any whole type as int64; probabilities (B, K) as they are."""
    if y.ndim == 1:
        return y.long()
    return y


def check_eps(eps: float) -> None:
    """Refuse what is not a radius.

    `eps` is in pixels of images in [0, 1]; inf passes.
    """
    if math.isnan(eps) or eps < 0:
        raise ConfigError(f"eps={eps} is not a radius; give a number that is 0 or more, such as 4 / 255.")


def check_at_least(attack: Ball, least: int, *settings: str) -> None:
    """Refuse an attack one of whose named settings is below `least`."""
    for name in settings:
        value = getattr(attack, name)
        if value < least:
            raise ConfigError(f"{type(attack).__name__} with {name}={value:g}; expected {least} or more.")


def check_step_size(attack: Ball, step_size: float | None) -> None:
    """Refuse a step that leads nowhere or backward; in a ball of radius 0 it may be 0."""
    if step_size is None or step_size > 0 or step_size == attack.eps == 0:
        return
    raise ConfigError(f"{type(attack).__name__} with step_size={step_size:g}; expected more than 0.")


def check_positive(attack: Ball, *settings: str) -> None:
    """Refuse an attack one of whose named settings is not above 0."""
    for name in settings:
        value = getattr(attack, name)
        if not value > 0:
            raise ConfigError(f"{type(attack).__name__} with {name}={value:g}; expected more than 0.")


def check_inputs(x: Tensor, y: Tensor, low: float = 0.0, high: float = 1.0) -> None:
    """Refuse images (B, ...) that are not pixels in [low, high], and labels that are not classes (B,).

    Probabilities (B, K) pass too: they are what some losses of training compare with.

    `x` and `y` are a batch; `low` and `high` are the least and the largest pixel (default 0 and 1).
    """
    if x.ndim < 2 or len(x) != len(y) or y.ndim not in (1, 2):
        raise DataError(f"images {tuple(x.shape)} and labels {tuple(y.shape)} do not pair; expected (B, ...) and (B,).")
    check_pixels(x, low, high)
    if y.ndim == 1:
        check_labels(y)
    elif y.numel() and float(y.amin()) < 0:
        raise DataError(f"labels reach down to {float(y.amin()):g}; expected 0 or more.")


def check_not_empty(x: Tensor) -> None:
    """Refuse a batch without images."""
    if not len(x):
        raise DataError(f"the batch is empty, images have shape {_shape(x)}; an attack needs at least one image.")


def check_hard_labels(y: Tensor, name: str) -> None:
    """Refuse labels that are not one class per image."""
    if y.ndim != 1:
        raise DataError(
            f"labels have shape {_shape(y)}; {name} needs one whole number per image. "
            "Mixed or smoothed labels belong to training; here take y.argmax(1)."
        )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
