"""Auto-PGD: the released iterates from the same start, and as strong as the original on its models."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attacked import GoldenNet, accuracy, digits_cnn, golden, labels_of, small_net, some_images

from vitruvius._random import Dice
from vitruvius.attacks._auto_pgd_l1 import SparseAscent, largest, moved_share
from vitruvius.attacks.apgd import APGD, Ascent, checkpoints
from vitruvius.attacks.apgd_malt import APGDMalt
from vitruvius.attacks.apgd_targeted import APGDTargeted
from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.attacks.base import CE, LINF, Norm
from vitruvius.attacks.losses import DLR, TARGETED_DLR
from vitruvius.attacks.norms import L1, L2
from vitruvius.attacks.pgd import PGD

OBJECTIVES = {
    "ce": lambda logits, y, _: CE(logits, y),
    "dlr": lambda logits, y, _: DLR(logits, y),
    "dlr-targeted": TARGETED_DLR,
}
CASES = golden("aa_apgd_trace")[1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_iterates_best_points_and_successes_are_the_originals(case: dict[str, Any]) -> None:
    tensors, _, metadata = golden("aa_apgd_trace")
    name, x, y = case["id"], tensors["x"], tensors["y"]
    net = GoldenNet(tensors)
    rules = Ascent({"Linf": LINF, "L2": L2}[case["norm"]], case["eps"], case["n_iter"], OBJECTIVES[case["loss"]])
    state = rules.begin(x, y, tensors.get(f"{name}.y_target", y), tensors[f"{name}.x_init"])
    seen, fooled = [], torch.zeros(len(x), dtype=torch.bool)
    for _ in range(case["n_iter"] + 1):
        state = rules.advance(net, state)
        seen.append(state.seen)
        fooled |= state.fooled
    tolerance = {"rtol": 0, "atol": 2e-12 if "iterates" not in case else 1e-9}
    if f"{name}.iterates" in tensors:
        points = torch.stack(seen)[:: int(metadata["stride"])]
        torch.testing.assert_close(points, tensors[f"{name}.iterates"], **tolerance)
    torch.testing.assert_close(state.best, tensors[f"{name}.x_best"], **tolerance)
    torch.testing.assert_close(state.best_loss, tensors[f"{name}.loss_best"], rtol=1e-10, atol=1e-10)
    assert torch.equal(~fooled, tensors[f"{name}.acc"])


def test_checkpoints_come_ever_sooner() -> None:
    windows = checkpoints(100, torch.device("cpu"))
    assert [(i, int(w)) for i, w in enumerate(windows) if w] == [
        (22, 22), (41, 19), (57, 16), (70, 13), (80, 10), (87, 7), (93, 6), (99, 6),
    ]  # fmt: skip


def test_results_do_not_depend_on_how_images_are_batched_and_refilled() -> None:
    net, x, y = digits_cnn()
    attack, ids = APGD(eps=0.15, steps=20), torch.arange(len(x))
    whole = attack(net, x, y, ids=ids)
    streamed = replace(attack, batch_size=7)(net, x, y, ids=ids)
    apart = torch.cat([attack(net, x[part], y[part], ids=part) for part in ids.split(9)])
    for other in (streamed, apart):
        same = (whole - other).flatten(1).abs().amax(1) < 1e-4
        assert float(same.double().mean()) > 0.95  # rounding may send an ascent elsewhere
        assert torch.equal(net(whole).argmax(1) == y, net(other).argmax(1) == y)


def test_apgd_beats_pgd_of_the_same_length_and_restarts_help() -> None:
    net, x, y = digits_cnn()
    apgd = accuracy(net, APGD(eps=0.2, steps=30)(net, x, y), y)
    assert apgd < accuracy(net, PGD(eps=0.2, steps=30)(net, x, y), y)
    assert accuracy(net, APGD(eps=0.2, steps=30, restarts=3)(net, x, y), y) <= apgd


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_apgd_ce_falls_as_many_images_as_the_original(norm: str) -> None:
    net, x, y = digits_cnn()
    flags, cases, _ = golden("aa_runs_cnn")
    case = next(c for c in cases if c["norm"] == norm and c["eps"] in (0.15, 1.0))
    ours = accuracy(net, APGD(eps=case["eps"], norm=norm)(net, x, y), y)
    original = float(flags[f"{case['id']}.apgdce_1restart_robust"].double().mean())
    assert ours <= original + 1 / 60 + 1e-9


def test_apgd_t_tries_other_classes_in_the_order_of_their_logits() -> None:
    net, (x, _) = small_net(4), some_images(5, 4)
    with torch.no_grad():
        logits = net(x)
    y = logits.argmax(1)
    targets = APGDTargeted(eps=0.1).targets_of(net, x, y).T
    assert targets.shape == (5, 3)  # nine were asked for, there are three
    assert torch.equal(targets, logits.argsort(1, descending=True)[:, 1:])


def test_averaging_passes_steadies_a_random_model() -> None:
    net, (x, y) = small_net(), some_images(4)

    class Noisy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return net(x + 0.3 * torch.randn_like(x))

    from vitruvius.attacks._models import loss_and_grad

    torch.manual_seed(0)
    exact = loss_and_grad(net, x, lambda logits: CE(logits, y)).grad

    def error(passes: int) -> float:
        return float((loss_and_grad(Noisy(), x, lambda logits: CE(logits, y), passes).grad - exact).norm())

    assert error(200) < 0.4 * sum(error(1) for _ in range(10)) / 10
    assert APGD(eps=0.1, steps=3, eot_iterations=2)(Noisy().eval(), x, y).shape == x.shape


def test_l1_steps_move_the_largest_gradients() -> None:
    grad = torch.tensor([[3.0, -5.0, 1.0, 0.5], [1.0, 2.0, 3.0, -4.0]])
    assert largest(grad, torch.tensor([0.5, 0.25])).tolist() == [[1, -1, 0, 0], [0, 0, 0, -1]]
    assert moved_share(torch.tensor([[0.0, 1.0], [0.0, 0.0]])).tolist() == [0.5, 0.0]


def test_l1_ascents_stay_in_ball_and_image_and_climb() -> None:
    net, x, y = digits_cnn()
    x, y = x[:10], y[:10]
    rules = SparseAscent(5.0, 20, OBJECTIVES["ce"], stops=False)
    state = rules.begin(x, y, y, rules.start(x, Dice(torch.arange(10)), 0))
    losses = []
    for _ in range(21):
        state = rules.advance(net, state)
        losses.append(state.best_loss.sum().item())
        assert float(L1.length(state.seen - x).max()) <= 5 + 1e-5
        assert 0 <= float(state.seen.min()) <= float(state.seen.max()) <= 1
    assert losses[-1] > 3 * losses[0]


def test_l1_apgd_beats_sparse_descent() -> None:
    from vitruvius.attacks.sparse_l1 import SparseL1

    net, x, y = digits_cnn()
    ours = accuracy(net, APGD(eps=5.0, norm="l1", steps=50)(net, x, y), y)
    assert ours <= accuracy(net, SparseL1(eps=5.0, steps=50)(net, x, y), y)


@pytest.mark.parametrize("norm", [LINF, L2, L1], ids=str)
def test_malt_tries_classes_in_the_order_of_their_distance_by_the_gradient(norm: Norm) -> None:
    """Distances written out image by image and class by class."""
    net, (x, _) = small_net(6), some_images(5, 6)
    y = labels_of(net, x)
    order = {"linf": 1.0, "l2": 2.0, "l1": math.inf}[norm.name]
    expected = []
    for i in range(5):
        distances = {}
        for k in set(range(6)) - {int(y[i])}:
            z = x[i : i + 1].clone().requires_grad_()
            gap = net(z)[0, y[i]] - net(z)[0, k]
            (grad,) = torch.autograd.grad(gap, z)
            distances[k] = float(gap.detach()) / float(torch.linalg.vector_norm(grad.flatten(), order))
        expected.append(sorted(distances, key=distances.__getitem__)[:3])
    with torch.no_grad():
        chosen = APGDMalt(eps=0.1, norm=norm, targets=3, batch_size=2).targets_of(net, x, y).T
    assert chosen.tolist() == expected


def test_malt_with_few_targets_breaks_what_the_likeliest_classes_do_not() -> None:
    """A likely class behind a flat gradient is out of reach; an unlikely one with a steep gradient is near."""

    class Trap(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            level = x.flatten(1).mean(1)
            return torch.stack([torch.ones_like(level), 0.9 - 0.1 * level, 20 * level - 10, -level, -level], 1)

    x, y = torch.full((3, 3, 4, 4), 0.5), torch.zeros(3, dtype=torch.long)
    likeliest, malt = (kind(eps=0.1, steps=10, targets=1, loss="margin") for kind in (APGDTargeted, APGDMalt))
    model = Trap().eval()
    assert accuracy(model, likeliest(model, x, y), y) == 1
    assert accuracy(model, malt(model, x, y), y) == 0


def test_fast_standard_is_apgd_and_malt() -> None:
    names = [name for name, _ in AutoAttack(eps=0.1, version="fast-standard").stages()]
    assert names == ["apgd-ce", "apgd-malt"]
