"""Faster views of a model: what they see, who judges what they find, and that compiling changes nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attacked import accuracy, digits_cnn, digits_vit, labels_of, small_net, some_images
from torch import Tensor, nn

from vitruvius._random import Dice
from vitruvius.attacks import _lower_precision
from vitruvius.attacks._batching import BestSoFar, take_chunk
from vitruvius.attacks._compiled import CompiledModel, CompiledStep, compile_model
from vitruvius.attacks._lower_precision import Bfloat16Copy, first_layer_of
from vitruvius.attacks._models import Searched, unwrapped
from vitruvius.attacks.apgd import APGD, Ascent, AutoPGD, take_step
from vitruvius.attacks.apgd_targeted import APGDTargeted
from vitruvius.attacks.autoattack import AutoAttack, Cascade
from vitruvius.attacks.fab_targeted import FABTargeted
from vitruvius.attacks.pgd import PGD
from vitruvius.attention import softmax
from vitruvius.attention.base import Core


class Counting(nn.Module):
    """Answers like another model and notes how many images it was asked about."""

    def __init__(self, model: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.asked = model, 0
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.asked += len(x)
        return self.model(x)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile that traces, guards and runs, but writes no kernels: seconds instead of minutes."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **settings: real(step, backend="eager", **settings))


def test_the_first_layer_of_a_fast_view_sees_what_bfloat16_would_round_away() -> None:
    net, x = small_net(), torch.full((2, 3, 6, 6), 0.75)
    assert first_layer_of(net, x) == "1"  # after Flatten, which has no weights
    nudged = x + 1 / 2048
    rounded, wide = Bfloat16Copy(net), Bfloat16Copy(net, "1")
    assert torch.equal(rounded(x), rounded(nudged))
    assert not torch.equal(wide(x), wide(nudged))
    assert {p.dtype for p in wide.model[1].parameters()} == {torch.float32}
    assert {p.dtype for p in wide.model[3].parameters()} == {torch.bfloat16}
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_normalisation_on_the_way_to_the_first_layer_stays_in_float32() -> None:
    class Normalising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.full((3, 1, 1), 0.485))
            self.net = small_net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x - self.mean)

    view = Bfloat16Copy(Normalising(), "net.1")
    assert view.model.mean.dtype == torch.float32
    assert float(view.model.mean[0]) == pytest.approx(0.485, abs=1e-7)


def test_a_model_that_is_not_made_of_layers_has_no_entrance() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :3]

    assert first_layer_of(Bare(), torch.rand(2, 3, 6, 6)) is None


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_a_search_in_a_view_goes_on_until_the_judge_is_fooled(norm: str) -> None:
    """The view is wrong about everything, so a search in it alone would stop at once."""
    net, x, y = digits_cnn()
    x, y, eps = x[:20], y[:20], {"linf": 0.2, "l2": 1.5, "l1": 8.0}[norm]

    attack, view = APGD(eps=eps, norm=norm, steps=15), Counting(net)
    dice = attack.dice(torch.arange(20))
    with torch.no_grad():
        assert torch.equal(attack.search(Searched(view, y, verifier=net), x, y, dice), attack.search(net, x, y, dice))
    never = Counting(lambda x: torch.nn.functional.one_hot(torch.zeros(len(x), dtype=torch.long), 10).float())
    asked = Counting(net)
    zeros = torch.zeros_like(y)
    with torch.no_grad():
        dataclasses.replace(attack, restarts=2).search(Searched(asked, zeros, verifier=never), x, zeros, dice)
    # what is never confirmed ends with its steps and does not count: the second restart searches all images again
    assert asked.asked == 2 * 20 * (16 if norm != "l1" else 18)


def test_a_model_is_found_inside_its_wrappers_and_compiled_once() -> None:
    view = small_net(seed=1)
    compiled = CompiledModel(view)
    assert unwrapped(Searched(compiled, torch.zeros(2))) is view
    assert compile_model(compiled, torch.rand(2, 3, 6, 6)) is compiled


@pytest.mark.parametrize("attack", [APGD(eps=0.1, steps=12), APGD(eps=0.5, norm="l2", steps=12), PGD(eps=0.1)], ids=str)
def test_compiling_changes_nothing(attack: Any, traced: None) -> None:
    from dataclasses import replace

    net, (x, _) = small_net(), some_images(9)
    y = labels_of(net, x)
    torch.testing.assert_close(replace(attack, compile=True)(net, x, y), attack(net, x, y))


def test_every_copy_of_a_model_uses_the_program_of_the_first(traced: None) -> None:
    from torch._dynamo.utils import counters

    net, (x, _) = small_net(classes=7), some_images(5)
    y = labels_of(net, x)
    attack = AutoAttack(
        eps=0.05, precision="fast", compile=True, version="custom", attacks=(APGD(eps=0.05, steps=3, compile=True),)
    )
    attack.run(net, x, y)
    programs = counters["stats"]["unique_graphs"]
    attack.run(net, x[:4], y[:4])
    attack.run(small_net(classes=7, seed=1), x, y)
    assert counters["stats"]["unique_graphs"] == programs


def test_a_single_image_is_answered_without_a_program_of_its_own(traced: None) -> None:
    net, (x, _) = small_net(), some_images()
    torch.testing.assert_close(CompiledModel(net)(x[:1]), net(x[:1]))


def test_steps_that_cannot_be_compiled_or_come_out_wrong_are_made_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    net, (x, _) = small_net(), some_images()
    y = labels_of(net, x)
    leg = Ascent(APGD(eps=0.1).norm, 0.1, 10, lambda logits, y, _: torch.nn.functional.cross_entropy(logits, y))
    state = leg.begin(x, y, y, leg.start(x, Dice(torch.arange(len(x))), 0))
    rest = (torch.zeros_like(y, dtype=torch.bool), torch.rand(len(x)), torch.randn_like(x), torch.zeros(12).long())
    expected = take_step(state, *rest, leg.norm, 0.1, True)
    monkeypatch.setattr(torch, "compile", lambda step, **_: lambda *arguments: [t + 1 for t in step(*arguments)])
    with pytest.warns(UserWarning, match=r"torch.compile failed on take_step \(.*\); attacking without it"):
        found = CompiledStep(take_step)(state, *rest, leg.norm, 0.1, True)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "attack",
    [
        APGDTargeted(eps=0.12, steps=8, targets=5),
        APGDTargeted(eps=5.0, norm="l1", steps=10, targets=4),
        APGD(eps=0.12, steps=8, restarts=3),
        FABTargeted(eps=0.12, steps=5, targets=5),
    ],
    ids=lambda attack: f"{type(attack).__name__} {attack.norm}",
)
def test_targets_that_are_tried_together_end_as_they_would_one_after_the_other(attack: Any) -> None:
    from dataclasses import replace

    net, x, y = digits_cnn()
    x, y, ids = x[:12], y[:12], torch.arange(12)
    one, many = (replace(attack, batch_size=size)(net, x, y, ids=ids) for size in (12, 200))
    torch.testing.assert_close(one, many, rtol=0, atol=1e-5)


def test_later_attempts_count_only_where_all_before_them_failed() -> None:
    best, rows = BestSoFar(torch.zeros(3, 1)), torch.tensor([0, 2])
    points, fooled = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([True, False, True, True])
    best.offer_attempts(rows, points, fooled, torch.tensor([0.0, 0.0, 9.0, 9.0]))
    assert best.x.flatten().tolist() == [1.0, 0.0, 4.0]
    assert take_chunk([1, 2, 3, 4, 5], room=10, images=4) == ([1, 2], [3, 4, 5])
    assert take_chunk([1, 2], room=3, images=4) == ([1], [2])
    assert take_chunk([1, 2, 3, 4, 5], room=16, images=4) == ([1, 2, 3], [4, 5])


@pytest.mark.parametrize(("load", "eps"), [(digits_cnn, 0.15), (digits_vit, 0.1)], ids=["cnn", "vit"])
def test_the_fast_figure_is_not_above_the_exact_one_on_the_golden_models(load: Any, eps: float) -> None:
    """60 images: half a point is less than one of them."""
    net, x, y = load()
    stages: tuple[AutoPGD, ...] = (APGD(eps=eps, steps=30), APGDTargeted(eps=eps, steps=10, targets=3))
    settings: dict[str, Any] = {"eps": eps, "version": "custom", "attacks": stages}
    fast, exact = (AutoAttack(precision=p, **settings).run(net, x, y) for p in ("fast", "exact"))
    assert float(fast.robust.double().mean()) <= float(exact.robust.double().mean()) + 0.005
    assert torch.equal(net(fast.x).argmax(1) == y, fast.robust)


class Slow(nn.Module):
    """Answers after so many ticks of a clock."""

    def __init__(self, clock: list[float], ticks: float) -> None:
        super().__init__()
        self.clock, self.ticks = clock, ticks

    def forward(self, x: Tensor) -> Tensor:
        self.clock[0] += self.ticks
        return x.flatten(1)[:, :3]


@pytest.mark.parametrize(("ticks", "pays"), [(0.6, True), (0.7, False)])
def test_bfloat16_pays_where_its_gradients_take_two_thirds_of_the_time_on_a_cpu(
    ticks: float, pays: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(
        _lower_precision, "pass_seconds", functools.partial(_lower_precision.pass_seconds, clock=lambda: clock[0])
    )
    exact, view = Slow(clock, 1.0), Slow(clock, ticks)
    x, y = torch.rand(2, 3, 4, 4), torch.tensor([0, 1])
    with caplog.at_level("DEBUG"):
        assert _lower_precision.bfloat16_pays(exact, exact, view, x, y) == pays
    assert f"takes 1000.00 ms in float32, {1000 * ticks:.2f} in bfloat16" in caplog.text
    spent = clock[0]
    assert _lower_precision.bfloat16_pays(exact, exact, view, x, y) == pays
    assert clock[0] == spent  # a model is measured once


def test_a_view_on_a_cpu_attends_by_products_and_the_model_is_left_as_it_was() -> None:
    net, x, _ = digits_vit()
    view = _lower_precision.bfloat16_view(net, x)
    assert any(isinstance(module, Core) for module in view.modules())
    assert not any(isinstance(module, Core) for module in net.modules())
    torch.testing.assert_close(view(x), net(x), rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("able", "ticks", "search"), [(True, 0.5, "fast"), (True, 0.8, "exact"), (False, 0.1, "exact")]
)
@pytest.mark.parametrize("attack", [AutoAttack, APGD, PGD])
def test_auto_searches_in_bfloat16_where_this_cpu_is_faster_in_it(
    attack: Any, able: bool, ticks: float, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is broken is broken in float32."""
    net, x, y = digits_vit()
    seconds = iter([1.0, ticks])
    monkeypatch.setattr(softmax, "multiplies_bfloat16", lambda: able)
    monkeypatch.setattr(_lower_precision, "pass_seconds", lambda *_: next(seconds))
    ran: list[str] = []
    real = Cascade._search
    monkeypatch.setattr(
        Cascade, "_search", lambda self, stage, *rest: ran.append(stage.search) or real(self, stage, *rest)
    )
    settings = {"version": "custom", "attacks": ["apgd-ce"]} if attack is AutoAttack else {"steps": 10}
    made = attack(eps=0.1, precision="auto", **settings)
    moved = made(net, x[:12], y[:12])
    assert ran[0] == search
    assert float((moved - x[:12]).abs().max()) <= 0.1 + 1e-6
    exact = dataclasses.replace(made, precision="exact")(net, x[:12], y[:12])
    assert abs(accuracy(net, moved, y[:12]) - accuracy(net, exact, y[:12])) <= 1 / 12 + 1e-6


def test_auto_times_the_gradients_of_a_few_images_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []
    monkeypatch.setattr(_lower_precision, "pass_seconds", lambda _, x, y: timed.append(len(x)) or float(len(y)))
    net, x = small_net(), torch.zeros(40, 3, 64, 64)
    assert not _lower_precision.bfloat16_pays(net, net, net, x, torch.zeros(40))
    assert timed == [5, 5]  # 2**16 pixels at most
    assert not _lower_precision.bfloat16_pays(net, net, net, torch.zeros(2, 3, 300, 300), torch.zeros(2))
    assert timed == [5, 5, 1, 1]  # and one image at least


def test_an_attack_in_bfloat16_alone_is_refined_in_float32() -> None:
    """Where the view's gradient says nothing, what float32 finds at once counts."""
    net, x, y = digits_cnn()
    with torch.no_grad():
        start = PGD(eps=0.15)(net, x, y)
        refined = PGD(eps=0.15, steps=50).refine(net, x, y, PGD(eps=0.15).dice(torch.arange(len(x))), start)
    assert accuracy(net, refined, y) <= accuracy(net, start, y)
    assert float((refined - x).abs().max()) <= 0.15 + 1e-6
