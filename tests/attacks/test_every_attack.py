"""What every registered attack promises: ball, image, seeds, batches, few classes, errors that speak."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attacked import accuracy, digits_cnn, digits_vit, labels_of, small_net, some_images
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import vitruvius
from vitruvius._checks import check_eval_mode
from vitruvius._errors import ConfigError, DataError
from vitruvius.attacks.base import Attack, attacks, disturb
from vitruvius.attacks.norms import NORMS

SMALL: dict[str, dict[str, Any]] = {
    "apgd": {"steps": 6},
    "apgd_malt": {"steps": 4, "targets": 2},
    "apgd_targeted": {"steps": 4, "targets": 2},
    "autoattack": {"version": "custom", "attacks": ("apgd-ce", "fab-t", "square")},
    "carlini": {"steps": 8, "search_steps": 2},
    "ddn": {"steps": 6},
    "deepfool": {"steps": 3},
    "fab": {"steps": 4},
    "fab_targeted": {"steps": 4, "targets": 2},
    "fgsm": {},
    "gaussian_noise": {},
    "hopskipjump": {"steps": 2, "first_queries": 12},
    "mi_fgsm": {"steps": 3},
    "ni_fgsm": {"steps": 3},
    "pgd": {"steps": 3, "restarts": 2, "best": True},
    "sparse_l1": {"steps": 4},
    "spsa": {"steps": 3, "samples": 8},
    "square": {"queries": 15},
    "targeted_pgd": {"steps": 3},
    "uniform_noise": {},
}
SLOW = {"autoattack"}
PAIRS = [(name, norm) for name in SMALL for norm in attacks[name].norms if name not in SLOW]  # type: ignore[attr-defined]
each_attack = pytest.mark.parametrize("name", [name for name in SMALL if name not in SLOW])


def make(name: str, eps: float, norm: str | None = None, **more: Any) -> Attack:
    """A small attack of this name, in its own norm unless another is given."""
    chosen = {} if norm is None else {"norm": norm}
    made = attacks[name](eps=eps, **chosen, **SMALL[name], **more)
    assert isinstance(made, Attack)
    return made


ELSEWHERE = {"patch_fool", "transfer"}  # of evaluation, which look inside a model or at a second one


def test_every_registered_attack_is_tried_here() -> None:
    assert sorted(SMALL) == [name for name in attacks if name not in ELSEWHERE]


@pytest.mark.parametrize(("name", "norm"), PAIRS)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000), eps=st.floats(0, 1), classes=st.sampled_from([2, 3, 5]), size=st.sampled_from([3, 6]))
def test_results_stay_in_ball_and_image(name: str, norm: str, seed: int, eps: float, classes: int, size: int) -> None:
    net, (x, y) = small_net(classes, seed, size), some_images(3, classes, seed, size)
    before = x.clone()
    moved = make(name, eps, norm, seed=seed)(net, x, y)
    assert moved.shape == x.shape
    assert moved.dtype == x.dtype
    assert not moved.requires_grad
    assert torch.equal(x, before)
    assert float(NORMS[norm].length(moved - x).max()) <= eps + 1e-6
    assert float(moved.min()) >= 0
    assert float(moved.max()) <= 1


@each_attack
def test_the_same_seed_gives_the_same_result_whatever_the_batch(name: str) -> None:
    net, (x, _) = small_net(), some_images(7)
    y = labels_of(net, x)
    attack = make(name, 0.3 if name != "sparse_l1" else 3.0)
    torch.manual_seed(1)
    whole = attack(net, x, y)
    torch.manual_seed(2)
    apart = torch.cat([attack(net, *pair) for pair in zip(x.split(3), y.split(3), strict=True)])
    reordered = attack(net, x.flip(0), y.flip(0)).flip(0)
    torch.testing.assert_close(apart, whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(reordered, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["pgd", "apgd", "square", "spsa", "uniform_noise", "hopskipjump"])
def test_another_seed_or_other_ids_give_another_result(name: str) -> None:
    net, (x, _) = small_net(), some_images(4)
    y, attack = labels_of(net, x), make(name, 0.02)
    first = attack(net, x, y, ids=torch.arange(4))
    assert torch.equal(first, attack(net, x, y, ids=torch.arange(4)))
    assert not torch.equal(first, attack(net, x, y, ids=torch.arange(4, 8)))
    assert not torch.equal(first, replace(attack, seed=1)(net, x, y, ids=torch.arange(4)))


def test_stages_of_one_seed_do_not_share_their_random_numbers() -> None:
    made = [make("pgd", 0.1), make("apgd", 0.1), make("apgd", 0.1, loss="dlr"), make("apgd_targeted", 0.1)]
    made += [make("apgd_malt", 0.1), make("square", 0.1), replace(made[0], seed=1)]
    drawn = [attack.dice(torch.arange(2)).uniform("start", (4,)) for attack in made]
    assert len({tuple(numbers.flatten().tolist()) for numbers in drawn}) == len(made)


@each_attack
def test_the_global_generator_is_never_touched(name: str) -> None:
    net, (x, y) = small_net(), some_images(2)
    before = torch.random.get_rng_state()
    make(name, 0.1)(net, x, y)
    assert torch.equal(torch.random.get_rng_state(), before)


LONGER: dict[str, dict[str, Any]] = {
    "pgd": {"steps": 20},
    "apgd": {"steps": 20},
    "spsa": {"steps": 40, "lr": 0.05},
    "square": {"queries": 60},
    "ddn": {"steps": 30},
    "deepfool": {"steps": 30},
    "fab": {"steps": 10},
    "carlini": {"steps": 80, "search_steps": 4, "lr": 0.1},
    "sparse_l1": {"steps": 40, "share": 0.1},
}


@pytest.mark.parametrize("name", sorted(set(SMALL) - SLOW - {"fgsm", "uniform_noise", "gaussian_noise"}))
def test_searches_find_what_the_whole_range_of_pixels_allows(name: str) -> None:
    """In a ball larger than the image, a hardened network loses almost every image."""
    net, x, y = digits_cnn()
    x, y = x[:8], y[:8]
    norm = {"sparse_l1": "l1", "carlini": "l2", "ddn": "l2", "hopskipjump": "l2"}.get(name, "linf")
    eps = {"linf": 1.0, "l2": 20.0, "l1": 250.0}[norm]
    attack = replace(make(name, eps, norm), **LONGER.get(name, {}))
    assert accuracy(net, attack(net, x, y), y) <= 0.25


def test_binary_problems_and_more_targets_than_classes_work_everywhere() -> None:
    net, (x, _) = small_net(2), some_images(6, 2)
    y = labels_of(net, x)
    for attack in (
        attacks["apgd"](eps=0.5, steps=10, loss="dlr"),
        attacks["apgd_targeted"](eps=0.5, steps=10),
        attacks["fab_targeted"](eps=0.5, steps=10),
        attacks["autoattack"](eps=0.5, version="custom", attacks=("apgd-t", "fab-t")),
    ):
        assert accuracy(net, disturb(attack, net, x, y, torch.arange(6)), y) < 1


class Broken(nn.Module):
    """Answers something that is no use."""

    def __init__(self, answer: Tensor | None) -> None:
        super().__init__()
        self.answer = answer
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.answer is None:
            with torch.no_grad():
                return x.flatten(1)[:, :4] + 0
        return self.answer + 0 * x.flatten(1)[:, :1]


@pytest.mark.parametrize("name", ["pgd", "apgd", "fab_targeted", "square", "carlini"])
def test_models_that_answer_nonsense_are_named(name: str) -> None:
    x, y = some_images(2, 3)
    attack = make(name, 0.1)
    with pytest.raises(DataError, match="logits that are not finite"):
        attack(Broken(torch.full((2, 3), math.nan)), x, y)
    with pytest.raises(ConfigError, match="one output"):
        attack(Broken(torch.zeros(2, 1)), x, y)
    with pytest.raises(DataError, match="labels reach up to 9, but the model has 3 classes"):
        attack(Broken(torch.zeros(2, 3)), x, y + 9 - y.max())


class BreaksLater(nn.Module):
    """Answers a while, then says NaN."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 3)
        self.calls = calls
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.calls -= 1
        return self.linear(x.flatten(1)) + (0.0 if self.calls >= 0 else math.nan)


@pytest.mark.parametrize("name", sorted(set(SMALL) - {"fgsm", "uniform_noise", "gaussian_noise"}))
def test_logits_that_become_nan_during_the_search_are_an_error(name: str) -> None:
    x, _ = some_images(2, 3, size=4)
    model = BreaksLater(10**9)
    y = model(x).argmax(1)
    model.calls = 4 if name == "autoattack" else 2
    with pytest.raises(DataError, match="logits that are not finite"):
        attacks[name](eps=1e-4, **SMALL[name])(model, x, y)  # type: ignore[call-arg]


class SteepAtZero(nn.Module):
    """Finite logits whose gradient is not: a square root at 0."""

    def forward(self, x: Tensor) -> Tensor:
        z = (x - x).abs().sqrt().flatten(1)[:, :3]
        return z + torch.tensor([1.0, 0.0, 0.0])


WITHOUT_GRADIENT = {"gaussian_noise", "uniform_noise", "square", "spsa", "hopskipjump"}


@pytest.mark.parametrize(
    ("name", "norm"), [*(pair for pair in PAIRS if pair[0] not in WITHOUT_GRADIENT), ("autoattack", "linf")]
)
def test_a_gradient_that_is_not_a_number_is_an_error(name: str, norm: str) -> None:
    x, y = some_images(2, 3, size=4)
    with pytest.raises(DataError, match=r"gradient of the model is not finite.*square root"):
        attacks[name](eps=0.1, norm=norm, **SMALL[name])(SteepAtZero().eval(), x, y * 0)  # type: ignore[call-arg]


class Enormous(nn.Module):
    """Numbers whose sum is not one: logits near the largest float, gradients infinite in both directions."""

    def forward(self, x: Tensor) -> Tensor:
        few = x.flatten(1)[:, :3]
        steep = (few - few.detach()) * 1e38 * 1e2
        return 3e38 + steep * torch.tensor([1.0, -1.0, 1.0])


@pytest.mark.parametrize("name", ["fgsm", "pgd"])
def test_numbers_too_large_to_be_added_up_are_no_mistake(name: str) -> None:
    x, _ = some_images(2, 3, size=4)
    moved = make(name, 0.1)(Enormous().eval(), x, torch.tensor([0, 1]))
    assert bool(moved.isfinite().all())


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_labels_of_any_whole_type_work(name: str, dtype: torch.dtype) -> None:
    net, (x, y) = small_net(3), some_images(2, 3)
    attack, ids = attacks[name](eps=0.1, **SMALL[name]), torch.arange(2)
    assert torch.equal(attack(net, x, y.to(dtype), ids=ids), attack(net, x, y, ids=ids))  # type: ignore[call-arg]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_soft_labels_and_empty_batches_are_refused_in_a_sentence(name: str) -> None:
    net, (x, y) = small_net(3), some_images(2, 3)
    attack = attacks[name](eps=0.1, **SMALL[name])
    with pytest.raises(DataError, match=r"labels have shape \(2, 3\).*one whole number per image.*argmax"):
        attack(net, x, torch.eye(3)[y])
    with pytest.raises(DataError, match="the batch is empty"):
        attack(net, x[:0], y[:0])


def test_a_loss_on_probabilities_wants_probabilities() -> None:
    net, (x, y) = small_net(3), some_images(2, 3)
    with pytest.raises(DataError, match=r"loss=kl .* probabilities \(B, K\)"):
        attacks["pgd"](eps=0.1, loss="kl")(net, x, y)


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("pgd", {"step_size": -1.0}, "step_size=-1; expected more than 0"),
        ("pgd", {"steps": 0}, "steps=0; expected 1 or more"),
        ("pgd", {"momentum": -0.5}, "momentum=-0.5; expected 0 or more"),
        ("sparse_l1", {"share": 0.0}, "share=0; expected more than 0"),
        ("apgd_targeted", {"targets": 0}, "targets=0; expected 1 or more"),
        ("gaussian_noise", {"std": -1.0}, "std=-1; expected 0 or more"),
        ("pgd", {"step_size": math.inf}, "step_size=inf; expected a finite number"),
        ("carlini", {"confidence": math.nan}, "confidence=nan; expected a finite number"),
        ("pgd", {"steps": 2.5}, "steps=2.5; expected a whole number"),
        ("autoattack", {"batch_size": 0}, "batch_size=0; expected 1 or more"),
        ("pgd", {"norm": math.inf}, "norm=inf; expected a name"),
    ],
)
def test_settings_that_mean_nothing_are_refused(name: str, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        attacks[name](eps=0.1, **wrong)


def test_a_model_without_gradient_is_named_and_black_boxes_do_not_mind() -> None:
    x, y = some_images(2, 3)
    with pytest.raises(ConfigError, match=r"no gradient with respect to the image.*square"):
        make("pgd", 0.1)(Broken(None), x, y)
    assert make("square", 0.1)(Broken(None), x, y).shape == x.shape


def test_radii_are_checked_when_an_attack_is_made() -> None:
    with pytest.raises(ConfigError, match=r"eps=-0\.1 is not a radius"):
        make("pgd", -0.1)
    with pytest.raises(ConfigError, match="is not a radius"):
        make("pgd", math.nan)
    with pytest.raises(ConfigError, match=r"eps=8 in linf allows every image.*did you mean 8/255\?"):
        make("pgd", 8.0)
    with pytest.raises(ConfigError, match="APGD needs a finite eps"):
        make("apgd", math.inf)
    with pytest.raises(ConfigError, match="Carlini works in l2, not in linf"):
        make("carlini", 0.1, "linf")
    make("pgd", 8.0, "l2")
    make("pgd", 2.0, bounds=(-3.0, 3.0))  # images that are not in [0, 1]
    make("fab", math.inf)
    make("fab", 8.0)  # the nearest point is sought, whatever the radius


ANY = {**SMALL, "patch_fool": {"steps": 3}, "transfer": {"source": small_net(seed=1), "attack": "pgd:steps=3"}}


def victim(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model that this attack can search, with images and labels."""
    model, x, y = digits_vit() if name == "patch_fool" else (small_net(), *some_images(3))
    return model, x[:3], y[:3]


@pytest.mark.parametrize("name", sorted(attacks))
@pytest.mark.parametrize("images", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("weights", [torch.float16, torch.float32, torch.float64])
def test_models_and_images_of_any_precision_work(name: str, images: torch.dtype, weights: torch.dtype) -> None:
    """x' has the images' precision and is in the ball; a search in float32 or float64 does not depend on theirs."""
    model, x, y = victim(name)
    model, x, attack = model.to(weights), x.to(images), attacks[name](eps=0.1, **ANY[name])
    moved = disturb(attack, model, x, y, torch.arange(3))
    delta = moved.double() - x.double()
    assert moved.dtype == images
    assert float(attack.norm.length(delta).max() if name != "transfer" else delta.abs().max()) <= 0.1 + 1e-6  # type: ignore[attr-defined]
    assert 0 <= float(moved.min()) <= float(moved.max()) <= 1
    assert {p.dtype for p in model.parameters()} == {weights}


class AnswersInFloat64(nn.Module):
    """Weights in float32, logits in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = small_net()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x).double()


@pytest.mark.parametrize("name", sorted(set(SMALL) - {"autoattack"}))
def test_logits_in_float64_change_nothing_but_their_digits(name: str) -> None:
    x, y = some_images(3)
    moved = make(name, 0.1)(AnswersInFloat64(), x, y)
    assert moved.dtype == x.dtype
    if name != "spsa":  # which divides small differences of losses
        torch.testing.assert_close(moved, make(name, 0.1)(small_net(), x, y))


class Leaves(Attack):
    """A plugin's attack that forgets the ball, or the image."""

    far: float = 0.5

    def search(self, model: Any, x: Tensor, y: Tensor, dice: Any) -> Tensor:
        return x + self.far


class LosesImages(Leaves):
    def search(self, model: Any, x: Tensor, y: Tensor, dice: Any) -> Tensor:
        return x[:1]


def test_an_attack_of_ones_own_that_leaves_ball_or_image_is_refused() -> None:
    net, x = small_net(), some_images(3)[0]
    for attack in (
        lambda attack: attack,
        lambda attack: attacks["autoattack"](eps=0.1, version="custom", attacks=(attack,)),
    ):
        with pytest.raises(DataError, match="moved an image by"):
            attack(Leaves(eps=0.1))(net, 0.1 + 0 * x, labels_of(net, 0.1 + 0 * x))
        with pytest.raises(DataError, match="pixels from"):
            attack(Leaves(eps=1.0))(net, 0.9 + 0 * x, labels_of(net, 0.9 + 0 * x))
        with pytest.raises(DataError, match="same shape"):
            attack(LosesImages(eps=1.0))(net, x, labels_of(net, x))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda attack, net, x, y: type(attack)(net, eps=0.1), "settings by name"),
        (lambda attack, net, x, y: attack(x, y), "a tensor"),
        (lambda attack, net, x, y: attack(None, x, y), "got None for a model"),
        (lambda attack, net, x, y: attack(net, x), "NoneType for labels"),
        (lambda attack, net, x, y: attack(net, x.numpy(), y), "ndarray for images"),
        (lambda attack, net, x, y: attack(net, x, y.tolist()), "list for labels"),
        (lambda attack, net, x, y: attack(net, x[0], y[0]), "one image"),
        (lambda attack, net, x, y: attack(net, x[0], y[:1]), "one image"),
        (lambda attack, net, x, y: attack(net, x.permute(0, 2, 3, 1), y), "channels last"),
        (lambda attack, net, x, y: attack(net, x[:, :1], y), "grey images"),
        (lambda attack, net, x, y: attack(net, x[:, :, 1:, 1:], y), "resize"),
        (lambda attack, net, x, y: attack(net, x.repeat(1, 2, 1, 1), y), "resize"),
    ],
)
@pytest.mark.parametrize("name", ["pgd", "square", "autoattack"])
def test_a_call_that_asks_something_else_is_answered_with_the_right_one(name: str, call: Any, words: str) -> None:
    net = vitruvius.create_model("vitruvius/vit_digits", depth=1)
    x, y = some_images(4, size=8)
    with pytest.raises((ConfigError, DataError), match=words):
        call(attacks[name](eps=0.1), net, x, y)


def test_train_mode_is_the_callers_business_but_can_be_refused() -> None:
    net, (x, y) = small_net().train(), some_images()
    make("pgd", 0.1)(net, x, y)
    assert net.training
    with pytest.raises(ConfigError, match=r"call model.eval\(\)"):
        check_eval_mode(net)


def test_attacks_print_as_what_they_are_and_describe_themselves() -> None:
    assert "norm=l2" in repr(make("pgd", 0.5, "l2"))
    for name, signature, line in attacks.describe():
        assert "eps" in signature, name
        assert line, name
