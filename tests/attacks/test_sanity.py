"""The checks a reviewer asks for: quiet on an honest model, loud on each way of fooling oneself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attacked import digits_cnn, digits_vit
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.attacks.base import as_norm
from vitruvius.evaluation.masking import look as look_for_masks
from vitruvius.evaluation.sanity import Finding, Sanity


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def look(model: nn.Module, *, count: int = 24, queries: int = 40, **more: Any) -> dict[str, Finding]:
    _, x, y = digits_cnn()
    settings = {"eps": 0.2, "steps": 20, "eot_iterations": 3, "long_queries": 0, "hops": 0} | more
    plan = Sanity(queries=queries, **settings)
    return by_name(plan(model.eval(), x[:count], y[:count]))


def test_an_honest_model_passes_every_check() -> None:
    findings = look(digits_cnn()[0], long_queries=200, hops=4)
    checks = ["randomness", "zero gradients", "more steps", "larger radius", "unbounded", "black box"]
    assert list(findings) == [*checks, "longer black box", "decision based", "worst case"]
    assert all(finding.passed for finding in findings.values()), [str(f) for f in findings.values()]


def test_a_saturated_softmax_is_caught_by_its_flat_loss() -> None:
    """Logits times 1000: the same classes, and a cross-entropy without gradient in float32."""
    net = digits_cnn()[0]

    class Saturated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 1000 * net(x)

    finding = look(Saturated())["zero gradients"]
    assert not finding.passed
    assert finding.numbers["share"] > 0.5


def test_a_staircase_is_caught_by_black_box_unbounded_and_the_surrogate() -> None:
    net = digits_cnn()[0]

    class Staircase(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (64 * net(x)).round() / 64 + 0 * x.sum()

    findings = look(Staircase(), twins={"plain": net}, queries=300)
    for name in ("zero gradients", "unbounded", "black box", "transfer (plain)", "adaptive (plain)"):
        assert not findings[name].passed, name
    assert findings["adaptive (plain)"].numbers["images only it breaks"] >= 5


def test_randomness_is_noticed_and_answered_with_averaged_gradients() -> None:
    net = digits_cnn()[0]
    calls = []

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return net(x + 0.05 * torch.randn_like(x))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        finding = look(Noisy(), count=6)["randomness"]
    assert not finding.passed
    assert "means of 3 passes" in finding.sentence
    assert finding.numbers["largest difference of logits"] > 0


def test_an_honest_model_is_not_hurt_more_through_itself() -> None:
    net = digits_cnn()[0]
    findings = look(net, twins={"plain": net})
    assert findings["transfer (plain)"].passed
    assert findings["adaptive (plain)"].passed


@pytest.mark.parametrize("make", [digits_cnn, digits_vit])
def test_the_golden_models_are_not_doubted(make: Callable[[], tuple[nn.Module, Tensor, Tensor]]) -> None:
    net, x, y = make()
    for eps in (2 / 255, 0.09, 0.3):
        assert look_for_masks(net, x, y, eps=eps) == []


def test_findings_print_and_become_json() -> None:
    finding = Finding(name="black box", passed=False, sentence="a search breaks images", numbers={"accuracy": 0.5})
    assert str(finding) == "suspicious  black box: a search breaks images (accuracy 0.5)"
    assert finding.numbers == {"accuracy": 0.5}


def test_train_mode_is_refused() -> None:
    net, x, y = digits_cnn()
    with pytest.raises(ConfigError, match="train mode"):
        Sanity(eps=0.1)(net.train(), x, y)


def one_step(net: nn.Module) -> Callable[[Tensor], Tensor]:
    def answer(x: Tensor) -> Tensor:
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(net(start).logsumexp(1).sum(), start)
        return net((x + 0.1 * grad.sign()).clamp(0, 1))

    return answer


Mask = Callable[[nn.Module], Callable[[Tensor], Tensor]]
MASKS: dict[str, tuple[Mask, str]] = {  # by name: what is made of an honest model, and who sees through it
    "one-hot": (
        lambda net: lambda x: nn.functional.one_hot(net(x).argmax(1), 10).float() + 0 * x.sum(),
        "(smooth)",
    ),
    "quantised": (lambda net: lambda x: net((3 * x).round() / 3), "(straight-through)"),
    "no gradient at all": (lambda net: lambda x: net(x).detach(), "(straight-through)"),
    "a layer without gradient": (lambda net: lambda x: net(x.detach()) + 0 * x.sum(), ""),
    "saturated logits": (lambda net: lambda x: 1000 * net(x), ""),
    "random input": (lambda net: lambda x: net(x + 0.1 * torch.randn_like(x)), ""),
    "probabilities for logits": (lambda net: lambda x: (50 * net(x)).softmax(-1), ""),
    "a gradient step in the forward pass": (one_step, ""),
    "a sine": (lambda net: lambda x: net(x + 0.03 * torch.sin(300 * x)), "black box"),
}


class Masked(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.answer = MASKS[name][0](digits_cnn()[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(x)


def test_the_worst_case_names_the_twin_that_found_it() -> None:
    net, x, y = digits_cnn()
    plan = Sanity(
        eps=0.2, steps=20, queries=20, long_queries=0, hops=0, twins={"honest": net, "none": Masked("quantised")}
    )
    findings = by_name(plan(Masked("a layer without gradient").eval(), x[:24], y[:24]))
    assert not findings["adaptive (honest)"].passed
    worst = findings["worst case"]
    assert not worst.passed
    assert "(honest)" in worst.sentence
    assert worst.numbers["accuracy"] < worst.numbers["white-box accuracy"]
    assert worst.numbers["accuracy"] <= findings["adaptive (honest)"].numbers["its accuracy"]


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.1), ("l2", 1.0), ("l1", 6.0)])
@pytest.mark.parametrize("make", [digits_cnn, digits_vit])
def test_honest_models_pass_in_every_norm(
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]], norm: str, eps: float
) -> None:
    net, x, y = make()
    plan = Sanity(eps=eps, norm=as_norm(norm), steps=12, queries=20, long_queries=40, hops=1)
    findings = plan(net, x[:12], y[:12])
    assert [str(finding) for finding in findings if not finding.passed] == []


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_found_and_its_worst_case_names_who_saw_through_it(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        findings = look(Masked(name), steps=10, queries=60, long_queries=150)
    assert not all(finding.passed for finding in findings.values())
    worst, who = findings["worst case"], MASKS[name][1]
    assert who in worst.sentence
    if "(" in who:
        assert worst.numbers["accuracy"] <= 0.3  # of 1 that gradients leave; the model behind the mask has 0.125
        assert worst.numbers["white-box accuracy"] > 0.9
