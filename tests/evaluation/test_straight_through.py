"""BPDA by itself: gradients pass through whatever has none, answers stay as they are, honest models are left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitruvius
from vitruvius.attacks.base import MARGIN, loss_and_grad
from vitruvius.evaluation.sanity import Finding, Sanity
from vitruvius.evaluation.straight_through import InFloat64, StraightThrough, modules_without_gradient


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 4)).eval()


def images(count: int = 3) -> Tensor:
    return torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor] = lambda z: z) -> None:
        super().__init__()
        self.net = net()
        self.before = before
        self.after = after
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.net(self.before(x)))


@torch.no_grad()
def without_grad(x: Tensor) -> Tensor:
    return (x * 2) / 2


QUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "round": lambda x: (x * 7).round() / 7,
    "torch.floor": lambda x: torch.floor(x * 16) / 16,
    "bytes": lambda x: (x * 255).byte().float() / 255,
    "whole numbers divided": lambda x: (x * 255).to(torch.uint8) / 255,
    "threshold": lambda x: (x > 0.5).float(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "no_grad": without_grad,
}


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    y = torch.zeros(len(x), dtype=torch.long)
    return loss_and_grad(model, x, lambda logits: MARGIN(logits, y)).grad


@pytest.mark.parametrize("name", QUANTISERS)
def test_a_quantised_input_passes_the_gradient_of_the_model_behind_it(name: str) -> None:
    model = Model(QUANTISERS[name])
    x = images()
    straight = StraightThrough(model)
    found = gradient(straight, x)
    assert straight.replaced > 0
    assert torch.equal(straight(x), model(x))
    seen = QUANTISERS[name](x)
    slope = gradient(model.net, seen)
    cosine = F.cosine_similarity(found.flatten(1), slope.flatten(1))
    assert float(cosine.min()) > 0.999, cosine


def test_one_hot_classes_pass_the_gradient_of_their_logits() -> None:
    model = Model(lambda x: x, lambda z: F.one_hot(z.argmax(1), 4).float())
    x = images()
    straight = StraightThrough(model)
    torch.testing.assert_close(gradient(straight, x), gradient(model.net, x))
    assert torch.equal(straight(x), model(x))
    assert torch.equal(StraightThrough(model, smooth=True)(x.requires_grad_()), model.net(x))


class Hidden(torch.autograd.Function):
    """A step whose gradient its author says is zero."""

    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(_ctx: object, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


class Quantiser(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Hidden.apply(x)
        return out


def test_a_module_whose_gradient_is_zero_is_found_by_name_and_passed_through() -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity(), Quantiser()), net()).eval()
    x = images()
    assert modules_without_gradient(model, x) == ("0.1",)
    straight = StraightThrough(model, ("0.1",))
    assert bool(gradient(straight, x).any())
    assert straight.replaced >= 1
    assert torch.equal(straight(x), model(x))


@pytest.mark.parametrize("attention", [(), ("rpc",), ("top_k",)])
def test_nothing_is_replaced_in_a_vision_transformer(attention: tuple[str, ...]) -> None:
    model = vitruvius.create_model("vitruvius/vit_digits", depth=2, attention=attention, seed=1).eval()
    x = torch.rand(2, 3, 8, 8)
    assert modules_without_gradient(model, x) == ()
    straight = StraightThrough(model)
    torch.testing.assert_close(gradient(straight, x), gradient(model, x))


def test_a_gradient_that_is_too_small_for_float32_still_points_somewhere() -> None:
    model = Model(lambda x: x, lambda z: (2000 * z).softmax(1))
    x = images(40)
    logits = model.net(x).detach()
    gap = 2000 * -MARGIN(logits, logits.argmax(1))
    hidden = (gap > 150) & (gap < 600)  # too small for float32, and not for float64
    assert int(hidden.sum()) > 5
    x, y = x[hidden], logits.argmax(1)[hidden]
    seen = loss_and_grad(model, x, lambda z: MARGIN(z, y)).grad
    assert not bool(seen.any())
    open_slope = loss_and_grad(model.net, x, lambda z: MARGIN(z, y)).grad
    double = InFloat64(copy.deepcopy(model))
    found = loss_and_grad(double, x, lambda z: MARGIN(z, y)).grad
    assert (
        float(F.cosine_similarity(found.flatten(1), open_slope.flatten(1)).min()) > 0.3
    )  # ties among the other classes
    assert double(x).dtype == torch.float32


def examine(model: nn.Module, **settings: int) -> dict[str, Finding]:
    x = images(24)
    with torch.no_grad():
        y = model(x).argmax(1)
    plan = Sanity(eps=0.1, steps=10, queries=20, **{"long_queries": 0, "hops": 0} | settings)
    return {finding.name: finding for finding in plan(model, x, y)}


@pytest.mark.parametrize("name", ["round", "bytes", "detach", "no_grad"])
def test_the_checks_try_bpda_by_themselves_and_say_what_it_reached(name: str) -> None:
    findings = examine(Model(QUANTISERS[name]))
    through = findings["adaptive (straight-through)"]
    assert not through.passed
    worst = findings["worst case"]
    assert "(straight-through)" in worst.sentence or "(smooth)" in worst.sentence
    assert worst.numbers["accuracy"] <= through.numbers["its accuracy"] < worst.numbers["white-box accuracy"]


def test_an_honest_model_is_not_attacked_through_itself() -> None:
    assert not [name for name in examine(net()) if "straight-through" in name or "float64" in name]


def test_a_model_that_cannot_be_run_otherwise_is_still_examined() -> None:
    def refuse(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return x.round()

    findings = examine(Model(refuse, lambda z: 1e4 * z))
    assert not findings["saturation"].passed
    assert "adaptive (float64)" not in findings


class Adapting(nn.Module):
    """Takes a gradient step in its forward pass, toward what it believes: a dynamic defence."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self.net(start).logsumexp(1).sum(), start)
        return self.net((x + 0.3 * grad.sign()).clamp(0, 1))


def test_a_dynamic_defence_is_named_and_searched_for_longer() -> None:
    findings = examine(Adapting(), long_queries=60, hops=3)
    assert not findings["gradient in the forward pass"].passed
    assert "squares of 60 queries" in findings["longer black box"].sentence
    assert "predicted classes alone" in findings["decision based"].sentence
    assert findings["decision based"].numbers["images tried"] <= findings["longer black box"].numbers["images tried"]
