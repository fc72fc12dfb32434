"""What an attack is: frozen settings, called with (model, x, y), giving x' in the ball and in the image.

The other packages import from here what they need of the attacks. B images (B, C, H, W) of pixels in [0, 1], K classes.
An attack leaves the train or eval mode as it finds it.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import Field, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from vitruvius._checks import check_labels, check_pixels
from vitruvius._errors import ConfigError, DataError, UnknownName, suggest
from vitruvius._processes import keep_memory
from vitruvius._progress import Progress, no_progress
from vitruvius._random import Dice, image_ids
from vitruvius._registry import Registry
from vitruvius.attacks._models import LossAndGrad as LossAndGrad
from vitruvius.attacks._models import Searched as Searched
from vitruvius.attacks._models import SurrogateGradient as SurrogateGradient
from vitruvius.attacks._models import explain_images as explain_images
from vitruvius.attacks._models import frozen as frozen
from vitruvius.attacks._models import full_precision as full_precision
from vitruvius.attacks._models import in_one_precision as in_one_precision
from vitruvius.attacks._models import input_size_of, rounded_toward
from vitruvius.attacks._models import loss_and_grad as loss_and_grad
from vitruvius.attacks.losses import CE as CE
from vitruvius.attacks.losses import KL as KL
from vitruvius.attacks.losses import MARGIN as MARGIN
from vitruvius.attacks.losses import Loss
from vitruvius.attacks.losses import hard_labels as hard_labels
from vitruvius.attacks.norms import LINF as LINF
from vitruvius.attacks.norms import Norm as Norm
from vitruvius.attacks.norms import as_norm as as_norm

Model: TypeAlias = Callable[[Tensor], Tensor]
ROBUST = -1  # in `Outcome.broken_by`: no stage broke the image
CLEAN = 0  # in `Outcome.broken_by`: misclassified as it is
ROUNDING = 1e-5
NO_IDS = torch.zeros(0, dtype=torch.int64)
PRECISIONS = ("exact", "fast", "auto")
# what settings of these names may be, in every attack
ONE_OR_MORE = {
    "batch_size", "candidates", "eot_iterations", "first_queries", "group", "most_queries", "patches", "pool_batches",
    "queries", "restarts", "samples", "search_steps", "steps", "targets",
}  # fmt: skip
ZERO_OR_MORE = {"attention_weight", "confidence", "decay", "layer", "momentum", "overshoot", "std"}
MORE_THAN_ZERO = {"first_constant", "first_radius", "gamma", "lr", "share", "step_size", "width"}


class Threat(Protocol):
    """Anything that disturbs images: (model, x, y) → x'.

    One that also takes `ids=` (B,) int64 gives an image the same x' in every batch, if the ids are the same; one that
    takes `progress=` says how far it is.

    `model` returns logits (B, K) for images `x` (B, C, H, W) in [0, 1]; `y` (B,) are their labels.
    """

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, /) -> Tensor: ...


attacks: Registry[Callable[..., Threat]] = Registry("attack", homes=["vitruvius.attacks"])


def disturb(
    threat: Threat, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor, progress: Progress = no_progress
) -> Tensor:
    """x' by a threat, which is given the ids (B,) of the images and whom to tell how far it is, if it takes them."""
    optional = {"ids": ids, "progress": progress}
    taken = inspect.signature(threat).parameters
    return threat(model, x, y, **{name: value for name, value in optional.items() if name in taken})


class StageResult(NamedTuple):
    """What one attack of an ensemble did."""

    name: str
    search: str  # exact, fast, or polish: the short exact search after a fast one
    searched: int  # images
    broken: int  # images, of those searched
    seconds: float

    @property
    def label(self) -> str:
        """The stage's name, with its way to search unless that is exact."""
        return stage_label(self.name, self.search)


def stage_label(name: str, search: str) -> str:
    return name if search == "exact" else f"{name} ({search})"


@dataclass(frozen=True)
class Outcome:
    """What an ensemble of attacks found, so far or in the end; stage 0 is `clean`: what is wrong as it is."""

    x: Tensor  # x': fools the model where the image is broken
    broken_by: Tensor  # (B,) index into stages; −1 where the image is robust
    stages: tuple[StageResult, ...]  # those that have run
    plan: tuple[str, ...] = ()  # labels of all stages, in order; empty where they are not known beforehand
    view_fooled: Tensor | None = None  # (B,) bool: images that fooled a faster view of the model, and not the model
    view_error: float | None = None  # of that view's logits, where it was measured
    view_trusted: bool = True  # whether that view knows the clean images

    @property
    def robust(self) -> Tensor:
        """(B,) bool: no stage broke the image."""
        return self.broken_by == ROBUST

    def robust_by_stage(self) -> dict[str, Tensor]:
        """(B,) bool after each stage, in order; a stage that comes again has a label of its own."""
        robust: dict[str, Tensor] = {}
        for index, stage in enumerate(self.stages):
            label, number = stage.label, 2
            while label in robust:
                label, number = f"{stage.label} #{number}", number + 1
            robust[label] = self.robust | (self.broken_by > index)
        return robust


@runtime_checkable
class Ensemble(Protocol):
    """Several attacks run as one: each on the images that are still robust, with a record of which one broke which.

    Whatever has these three members is an ensemble, AutoAttack or your own class: an evaluation calls `run` instead of
    the threat itself, gives it several batches at once, and writes down which images were robust after each stage.
    It is also a threat: `__call__(model, x, y, *, ids=None)` returns `run(...).x`. Its `run` may also take
    `progress=`, told how far it is; `on_stage=`, called with the `Outcome` so far when a stage has ended; and
    `start=`, such an outcome, to resume after it: then an evaluation that is killed loses no more than one stage.
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


class Cost(NamedTuple):
    """At most what an attack spends on an image: steps, and passes of the model in each; a gradient counts as three."""

    steps: int = 1
    passes: float = 1.0

    @property
    def total(self) -> float:
        """Passes of the model."""
        return self.steps * self.passes


def cost_of(threat: object) -> Cost:
    """What a `threat` spends on an image: one pass where it is no attack of ours."""
    return threat.cost() if isinstance(threat, Attack) else Cost()


class _Settings:
    """The signature of a class of attacks: its settings, which `__new__` would hide."""

    def __get__(self, made: object, kind: type) -> inspect.Signature:
        if made is not None:  # an attack itself is called with model, images and labels
            raise AttributeError("__signature__")
        signature = inspect.signature(kind.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


@dataclass(frozen=True, kw_only=True)
class Ball:
    """What attacks and ensembles share: a ball around each image and a seed, checked when they are made."""

    norms: ClassVar[tuple[str, ...]] = ("linf", "l2", "l1")  # those it works in
    finds_nearest: ClassVar[bool] = False  # seeks the nearest point that fools the model, so any eps will do, inf too
    __signature__: ClassVar[Any] = _Settings()

    eps: float  # radius, in pixels of images in [0, 1]
    norm: Norm = LINF
    seed: int = 0

    def __new__(cls, *unnamed: object, **_: object) -> Self:
        if unnamed:
            raise ConfigError(
                f"{cls.__name__} takes its settings by name and the model when it is called: "
                f"{cls.__name__}(eps=8 / 255)(model, x, y)."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        name = type(self).__name__
        object.__setattr__(self, "norm", as_norm(self.norm))
        if self.norm.name not in self.norms:
            raise ConfigError(f"{name} works in {' and '.join(self.norms)}, not in {self.norm}.")
        if math.isnan(self.eps) or self.eps < 0:
            raise ConfigError(f"eps={self.eps} is not a radius; give a number that is 0 or more, such as 4 / 255.")
        for setting in fields(self):
            self._check_setting(setting)
        if self.finds_nearest:
            return
        low, high = self.pixel_range
        if math.isinf(self.eps) and not math.isinf(high - low):
            raise ConfigError(f"{name} needs a finite eps, such as 4/255; got {self.eps}.")
        if self.norm == LINF and self.eps > high - low:  # which was most likely meant in 1/255
            raise ConfigError(
                f"eps={self.eps:g} in linf allows every image, since pixels are in [{low:g}, {high:g}]; "
                f"did you mean {self.eps:g}/255?"
            )

    def _check_setting(self, setting: Field[Any]) -> None:
        """A loss by its name becomes the loss; numbers are what their names allow."""
        name, value = setting.name, getattr(self, setting.name)
        if isinstance(setting.default, Loss) and isinstance(value, str):
            object.__setattr__(self, name, type(setting.default).parse(value))
        if name == "precision" and value not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise UnknownName(f"no precision named {value!r}{suggest(value, PRECISIONS)} Known: {known}.")
        if name == "eps" or value is None:
            return
        expected = ""
        if str(setting.type).startswith("int") and (isinstance(value, bool) or not isinstance(value, int)):
            expected = "a whole number"
        elif isinstance(value, float) and not math.isfinite(value):
            expected = "a finite number"
        elif name in ONE_OR_MORE and value < 1:
            expected = "1 or more"
        elif name in ZERO_OR_MORE and value < 0:
            expected = "0 or more"
        elif name in MORE_THAN_ZERO and not (value > 0 or (name == "step_size" and value == self.eps == 0)):
            expected = "more than 0"
        if expected:
            got = f"{value:g}" if isinstance(value, int | float) else repr(value)
            raise ConfigError(f"{type(self).__name__} with {name}={got}; expected {expected}.")

    @property
    def pixel_range(self) -> tuple[float, float]:
        """Least and largest pixel: the setting `bounds` of attacks that have it."""
        return getattr(self, "bounds", (0.0, 1.0))


@dataclass(frozen=True, kw_only=True)
class Attack(Ball, ABC):
    """A search for x', with checks before and after it. An attack of your own writes `search`.

    Settings of these names mean the same everywhere: `bounds` (least and largest pixel), `batch_size` (the attack takes
    any number of images and searches so many at once), `compile` (the model by torch.compile), `loss`, `precision`.
    """

    radius_may_be_tensor: ClassVar[bool] = False  # whether a search reads eps in tensor arithmetic alone
    draws: ClassVar[bool] = True  # whether a search uses its dice; if not, pixels need no hash

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor | None = None,
        /,
        *,
        ids: Tensor | None = None,
        progress: Progress = no_progress,
    ) -> Tensor:
        """Check, then search. `ids` (B,) int64 name the images for the random numbers; default: a hash of their pixels.

        `model` returns logits (B, K), in train or eval mode; `x` (B, C, H, W) are images in [0, 1]; `y` (B,) their
        labels, or (B, K) probabilities where the loss compares with them. `progress` is told the steps made. Images in
        half precision are searched in float32, and x' is rounded toward them.
        """
        labels = check_call(self, model, x, y)
        self._check_kind_of_labels(labels)
        if labels.device.type == "cpu":
            keep_memory()
        if getattr(self, "precision", "exact") != "exact":
            return self._in_two_precisions(model, x, labels, ids, progress)
        inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        with inference, torch.no_grad(), frozen(model):
            answer, images = in_one_precision(model, outside_inference_mode(x))
            labels = outside_inference_mode(labels.long() if labels.ndim == 1 else labels)
            searched = Searched(self.view(answer, images), labels, progress)
            if ids is None:
                ids = image_ids(x) if self.draws else NO_IDS
            moved = self.search(searched, images, labels, self.dice(ids.to(x.device)))
            searched.check_finite(moved)
            if not type(self).__module__.startswith("vitruvius."):
                check_moved(self, moved, images)
            return rounded_toward(moved, x)

    def _in_two_precisions(
        self, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor | None, progress: Progress
    ) -> Tensor:
        """As an ensemble of this attack alone, which searches in bfloat16 and has the last word in float32."""
        from vitruvius.attacks.autoattack import AutoAttack

        here: Any = self
        alone = AutoAttack(
            eps=self.eps, norm=self.norm, seed=self.seed, version="custom", precision=here.precision,
            batch_size=getattr(self, "batch_size", None), attacks=(replace(here, precision="exact"),),
        )  # fmt: skip
        return alone(model, x, y, ids=ids, progress=progress)

    @abstractmethod
    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        """The attack itself, without checks; called under no_grad with the parameters frozen.

        model: answers with logits (B, K), which are checked as they come.
        x: (B, C, H, W), the images.
        y: (B,) int64 labels, or (B, K) probabilities.
        dice: random numbers that belong to the images, and not to their batch.
        """

    def refine(self, model: Model, x: Tensor, y: Tensor, dice: Dice, start: Tensor) -> Tensor:
        """Search again where a search in lower precision has failed; `start` is the worst point known.

        `model`, `x`, `y` and `dice` are as for `search`. By default the whole search; some attacks have a shorter one.
        """
        return self.search(model, x, y, dice)

    def dice(self, ids: Tensor) -> Dice:
        """The random numbers of images with these `ids` (B,) under this attack."""
        return Dice(ids, self.seed, self._name_of_dice())

    def view(self, model: nn.Module, x: Tensor) -> nn.Module:
        """The `model` as it is searched: compiled for images like `x` (B, C, H, W) where `compile` is on."""
        if not getattr(self, "compile", False):
            return model
        from vitruvius.attacks._compiled import compile_model

        return compile_model(model, x)

    def cost(self) -> Cost:
        """At most what an image takes, for the time left: by the settings that say how long our attacks search."""
        counts = (int(getattr(self, name, 1)) for name in ("restarts", "targets", "search_steps", "steps"))
        return Cost(math.prod(counts), 3.0 * getattr(self, "eot_iterations", 1))

    def _name_of_dice(self) -> str:
        """Two attacks of one seed do not share their random numbers."""
        return type(self).__name__

    def _check_kind_of_labels(self, y: Tensor) -> None:
        """Refuse probabilities (B, K), except for a loss that compares with them and nothing else."""
        name = type(self).__name__
        if getattr(self, "loss", None) != KL:
            check_hard_labels(y, name)
        elif y.ndim != 2:
            raise DataError(
                f"{name} with loss=kl compares with probabilities (B, K); labels have shape {tuple(y.shape)}."
            )


def outside_inference_mode(tensor: Tensor) -> Tensor:
    """The tensor without its history; a copy where it was made in inference mode, which autograd refuses."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def check_call(attack: Ball, model: object, x: Any, y: Any) -> Tensor:
    """Refuse what is no model, no batch of images or no labels, with the call as it should be; the labels."""
    name = type(attack).__name__
    if isinstance(model, Tensor) or not callable(model):
        got = f"a tensor {tuple(model.shape)}" if isinstance(model, Tensor) else repr(model)
        raise ConfigError(f"{name} got {got} for a model; the call is {name}(eps=8 / 255)(model, x, y).")
    for what, value in (("images", x), ("labels", y)):
        if not isinstance(value, Tensor):
            raise DataError(
                f"{name} got {type(value).__name__} for {what}; expected a tensor, such as torch.as_tensor({what}), in "
                f"the call {name}(eps=8 / 255)(model, x, y)."
            )
    if y.ndim == 0 or (x.ndim == 3 and y.ndim == 1 and len(y) == 1 != len(x)):
        raise DataError(f"one image {tuple(x.shape)} without a batch; write x[None] and y.reshape(1).")
    check_inputs(x, y, *attack.pixel_range)
    if not len(x):
        raise DataError(f"the batch is empty, images have shape {tuple(x.shape)}; an attack needs at least one image.")
    if x.ndim == 4 and x.shape[1] == 1:  # which would be broadcast to colours, and attacked in grey
        expected = input_size_of(model)
        if expected is not None and expected[0] > 1:
            raise DataError(
                f"grey images {tuple(x.shape)} for a model of {expected[0]} channels; write "
                f"x.repeat(1, {expected[0]}, 1, 1), so that every channel is attacked."
            )
    return y


def check_moved(threat: object, moved: Tensor, x: Tensor) -> None:
    """Refuse x' that are not images or lie outside the ball of a `threat` that says its `eps` and `norm`."""
    name = getattr(threat, "__name__", type(threat).__name__)
    if not isinstance(moved, Tensor) or moved.shape != x.shape:
        got = tuple(moved.shape) if isinstance(moved, Tensor) else type(moved).__name__
        raise DataError(f"{name} returned {got} for images {tuple(x.shape)}; expected x' of the same shape.")
    low, high = getattr(threat, "pixel_range", (0.0, 1.0))
    least, most = (float(value) for value in moved.detach().aminmax())
    if not (least >= low - ROUNDING and most <= high + ROUNDING):
        raise DataError(
            f"{name} returned pixels from {least:.4g} to {most:.4g}; expected [{low:g}, {high:g}]: end with "
            f"x.clamp({low:g}, {high:g})."
        )
    eps, norm = getattr(threat, "eps", None), getattr(threat, "norm", LINF)
    if eps is None or not isinstance(norm, Norm):
        return
    length = float(norm.length((moved - x).detach()).max())
    if length > eps * (1 + 10 * ROUNDING) + ROUNDING:
        raise DataError(
            f"{name} moved an image by {length:.6g} in {norm}; eps is {eps:.6g}: end with norm.project(x' - x, eps)."
        )


def check_inputs(x: Tensor, y: Tensor, low: float = 0.0, high: float = 1.0) -> None:
    """Refuse images (B, ...) that are not pixels in [low, high], and labels that are not classes (B,).

    Probabilities (B, K) pass too: they are what some losses of training compare with.
    """
    if x.ndim < 2 or len(x) != len(y) or y.ndim not in (1, 2):
        raise DataError(f"images {tuple(x.shape)} and labels {tuple(y.shape)} do not pair; expected (B, ...) and (B,).")
    check_pixels(x, low, high)
    if y.ndim == 1:
        check_labels(y)
    elif y.numel() and float(y.amin()) < 0:
        raise DataError(f"labels reach down to {float(y.amin()):g}; expected 0 or more.")


def check_hard_labels(y: Tensor, name: str) -> None:
    """Refuse labels that are not one class per image."""
    if y.ndim != 1:
        raise DataError(
            f"labels have shape {tuple(y.shape)}; {name} needs one whole number per image. "
            "Mixed or smoothed labels belong to training; here take y.argmax(1)."
        )
