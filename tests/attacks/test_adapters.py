"""Other libraries' attacks as threats: stand-ins with their interfaces, and the released APGD where it is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attacked import digits_cnn, labels_of, small_net, some_images
from torch import Tensor, nn

from vitruvius._errors import ConfigError, DataError
from vitruvius.attacks.adapters import (
    Foreign,
    FromART,
    FromAutoAttack,
    FromFoolbox,
    FromSecML,
    FromTorchattacks,
    cross_check,
)
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.attacks.noise import UniformNoise
from vitruvius.attacks.pgd import PGD
from vitruvius.evaluation import describe

EPS = 0.1


def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """What all the stand-ins below compute: one signed gradient step."""
    x = x.detach().clone().requires_grad_()
    nn.functional.cross_entropy(model(x), y).backward()
    assert x.grad is not None
    return (x + EPS * x.grad.sign()).clamp(0, 1)


class Torchattack:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        return step(self.model, images, labels)


class FoolboxAttack:
    def __call__(
        self, model: Any, inputs: Tensor, criterion: Tensor, *, epsilons: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        moved = step(model.wrapped, inputs, criterion)
        assert epsilons == EPS
        return moved + 7, moved, torch.ones(len(inputs), dtype=torch.bool)


class FoolboxModel:
    def __init__(self, model: nn.Module) -> None:
        self.wrapped = model


class ARTAttack:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def generate(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        assert isinstance(x, np.ndarray)
        return step(self.model, torch.from_numpy(x), torch.from_numpy(y)).detach().numpy()


class SecMLAttack:
    def __call__(self, model: FoolboxModel, data_loader: Any) -> Any:
        return [(step(model.wrapped, x, y), y) for x, y in data_loader]


class ReleasedAutoAttack:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def run_standard_evaluation(self, x_orig: Tensor, y_orig: Tensor, bs: int = 250) -> Tensor:
        return step(self.model, x_orig, y_orig)


ADAPTERS = [
    FromTorchattacks(make=Torchattack, eps=EPS),
    FromFoolbox(make=lambda model: (FoolboxAttack(), FoolboxModel(model)), eps=EPS),
    FromART(make=ARTAttack, eps=EPS),
    FromSecML(make=lambda model: (SecMLAttack(), FoolboxModel(model)), eps=EPS),
    FromAutoAttack(make=ReleasedAutoAttack, eps=EPS),
]


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
def test_each_library_is_called_in_its_own_way(adapter: Foreign) -> None:
    net, (x, y) = small_net(), some_images()
    with torch.no_grad():
        moved = adapter(net, x, y)
    torch.testing.assert_close(moved, PGD(eps=EPS, steps=1, step_size=EPS, random_start=False)(net, x, y))
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


def test_what_leaves_image_or_ball_is_refused() -> None:
    net, (x, y) = small_net(), some_images()
    with pytest.raises(DataError, match=r"mine moved an image by 0\.1 in linf; eps is 0\.05"):
        FromTorchattacks(make=Torchattack, eps=0.05, name="mine")(net, x, y)
    with pytest.raises(DataError, match=r"pixels from .* expected \[0, 1\]"):
        FromTorchattacks(make=lambda model: lambda x, y: x * 255)(net, x, y)
    with pytest.raises(DataError, match="same shape"):
        FromTorchattacks(make=lambda model: lambda x, y: x[:1])(net, x, y)
    with pytest.raises(ConfigError, match="give FromFoolbox an eps"):
        FromFoolbox(make=lambda model: (FoolboxAttack(), FoolboxModel(model)))(net, x, y)


class WithSettings(Torchattack):
    def __init__(self, model: nn.Module, eps: float, steps: int = 10) -> None:
        super().__init__(model)
        self.eps, self.steps, self.device, self._targeted = eps, steps, "cpu", False


def test_an_adapter_is_described_by_the_attack_and_its_settings() -> None:
    two = [FromTorchattacks(make=lambda model: WithSettings(model, 8 / 255, 5), eps=8 / 255) for _ in range(2)]
    assert {describe(adapter) for adapter in two} == {
        "fromtorchattacks(WithSettings(eps=8/255, steps=5), eps=8/255, norm=linf)"
    }
    foolbox = FromFoolbox(make=lambda model: (WithSettings(model, 0.1), FoolboxModel(model)), name="theirs")
    assert describe(foolbox) == "theirs(WithSettings(eps=0.1, steps=10))"
    assert describe(FromART(make=Unmakeable)) == "fromart(Unmakeable)"


class Unmakeable:
    def __init__(self, model: nn.Module) -> None:
        raise RuntimeError("needs a real one")


def test_adapters_are_called_by_their_names_in_reports() -> None:
    named = FromTorchattacks(make=Torchattack, name="pgd of theirs")
    assert [getattr(a, "__name__", "") for a in (named, ADAPTERS[2])] == ["pgd of theirs", "FromART"]


def test_a_cross_check_counts_who_fells_what() -> None:
    net, (x, _) = small_net(), some_images(30)
    y = labels_of(net, x)
    both = cross_check(net, x, y, PGD(eps=0.3, steps=20), UniformNoise(eps=0.01))
    assert both.images == 30
    assert both.ours < both.theirs
    assert both.only_ours - both.only_theirs == round(30 * (both.theirs - both.ours))


def test_pyautoattack_runs_beside_ours() -> None:
    released = pytest.importorskip("pyautoattack", reason="pyautoattack is not installed: oracle not run")
    net, x, y = digits_cnn()

    def make(model: nn.Module) -> Any:
        attack = released.AutoAttack(model, norm="Linf", eps=0.15, seed=0, version="custom", attacks=["apgd-ce"])
        attack.apgd.n_iter, attack.apgd.n_restarts = 20, 1
        return attack

    theirs = FromAutoAttack(make=make, eps=0.15)
    ours = AutoAttack(eps=0.15, version="custom", attacks=(APGD(eps=0.15, steps=20),))
    with torch.random.fork_rng():
        check = cross_check(net, x[:30], y[:30], ours, theirs)
    assert check.theirs < 1
    assert check.only_theirs <= 1


def test_the_released_apgd_fells_no_more_than_ours() -> None:
    released = pytest.importorskip("pyautoattack.autopgd_base", reason="pyautoattack is not installed: oracle not run")
    net, x, y = digits_cnn()
    x, y = x[:40], y[:40]

    def make(model: nn.Module) -> Any:
        settings = {"norm": "Linf", "eps": 0.15, "n_iter": 30, "n_restarts": 1, "seed": 0}
        attack = released.APGDAttack(model, eot_iter=1, rho=0.75, verbose=False, device="cpu", **settings)
        return attack.perturb

    with torch.random.fork_rng():
        check = cross_check(net, x, y, APGD(eps=0.15, steps=30), FromTorchattacks(make=make, eps=0.15))
    assert check.only_theirs <= 1
