"""Attacks of other libraries as threats: torchattacks, foolbox, ART, secml-torch and the original AutoAttack.

Nothing of theirs is imported here: an adapter takes your maker of their object, (model) → attack, calls it the way
that library does, and checks that what comes back is in the image and in the ball.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from vitruvius._errors import ConfigError
from vitruvius.attacks._models import frozen
from vitruvius.attacks.base import Threat, check_moved
from vitruvius.attacks.norms import LINF, Norm, as_norm

Make = Callable[[nn.Module], Any]


@dataclass(frozen=True, kw_only=True)
class Foreign(ABC):
    """An attack of another library."""

    make: Make  # their attack for a model
    eps: float | None = None  # checked against what comes back, if given
    norm: Norm = LINF
    name: str = ""  # for reports; default: the adapter's

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", as_norm(self.norm))
        object.__setattr__(self, "__name__", self.name or type(self).__name__)  # what reports call it

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, /) -> Tensor:
        """x' of images `x` (B, C, H, W) in [0, 1] with labels `y` (B,), by an attack made for `model`."""
        with torch.enable_grad(), frozen(model):
            moved = self.call(self.make(model), x, y)
        return self._settle(moved, x)

    @abstractmethod
    def call(self, attack: Any, x: Tensor, y: Tensor) -> Any:
        """Their result for these images."""

    def _settle(self, moved: Any, x: Tensor) -> Tensor:
        """As a tensor like x; refused where it is not one, or leaves image or ball by more than rounding."""
        moved = torch.as_tensor(moved).detach().to(x)
        check_moved(self, moved, x)
        if self.eps is None:
            return moved.clamp(0, 1)
        return (x + self.norm.project(moved - x, self.eps)).clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class FromTorchattacks(Foreign):
    """`make=lambda model: torchattacks.PGD(model, eps=8 / 255)`; called as attack(x, y)."""

    def call(self, attack: Any, x: Tensor, y: Tensor) -> Any:
        return attack(x, y)


@dataclass(frozen=True, kw_only=True)
class FromFoolbox(Foreign):
    """`make=lambda model: (foolbox.attacks.LinfPGD(), foolbox.PyTorchModel(model, bounds=(0, 1)))`; needs eps."""

    def call(self, attack: Any, x: Tensor, y: Tensor) -> Any:
        if self.eps is None:
            raise ConfigError("a foolbox attack is called with its radius; give FromFoolbox an eps.")
        theirs, wrapped = attack
        _, clipped, _ = theirs(wrapped, x, y, epsilons=self.eps)
        return clipped


@dataclass(frozen=True, kw_only=True)
class FromART(Foreign):
    """`make=lambda model: ProjectedGradientDescent(PyTorchClassifier(model, ...), eps=8 / 255)`; numpy in and out."""

    def call(self, attack: Any, x: Tensor, y: Tensor) -> Any:
        return attack.generate(x=x.detach().cpu().numpy(), y=y.cpu().numpy())


@dataclass(frozen=True, kw_only=True)
class FromSecML(Foreign):
    """`make=lambda model: (PGD(...), BasePyTorchClassifier(model))`; loaders in and out."""

    def call(self, attack: Any, x: Tensor, y: Tensor) -> Any:
        theirs, wrapped = attack
        loader = theirs(wrapped, DataLoader(TensorDataset(x, y), batch_size=len(x)))
        return torch.cat([batch[0].detach().to(x.device) for batch in loader])


@dataclass(frozen=True, kw_only=True)
class FromAutoAttack(Foreign):
    """`make=lambda model: autoattack.AutoAttack(model, norm="Linf", eps=8 / 255)`, or pyautoattack's."""

    def call(self, attack: Any, x: Tensor, y: Tensor) -> Any:
        run = attack.run_standard_evaluation
        size = "bs" if "bs" in inspect.signature(run).parameters else "batch_size"
        result = run(x, y, **{size: len(x)})
        return result[0] if isinstance(result, tuple) else result  # pyautoattack gives labels too


class CrossCheck(NamedTuple):
    """Two attacks on the same images: the accuracy under each, and which broke images the other did not."""

    images: int
    ours: float  # accuracy
    theirs: float
    only_ours: int  # images that only our attack broke
    only_theirs: int


def cross_check(model: nn.Module, x: Tensor, y: Tensor, ours: Threat, theirs: Threat) -> CrossCheck:
    """Run two threats beside each other."""
    with torch.no_grad():
        mine = model(ours(model, x, y)).argmax(1) == y
        other = model(theirs(model, x, y)).argmax(1) == y
    return CrossCheck(
        images=len(y),
        ours=float(mine.double().mean()),
        theirs=float(other.double().mean()),
        only_ours=int((~mine & other).sum()),
        only_theirs=int((mine & ~other).sum()),
    )
