"""Cross-checks on small models: ours beside foolbox's and torchattacks' attacks of the same name.

Deterministic ones must agree pixel by pixel; of those that draw lots, ours must be as strong. Skipped, visibly, where
the libraries are not installed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attacked import accuracy, digits_cnn, digits_vit, labels_of, small_net, some_images
from torch import Tensor, nn

from vitruvius.attacks.adapters import FromFoolbox, FromTorchattacks, cross_check
from vitruvius.attacks.base import LINF, Attack, Norm
from vitruvius.attacks.carlini import Carlini
from vitruvius.attacks.ddn import DDN
from vitruvius.attacks.deepfool import DeepFool
from vitruvius.attacks.fab import FAB
from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.hopskipjump import HopSkipJump
from vitruvius.attacks.momentum_fgsm import MIFGSM, NIFGSM
from vitruvius.attacks.norms import L2, NORMS
from vitruvius.attacks.pgd import PGD
from vitruvius.attacks.transfer import Transfer

EPS = 0.15
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def foolbox() -> Any:
    return pytest.importorskip("foolbox", reason="foolbox is not installed: cross-check not run")


def torchattacks() -> Any:
    return pytest.importorskip("torchattacks", reason="torchattacks is not installed: cross-check not run")


def of_foolbox(net: nn.Module, x: Tensor, y: Tensor, attack: Any, eps: float | None = None) -> Tensor:
    """Theirs at eps; None: the nearest point found."""
    wrapped = foolbox().PyTorchModel(net, bounds=(0, 1))
    _, clipped, _ = attack(wrapped, x, y, epsilons=eps)
    moved: Tensor = clipped.detach()
    return moved


def problem(kind: str = "cnn", count: int = 20) -> tuple[nn.Module, Tensor, Tensor]:
    """A golden network and images that it has right."""
    net, x, _ = {"cnn": digits_cnn, "vit": digits_vit}[kind]()
    return net, x[:count], labels_of(net, x[:count])


@pytest.mark.parametrize("kind", ["cnn", "vit"])
def test_fgsm_is_theirs(kind: str) -> None:
    net, x, y = problem(kind)
    ours = FGSM(eps=EPS)(net, x, y)
    torch.testing.assert_close(
        ours, of_foolbox(net, x, y, foolbox().attacks.LinfFastGradientAttack(random_start=False), EPS)
    )
    torch.testing.assert_close(ours, torchattacks().FGSM(net, eps=EPS)(x, y))


@pytest.mark.parametrize("norm", [LINF, L2], ids=str)
def test_pgd_without_a_random_start_is_theirs(norm: Norm) -> None:
    net, x, y = problem()
    kinds = {"linf": foolbox().attacks.LinfPGD, "l2": foolbox().attacks.L2PGD}
    theirs = kinds[norm.name](rel_stepsize=None, abs_stepsize=0.03, steps=10, random_start=False)
    ours = PGD(eps=EPS, norm=norm, steps=10, step_size=0.03, random_start=False)(net, x, y)
    torch.testing.assert_close(ours, of_foolbox(net, x, y, theirs, EPS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["cnn", "vit"])
def test_momentum_is_theirs(kind: str) -> None:
    net, x, y = problem(kind)
    for ours, theirs in ((MIFGSM, torchattacks().MIFGSM), (NIFGSM, torchattacks().NIFGSM)):
        expected = theirs(net, eps=EPS, alpha=EPS / 8, steps=8, decay=1.0)(x, y)
        same = (ours(eps=EPS, steps=8)(net, x, y) - expected).abs() < 1e-5
        assert float(same.double().mean()) > 0.998  # a gradient that is 0 but for rounding has any sign


@pytest.mark.parametrize("norm", [LINF, L2], ids=str)
@pytest.mark.parametrize("kind", ["cnn", "vit"])
def test_deepfool_comes_as_near_as_theirs(norm: Norm, kind: str) -> None:
    net, x, y = problem(kind)
    kinds = {"linf": foolbox().attacks.LinfDeepFoolAttack, "l2": foolbox().attacks.L2DeepFoolAttack}
    theirs = of_foolbox(net, x, y, kinds[norm.name](steps=50, candidates=10, overshoot=0.02))
    ours = DeepFool(norm=norm)(net, x, y)
    assert accuracy(net, ours, y) == 0
    torch.testing.assert_close(norm.length(ours - x), norm.length(theirs - x), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("kind", ["cnn", "vit"])
def test_ddn_comes_as_near_as_theirs(kind: str) -> None:
    net, x, y = problem(kind)
    theirs = of_foolbox(net, x, y, foolbox().attacks.DDNAttack(init_epsilon=1.0, steps=50, gamma=0.05))
    ours = DDN(steps=50)(net, x, y)
    assert accuracy(net, ours, y) == 0
    _as_near(L2, x, ours, theirs, 1.02)


def test_carlini_comes_as_near_as_theirs() -> None:
    net, x, y = problem(count=6)
    settings = {"binary_search_steps": 5, "steps": 80, "stepsize": 0.05, "confidence": 0.0, "initial_const": 1e-2}
    theirs = of_foolbox(net, x, y, foolbox().attacks.L2CarliniWagnerAttack(abort_early=False, **settings))
    ours = Carlini(search_steps=5, steps=80, lr=0.05, first_constant=1e-2)(net, x, y)
    assert accuracy(net, ours, y) == 0
    _as_near(L2, x, ours, theirs, 1.05)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_fab_in_minimal_norm_mode_comes_as_near_as_theirs(norm: str) -> None:
    net, x, y = problem(count=12)
    large = {"linf": 1.0, "l2": 14.0, "l1": 190.0}[norm]
    theirs = torchattacks().FAB(net, norm=norm.upper().replace("LINF", "Linf"), eps=large, steps=30, n_restarts=1)
    found = theirs.attack_single_run(x, y) if hasattr(theirs, "attack_single_run") else theirs(x, y)
    ours = FAB(eps=float("inf"), norm=NORMS[norm], steps=30)(net, x, y)
    assert accuracy(net, ours, y) == 0
    _as_near(NORMS[norm], x, ours, found.detach(), 1.1)


@pytest.mark.parametrize("norm", [L2, LINF], ids=str)
@pytest.mark.parametrize("kind", ["cnn", "vit"])
def test_hopskipjump_comes_as_near_as_theirs(norm: Norm, kind: str) -> None:
    net, x, y = problem(kind, 6)
    constraint = {"l2": "l2", "linf": "linf"}[norm.name]
    theirs = foolbox().attacks.HopSkipJumpAttack(
        steps=6, initial_gradient_eval_steps=60, max_gradient_eval_steps=400, constraint=constraint
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = of_foolbox(net, x, y, theirs)
    ours = HopSkipJump(eps=20.0, norm=norm, steps=6, first_queries=60, most_queries=400)(net, x, y)
    assert accuracy(net, ours, y) == 0
    _as_near(norm, x, ours, found, 1.25)


def test_transfer_of_their_attack_is_ours() -> None:
    """An attack of another library can be made on one model and judged on another too."""
    source, x, y = problem("cnn")
    net = digits_vit()[0]
    theirs = FromTorchattacks(
        make=lambda model: torchattacks().MIFGSM(model, eps=EPS, alpha=EPS / 10, steps=10), eps=EPS
    )
    by_theirs = Transfer(source=source, attack=theirs)(net, x, y)
    ours = Transfer(source=source, eps=EPS, attack="mi_fgsm")(net, x, y)
    torch.testing.assert_close(ours, by_theirs, rtol=0, atol=1e-5)


def test_a_cross_check_with_foolbox_counts_who_breaks_what() -> None:
    net, x, y = problem()
    make = lambda model: (foolbox().attacks.LinfPGD(steps=20), foolbox().PyTorchModel(model, bounds=(0, 1)))  # noqa: E731
    foolbox()
    check = cross_check(net, x, y, PGD(eps=EPS, steps=20), FromFoolbox(make=make, eps=EPS))
    assert check.only_theirs <= 1
    assert check.ours <= check.theirs + 0.05


def _as_near(norm: Norm, x: Tensor, ours: Tensor, theirs: Tensor, factor: float) -> None:
    """The median of our distances is no larger than this multiple of theirs."""
    near = norm.length(ours - x)
    other = norm.length(theirs - x)
    moved = other > 0  # images that theirs gave up on lie where they were
    assert int(moved.sum()) >= len(x) // 2
    assert float(near[moved].median()) <= factor * float(other[moved].median()), (near, other)


def test_small_nets_of_any_shape_are_searched_alike() -> None:
    net, (x, _) = small_net(), some_images(8)
    y = labels_of(net, x)
    ours: Attack = MIFGSM(eps=0.1, steps=5)
    expected = torchattacks().MIFGSM(net, eps=0.1, alpha=0.02, steps=5)(x, y)
    torch.testing.assert_close(ours(net, x, y), expected, rtol=0, atol=1e-6)
