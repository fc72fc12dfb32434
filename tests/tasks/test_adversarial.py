"""Adversarial training: the light recipe's losses, gradients and statistics, and none of its faults."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hardened import FromStart, NormedNet, golden, grad_of, gradients, small, some_digits
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from vitruvius._checks import in_eval_mode
from vitruvius._errors import ConfigError, DataError
from vitruvius.attacks.base import attacks
from vitruvius.attacks.pgd import PGD
from vitruvius.attention import part
from vitruvius.tasks import tasks
from vitruvius.tasks.adversarial import Adversarial
from vitruvius.tasks.base import batch_norm_frozen
from vitruvius.tasks.mart import Mart
from vitruvius.tasks.trades import Trades

ADV, TRADES = golden("light_adv"), golden("light_trades")
CASES = [*ADV[1], *TRADES[1]]
SMOOTHING = {"ce": 0.0, "ls0.1": 0.1, "soft": 0.0}


def golden_task(case: dict[str, Any], tensors: dict[str, Tensor], net: NormedNet) -> Any:
    mode = "eval" if case["eval_mode"] else "train"
    passes = ("clean", "adversarial") if case["eval_mode"] else ("attack", "clean", "adversarial")
    ramp = {"use": "linear", "epochs": case["period"], "zero": case["zero"], "variant": "released"}
    kind = partial(Adversarial, log_clean=True) if case["loss"] == "adv" else partial(Trades, beta=case["beta"])
    return kind(
        net,
        eps=case["eps"],
        norm=case["norm"],
        attack=partial(FromStart, begin=tensors[f"{case['id']}.start"], steps=case["steps"], step_size=case["step"]),
        coupled=False,
        schedule=ramp if case["schedule"] == "linear" else "constant",
        attack_mode=mode,
        statistics=passes,
        smoothing=SMOOTHING[case["criterion"]],
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_losses_gradients_and_statistics_are_the_light_recipes(case: dict[str, Any]) -> None:
    tensors, name = (ADV if case["loss"] == "adv" else TRADES)[0], case["id"]
    net = NormedNet(tensors)
    task = golden_task(case, tensors, net)
    task.at(epoch=case["epoch"], update=0, updates_per_epoch=1)
    found, disturb = [], task.disturb
    task.disturb = lambda x, y: found.append(disturb(x, y)) or found[0]
    result = task(tensors["x"], tensors["y_soft" if case["criterion"] == "soft" else "y"])
    result["loss"].backward()
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
    close(found[0], tensors[f"{name}.x_adv"])
    close(result["loss"].detach(), tensors[f"{name}.loss"])
    close(result["output"].detach(), tensors[f"{name}.logits_adv"])
    for key, grad in gradients(net).items():
        close(grad, tensors[f"{name}.grad.{key}"])
    for key, value in net.named_buffers():
        close(value, tensors[f"{name}.buf.{key}"])
    assert float(result["eps"]) == pytest.approx(case["eps_at_epoch"])


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_the_mode_of_every_module_is_restored_also_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()), nn.BatchNorm1d(2))
    model[1][0].eval()
    before = modes(model)
    with in_eval_mode(model):
        assert not any(modes(model))
    assert modes(model) == before
    with pytest.raises(RuntimeError, match="stop"), in_eval_mode(model):
        raise RuntimeError("stop")
    assert modes(model) == before
    with pytest.raises(RuntimeError, match="stop"), batch_norm_frozen(model):
        raise RuntimeError("stop")
    assert model[2].track_running_stats


class Spy(nn.Module):
    """A net that notes how it stands at every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
        self.body[2].eval()
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        needs = any(p.requires_grad for p in self.parameters())
        self.seen.append((self.training, needs, torch.is_grad_enabled()))
        return self.body(x)


def test_an_attack_passes_in_eval_mode_without_gradients_of_parameters_and_only_as_often_as_it_must() -> None:
    model, batch = Spy(), some_digits()
    model.body[0].requires_grad_(False)
    model.body[4].bias.requires_grad_(False)
    before, flags = modes(model), [p.requires_grad for p in model.parameters()]
    result = Adversarial(model, eps=0.1, attack="pgd:steps=3")(*batch)
    assert model.seen == [(False, False, True)] * 3 + [(True, True, True)]  # no clean pass unless it is logged
    assert modes(model) == before
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert set(result) == {"loss", "output", "eps"}


def test_clean_accuracy_is_logged_by_a_pass_without_gradients() -> None:
    model, (x, y) = Spy(), some_digits()
    result = Adversarial(model, eps=0.1, attack="pgd:steps=1", log_clean=True)(x, y)
    assert model.seen == [(False, False, True), (True, False, False), (True, True, True)]
    assert result["clean_accuracy"] == (model(x).argmax(1) == y).float().mean()


@pytest.mark.parametrize("name", ["adversarial", "trades", "mart", "fast"])
def test_batches_without_eps_report_the_same_numbers_as_others(name: str) -> None:
    """The log divides by all images of an epoch: a number that some batches left out would be too small."""
    settings: dict[str, Any] = {"align": 0.1} if name == "fast" else {"attack": "pgd:steps=1"}
    task: Any = tasks[name](small(), eps=0.1, schedule="linear:epochs=5", **settings)
    x, y = some_digits()
    before = task(x, y)
    task.at(epoch=1, update=0, updates_per_epoch=2)
    assert task(x, y).keys() == before.keys()
    if name in ("trades", "mart"):
        assert before["divergence"] == 0
        assert before["clean_accuracy"] == (task.passes().model(x).argmax(1) == y).float().mean()


def test_without_eps_nothing_is_attacked() -> None:
    batch = some_digits()
    for kind in (Adversarial, Trades, Mart):
        model = Spy()
        task = kind(model, eps=0.1, schedule={"use": "linear", "epochs": 5})
        result = task(*batch)
        assert model.seen == [(True, True, True)]
        if kind is not Mart:
            torch.testing.assert_close(result["loss"], F.cross_entropy(model(batch[0]), batch[1]))
        task.at(epoch=1, update=0, updates_per_epoch=2)
        task(*batch)
        assert len(model.seen) > 3


def test_only_the_named_passes_move_batch_statistics() -> None:
    x, y = (tensor[:4] for tensor in (ADV[0]["x"], ADV[0]["y"]))

    def moved(**settings: Any) -> int:
        net = NormedNet(ADV[0])
        before = int(net.bn1.num_batches_tracked)
        Adversarial(net, eps=0.03, attack="pgd:steps=3", **settings)(x, y)
        return int(net.bn1.num_batches_tracked) - before

    assert moved() == 1
    assert moved(log_clean=True) == 1
    assert moved(log_clean=True, statistics=("clean", "adversarial")) == 2
    assert moved(statistics=()) == 0
    assert moved(attack_mode="train") == 1
    assert moved(attack_mode="train", statistics=("attack", "adversarial")) == 4


def test_statistics_of_passes_that_are_not_made_are_refused() -> None:
    with pytest.raises(ConfigError, match="names the attack, whose passes update nothing in eval mode"):
        Adversarial(small(), eps=0.1, statistics=("attack",))
    with pytest.raises(ConfigError, match="names the clean pass, which this task does not make"):
        Adversarial(small(), eps=0.1, statistics=("clean",))


def test_soft_labels_are_hard_for_the_attack_and_soft_for_the_loss() -> None:
    model, (x, y) = small(), some_digits()
    soft = 0.6 * F.one_hot(y, 10) + 0.04
    task = Adversarial(model, eps=0.1, attack={"use": "pgd", "steps": 2, "random_start": False})
    result = task(x, soft)
    with in_eval_mode(model):
        attacked = PGD(eps=0.1, steps=2, random_start=False)(model, x, y)
    torch.testing.assert_close(result["loss"], -(soft * model(attacked).log_softmax(1)).sum(1).mean())


@pytest.mark.parametrize("name", sorted(set(attacks) - {"autoattack", "hopskipjump", "carlini", "transfer"}))
def test_every_attack_can_be_the_inner_one(name: str) -> None:
    short = {"steps": 2, "iterations": 2, "queries": 3, "samples": 4, "restarts": 1}
    known = inspect.signature(attacks[name]).parameters
    norm = "l1" if name == "sparse_l1" else "l2" if name.startswith(("ddn", "carlini")) else "linf"
    spec = {"use": name, **{key: value for key, value in short.items() if key in known}}
    model, (x, y) = small(), some_digits(3)
    eps = 2.0 if norm == "l1" else 0.1
    task = Adversarial(model, eps=eps, norm=norm, attack=spec)
    torch.manual_seed(0)
    attacked = task.disturb(x, y)
    assert attacked.shape == x.shape
    assert not attacked.requires_grad
    assert float(task.inner.norm.length(attacked - x).max()) <= eps * 1.0001
    task(x, y)["loss"].backward()


def test_autoattack_can_be_the_inner_one_though_it_checks_and_waits() -> None:
    model, (x, y) = small(), some_digits(3)
    spec = {"use": "autoattack", "version": "custom", "attacks": ["apgd-ce"]}
    attacked = Adversarial(model, eps=0.05, attack=spec).disturb(x, y)
    assert float((attacked - x).abs().max()) <= 0.05 * 1.0001
    assert model.training


def test_dice_are_the_global_ones_so_that_a_seed_repeats_a_step() -> None:
    model, batch = small(), some_digits()
    task = Adversarial(model, eps=0.1, attack="pgd:steps=1")

    def throw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return task.disturb(*batch)

    first = throw(1)
    assert torch.equal(throw(1), first)
    assert not torch.equal(throw(2), first)
    assert not torch.equal(task.disturb(*batch), task.disturb(*batch))  # another start at every step


def test_l2_starts_are_centred_and_linf_starts_are_without_bias() -> None:
    x = torch.full((400, 3, 8, 8), 0.5)
    for norm, eps in (("l2", 0.5), ("linf", 0.1)):
        task = Adversarial(small(), eps=eps, norm=norm, attack="uniform_noise")
        delta = task.disturb(x, torch.zeros(400, dtype=torch.int64)) - x
        assert abs(float(delta.mean())) < 4 * float(delta.std()) / delta.numel() ** 0.5


def test_the_first_batch_is_checked_and_later_ones_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = small(), some_digits()
    with pytest.raises(DataError, match=r"expected \[0, 1\]"):
        Adversarial(model, eps=0.1)(x * 2 - 1, y)  # normalised images are no pixels
    with pytest.raises(DataError, match="the model has 10 classes"):
        Adversarial(model, eps=0.1)(x, y + 10)
    task = Adversarial(model, eps=0.1, attack="pgd:steps=1")
    task(x, y)

    def refuse(*_: Any) -> None:
        raise AssertionError("a tensor was read on the host")

    for reader in ("tolist", "item", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, reader, refuse)
    task(x, y)


@pytest.mark.parametrize("name", ["adversarial", "trades", "mart", "fast"])
def test_under_autocast_all_parameters_get_their_gradients(name: str) -> None:
    model, batch = small(), some_digits()
    settings: dict[str, Any] = {"log_clean": True} if name in ("adversarial", "fast") else {}
    settings |= {} if name == "fast" else {"attack": "pgd:steps=1"}
    task: Any = tasks[name](model, eps=0.05, **settings)
    torch.manual_seed(0)
    exact = grad_of(task(*batch)["loss"], model)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = task(*batch)["loss"]
    rough = grad_of(loss, model)
    assert set(exact) == set(rough) == {name for name, _ in model.named_parameters()}
    for key, grad in exact.items():
        assert float((rough[key] - grad).norm()) < 0.5 * float(grad.norm()) + 1e-4, key


@pytest.mark.parametrize("precision", ["same", "fp32", "bf16"])
def test_the_attack_computes_in_the_precision_asked_for(precision: str) -> None:
    seen: list[torch.dtype] = []
    model = small()
    model.model.blocks[0].mlp.fc1.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    task = Adversarial(model, eps=0.1, attack="pgd:steps=1", attack_precision=precision)
    with torch.autocast("cpu", torch.bfloat16):
        task(*some_digits())
    assert seen == [torch.float32 if precision == "fp32" else torch.bfloat16, torch.bfloat16]


def test_float16_gradients_of_an_image_do_not_vanish() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10, bias=False))
    nn.init.normal_(model[1].weight, std=1e-7)
    x, y = torch.full((2, 3, 8, 8), 0.5), torch.tensor([1, 2])
    exact = Adversarial(model, eps=0.1, attack="fgsm").disturb(x, y)
    with torch.autocast("cpu", torch.float16):
        half = Adversarial(model, eps=0.1, attack="fgsm").disturb(x, y)
    same = (torch.sign(exact - x) == torch.sign(half - x)).float().mean()
    assert float(same) > 0.9


def test_penalties_count_the_passes_of_the_loss_and_not_those_of_the_attack() -> None:
    batch = some_digits()
    for name in ("adversarial", "trades", "mart", "fast", "free"):
        model = small(part("low_rank", rank=1))
        calls: list[int] = []
        stage: Any = next(m for m in model.modules() if hasattr(m, "penalty"))
        penalty = stage.penalty
        stage.penalty = lambda before, after, p=penalty, c=calls: c.append(1) or p(before, after)
        short = {"attack": "pgd:steps=1"} if name in ("adversarial", "trades", "mart") else {}
        plain: Any = tasks[name](model, eps=0.05, **short)
        torch.manual_seed(0)
        loss = plain(*batch)["loss"]
        task: Any = tasks[name](model, eps=0.05, penalty=0.5, **short)
        calls.clear()
        torch.manual_seed(0)
        result = task(*batch)
        assert len(calls) == (2 if name in ("trades", "mart") else 1), name
        torch.testing.assert_close(result["loss"], loss + 0.5 * result["penalty"])
        assert result["penalty"] > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, compiling a checkpointed block
@pytest.mark.parametrize("name", ["adversarial", "trades"])
def test_compiled_and_checkpointed_tasks_give_the_same_gradients(name: str) -> None:
    def run(*, compiled: bool, checkpointing: bool) -> dict[str, Tensor]:
        model = small(part("low_rank", rank=1))
        if checkpointing:
            model.model.set_grad_checkpointing()
        task: Any = tasks[name](model, eps=0.05, penalty=0.1, attack="pgd:steps=1")
        if compiled:
            torch._dynamo.reset()
            task.compile(backend="eager")
        torch.manual_seed(0)
        return grad_of(task(*some_digits())["loss"], model)

    expected = run(compiled=False, checkpointing=False)
    if name == "adversarial":  # both passes of trades are one graph, see the test of its moving eps
        torch.testing.assert_close(run(compiled=True, checkpointing=False), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(run(compiled=False, checkpointing=True), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adversarial", "trades"])
@pytest.mark.parametrize("compile_attack", [True, False])
def test_a_moving_eps_does_not_compile_again(name: str, compile_attack: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.GELU(), nn.Linear(8, 10))
    task: Any = tasks[name](
        net,
        eps=0.1,
        attack="pgd:steps=2",
        compile_attack=compile_attack,
        schedule={"use": "linear", "epochs": 9, "per": "update"},
    )
    task.compile(backend=counter)
    for update in range(1, 6):
        task.at(epoch=0, update=update, updates_per_epoch=6)
        task(*some_digits())["loss"].backward()
    answers = 1 if name == "trades" and compile_attack else 0  # the clean answer is asked without a graph
    assert counter.frame_count == (2 if compile_attack else 1) + answers


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"task.attack.eps = 0.1: give eps to the task"):
        Adversarial(small(), eps=0.1, attack={"use": "pgd", "eps": 0.1})
    with pytest.raises(ConfigError, match=r"task.attack: unknown key 'pgd.stepz'; did you mean 'steps'"):
        Adversarial(small(), eps=0.1, attack={"use": "pgd", "stepz": 1})
    with pytest.raises(ConfigError, match=r"task.coupled = false, but FGSM has no step size"):
        Adversarial(small(), eps=0.1, attack="fgsm", coupled=False)


@pytest.mark.parametrize("name", ["adversarial", "trades", "mart", "fast", "free"])
def test_the_threat_is_the_norm_and_the_final_eps(name: str) -> None:
    task: Any = tasks[name](small(), eps=0.5, norm="l2", schedule={"use": "linear", "epochs": 5})
    assert task.threat == ("l2", 0.5)
