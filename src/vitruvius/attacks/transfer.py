"""Transfer: an attack made on one model and judged on another, which is what somebody without the weights can do.

Papernot et al. 2016, arXiv:1605.07277. The source is whatever names a model on the command line. B images, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._errors import ConfigError, DataError
from vitruvius._progress import Progress, no_progress
from vitruvius._random import image_ids
from vitruvius._registry import read_spec
from vitruvius.attacks.base import Threat, attacks, disturb, in_one_precision
from vitruvius.attacks.norms import Norm, as_norm


@attacks.register("transfer")
@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Transfer: x' is found on the model `source` and judged on the one that is evaluated.

    Settings:
    `source`: a run folder, a model's name, or a model in eval mode.
    `eps`: radius, in pixels of images in [0, 1]; may be left out where `attack` is an object with its own.
    `attack`: what is run on the source: a name, `name:key=value`, `{use: name, key: value}` or an attack; default
    mi_fgsm.
    `norm`: of the ball; default the attack's.
    `weights`: of a source by name: a file of weights; default the pretrained ones.
    `seed`: of the attack.
    """

    source: str | nn.Module | Source
    eps: float | None = None
    attack: Any = "mi_fgsm"
    norm: Norm | None = None
    weights: str | None = None
    seed: int = 0
    made: Threat = field(init=False, repr=False, compare=False)  # the attack that runs on the source

    def __post_init__(self) -> None:
        if self.norm is not None:
            object.__setattr__(self, "norm", as_norm(self.norm))
        object.__setattr__(self, "made", self._make())
        object.__setattr__(self, "eps", getattr(self.made, "eps", self.eps))
        object.__setattr__(self, "source", self._open())

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, /, *, ids: Tensor | None = None, progress: Progress = no_progress
    ) -> Tensor:
        """x' of images `x` (B, C, H, W) with labels `y` (B,), found without a look at `model`.

        `ids` (B,) int64 name the images for the dice; default: a hash of their pixels.
        """
        assert isinstance(self.source, Source)
        source = self.source.on(x)
        self._check_classes(source, model, x)
        return disturb(self.made, source, x, y, image_ids(x) if ids is None else ids, progress)

    def _make(self) -> Threat:
        """The attack, in this ball; one that is given as an object has its own."""
        given: dict[str, Any] = {"eps": self.eps, "norm": self.norm}
        settings = {key: value for key, value in given.items() if value is not None}
        if not isinstance(self.attack, str | Mapping):
            for key, value in settings.items():
                if getattr(self.attack, key, value) != value:
                    raise ConfigError(f"transfer: {key}={value} and an attack with {key}={getattr(self.attack, key)}.")
            return attacks.make(self.attack, where="transfer.attack")
        name, own = read_spec(self.attack, where="transfer.attack")
        return attacks.make({"use": name, **settings, "seed": self.seed, **own}, where="transfer.attack")

    def _open(self) -> Source:
        if isinstance(self.source, Source):
            return self.source
        if isinstance(self.source, nn.Module):
            return Source(self.source, type(self.source).__name__)
        from vitruvius.targets import open_target

        overrides = [] if self.weights is None else [f"model.weights={self.weights}"]
        opened = open_target(self.source, overrides, data_needed=False)
        return Source(opened.model, self.source)

    def _check_classes(self, source: nn.Module, model: nn.Module, x: Tensor) -> None:
        with torch.no_grad():
            theirs, ours = (_classes(one, x[:1]) for one in (source, model))
        if theirs != ours:
            raise DataError(
                f"transfer: the source {self.source} has {theirs} classes and the model {ours}; "
                "labels must mean the same to both."
            )


def _classes(model: nn.Module, x: Tensor) -> int:
    answer, image = in_one_precision(model, x)
    return int(answer(image).shape[-1])


class Source:
    """A model that attacks are made on: it prints as its name and a hash of its weights, which ledgers keep.

    `model` is put into eval mode; `name` is what it was opened as.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        from vitruvius.evaluation.base import fingerprint

        self.model = model.eval()
        self.name = f"{name}@{fingerprint(model)[:8]}"

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def on(self, x: Tensor) -> nn.Module:
        """The model where the images `x` (B, C, H, W) are; it sees them in its own size."""
        self.model.to(x.device)
        known = getattr(self.model, "data_config", None)
        if known is None or tuple(known["input_size"][1:]) == tuple(x.shape[2:]):
            return self.model
        return Resized(self.model, tuple(known["input_size"][1:]))


class Resized(nn.Module):
    """A model that sees images of any size in its own, by bilinear interpolation; gradients pass.

    `model` is that model, `size` (height, width) in pixels.
    """

    def __init__(self, model: nn.Module, size: tuple[int, ...]) -> None:
        super().__init__()
        self.model = model
        self.size = size
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K) of images `x` (B, C, H, W)."""
        small = F.interpolate(x, size=self.size, mode="bilinear", align_corners=False, antialias=True)
        return self.model(small.clamp(0, 1))
