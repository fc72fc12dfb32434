"""The supervised task: its loss is PyTorch's, its penalty counts every stage once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hardened import small, some_digits

from vitruvius._errors import ConfigError
from vitruvius.attention import part
from vitruvius.tasks.supervised import Supervised

make: Any = partial(small, depth=2)
batch = pytest.fixture(some_digits)


def test_hard_labels_give_cross_entropy(batch: Any) -> None:
    model = make()
    result = Supervised(model)(*batch)
    torch.testing.assert_close(result["loss"], F.cross_entropy(model(batch[0]), batch[1]))
    torch.testing.assert_close(result["output"], model(batch[0]))
    assert set(result) == {"loss", "output"}


def test_smoothing_is_the_slow_formula(batch: Any) -> None:
    model = make()
    logs = model(batch[0]).log_softmax(-1)
    target = torch.full((6, 10), 0.3 / 10)
    target[torch.arange(6), batch[1]] += 0.7
    expected = -(target * logs).sum(-1).mean()
    torch.testing.assert_close(Supervised(model, smoothing=0.3)(*batch)["loss"], expected)


def test_soft_labels_are_taken_as_they_are_even_with_smoothing(batch: Any) -> None:
    model = make()
    soft = torch.rand(6, 10).softmax(-1)
    expected = -(soft * model(batch[0]).log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(Supervised(model, smoothing=0.3)(batch[0], soft)["loss"], expected)


def test_binary_judges_every_class_for_itself(batch: Any) -> None:
    model = make()
    logits, hot = model(batch[0]), F.one_hot(batch[1], 10).float()
    slow = -(hot * logits.sigmoid().log() + (1 - hot) * (1 - logits.sigmoid()).log()).mean()
    torch.testing.assert_close(Supervised(model, binary=True)(*batch)["loss"], slow)
    smooth = hot * 0.8 + 0.02
    expected = F.binary_cross_entropy_with_logits(logits, smooth)
    torch.testing.assert_close(Supervised(model, binary=True, smoothing=0.2)(*batch)["loss"], expected)
    torch.testing.assert_close(Supervised(model, binary=True)(batch[0], smooth)["loss"], expected)


def test_smoothing_of_one_or_more_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task.smoothing = 1.5, expected a number from 0 to below 1"):
        Supervised(make(), smoothing=1.5)


def slow_penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The penalty of both blocks from what a recording sees go in and come out."""
    terms = []
    stages = [module for module in model.modules() if hasattr(module, "penalty")]
    hooks = [
        stage.register_forward_hook(lambda s, inputs, output: terms.append(s.penalty(inputs[0], output)))
        for stage in stages
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    assert len(terms) == 2
    return torch.stack(terms).sum()


def test_the_penalty_of_every_stage_is_added_with_its_weight(batch: Any) -> None:
    model = make(part("low_rank", rank=1))
    expected = slow_penalty(model, batch[0])
    assert expected > 0
    result = Supervised(model, penalty=0.5)(*batch)
    torch.testing.assert_close(result["penalty"], expected)
    torch.testing.assert_close(result["loss"], F.cross_entropy(model(batch[0]), batch[1]) + 0.5 * expected)


def gradients(model: Any, batch: Any, task: Any = None) -> tuple[float, dict[str, torch.Tensor]]:
    task = task or Supervised(model, penalty=0.5)
    for _ in range(2):  # a term of the first step must not reach the second
        model.zero_grad()
        result = task(*batch)
        result["loss"].backward()
    return result["penalty"].item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, compiling a checkpointed block
@pytest.mark.parametrize("how", ["checkpointing", "compiled", "both"])
def test_the_penalty_counts_once(how: str, batch: Any) -> None:
    depth = 2 if how == "checkpointing" else 1
    expected = gradients(small(part("low_rank", rank=1), depth=depth), batch)
    model = small(part("low_rank", rank=1), depth=depth)
    if how != "compiled":
        model.model.set_grad_checkpointing()
    task = Supervised(model, penalty=0.5)
    if how != "checkpointing":
        torch._dynamo.reset()
        task.compile(backend="eager")
    found = gradients(model, batch, task)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-7)


def test_evaluation_after_training_collects_nothing(batch: Any) -> None:
    model = make(part("low_rank", rank=1))
    task = Supervised(model, penalty=0.5)
    first = task(*batch)["penalty"]
    with torch.no_grad():
        model.eval()(batch[0])
    torch.testing.assert_close(task(*batch)["penalty"], first)


def test_a_penalty_without_a_stage_that_has_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task.penalty = 0.1, but no part .* has a penalty"):
        Supervised(make("rpc"), penalty=0.1)
