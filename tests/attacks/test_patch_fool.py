"""Patch-Fool: the published algorithm, on the patches that attention looks at and nowhere else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitruvius
from families import FAMILIES, Family
from vitruvius._errors import ConfigError, DataError, UnsuitableSite
from vitruvius._random import Dice
from vitruvius.attacks.base import attacks
from vitruvius.attacks.patch_fool import PatchFool, attacked_layers, patch_mask, token_sites, without_conflict
from vitruvius.evaluation import evaluate, make_threat
from vitruvius.surgery.recording import map_of


def model(**settings: Any) -> nn.Module:
    """A small ViT of 16 patches behind a class token."""
    known = {"depth": 4, "seed": 3, "class_token": True, "global_pool": "token"}
    return vitruvius.create_model("vitruvius/vit_digits", **{**known, **settings}).eval()


def images(count: int = 3) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(count)


def released(net: nn.Module, x: Tensor, y: Tensor, start: Tensor, attack: PatchFool) -> Tensor:
    """The released loop for one image (1, 3, 8, 8), with torch's own Adam and StepLR; `start` are the first pixels."""
    names = [f"blocks.{i}.attn" for i in range(4)]
    with vitruvius.record(net, detach=False) as seen:

        def look(point: Tensor) -> tuple[Tensor, list[Tensor]]:
            return net(point), [map_of(net, name, seen[name]) for name in names]

        _, maps = look(x)
        index = int(maps[min(attack.layer, 3)].mean(1).mean(-2)[0, 1:].argmax())  # behind the class token
        mask = torch.zeros(1, 1, 8, 8)
        row, column = 2 * (index // 4), 2 * (index % 4)
        mask[:, :, row : row + 2, column : column + 2] = 1
        delta = start.clone().requires_grad_()
        optimizer = torch.optim.Adam([delta], lr=attack.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.95)
        for _ in range(attack.steps):
            logits, maps = look(x * (1 - mask) + delta * mask)
            (grad,) = torch.autograd.grad(F.cross_entropy(logits, y), delta, retain_graph=True)
            first = grad.clone()
            for number in range(1, len(maps) // 2):
                flat = maps[number].mean(1).flatten(0, 1)
                loss = F.nll_loss(-flat.log(), torch.full((len(flat),), index + 1))
                (pull,) = torch.autograd.grad(loss, delta, retain_graph=True)
                if float((pull * first).sum()) < 0:
                    pull = pull - (pull * first).sum() / first.square().sum() * first
                grad = grad + attack.attention_weight * pull
            delta.grad = -grad
            optimizer.step()
            schedule.step()
            delta.data.clamp_(0, 1)
    return (x * (1 - mask) + delta * mask).detach()


class Stubborn(nn.Module):
    """Never fooled: the label's logit is raised by a constant, so the search goes on to its last step."""

    looks_through = True

    def __init__(self, inside: nn.Module, y: Tensor) -> None:
        super().__init__()
        self.model = inside
        self.shift = 30.0 * F.one_hot(y, 10)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x) * 10 + self.shift
        return out


@pytest.mark.parametrize("weight", [0.0, 0.002, 0.5])
def test_it_is_the_released_algorithm(weight: float) -> None:
    x, _ = images(1)
    y = torch.tensor([4])
    net = Stubborn(model(), y)
    attack = PatchFool(steps=13, attention_weight=weight, seed=1)
    moved = attack(net, x, y, ids=torch.tensor([5]))
    start = Dice(torch.tensor([5]), 1, "PatchFool").uniform("patch", (3, 8, 8))
    torch.testing.assert_close(moved, released(net, x, y, start, attack), rtol=0, atol=2e-4)


def test_only_the_chosen_patches_change() -> None:
    net = model()
    x, y = images()
    for patches in (1, 3):
        moved = PatchFool(patches=patches, steps=3)(net, x, y)
        touched = (moved != x).any(1).unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).any(3)  # (B, 4, 4)
        assert touched.flatten(1).sum(1).tolist() == [patches] * 3


def test_the_patch_is_the_one_that_gets_most_attention_in_its_layer() -> None:
    net = model()
    x, y = images()
    with vitruvius.record(net) as seen:
        net(x)
    for layer in (0, 2, 9):
        name = f"blocks.{min(layer, 3)}.attn"
        expected = map_of(net, name, seen[name]).mean((1, 2))[:, 1:].argmax(1)
        moved = PatchFool(steps=1, layer=layer)(net, x, y)
        mask = patch_mask(expected[:, None], (4, 4), x).expand_as(x)
        assert bool((moved != x)[mask].any())
        assert torch.equal(moved[~mask], x[~mask])


def test_a_mild_patch_stays_in_the_ball() -> None:
    x, y = images()
    moved = PatchFool(eps=0.1, steps=5, patches=4, lr=0.2)(model(), x, y)
    assert float((moved - x).abs().max()) <= 0.1 + 1e-6
    assert float((moved - x).abs().max()) > 0.05
    assert 0 <= float(moved.min()) <= float(moved.max()) <= 1


def test_attention_is_drawn_to_the_patch() -> None:
    x, _ = images(6)
    y = torch.arange(6)
    net = Stubborn(model(), y)

    def paid(attack: PatchFool) -> float:
        moved = attack(net, x, y, ids=torch.arange(6))
        chosen = (moved != x).any(1).unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).any(3).flatten(1).int().argmax(1)
        with vitruvius.record(net) as seen:
            net(moved)
        attention = map_of(net, "blocks.1.attn", seen["blocks.1.attn"]).mean((1, 2))
        return float(attention.gather(1, chosen[:, None] + 1).mean())

    attack = PatchFool(steps=20)
    assert paid(replace(attack, attention_weight=1e4)) > paid(replace(attack, attention_weight=0.0)) + 5e-4


def test_a_gradient_that_contradicts_is_made_perpendicular() -> None:
    grad = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    pull = torch.tensor([[-2.0, 3.0], [2.0, 0.0]])
    torch.testing.assert_close(without_conflict(pull, grad), torch.tensor([[0.0, 3.0], [2.0, 0.0]]))
    assert attacked_layers([str(i) for i in range(12)]) == ["1", "2", "3", "4", "5"]
    assert attacked_layers(["0", "1"]) == ["1"]
    assert attacked_layers(["0"]) == []


def test_the_same_image_gives_the_same_result_in_every_batch() -> None:
    net = model()
    x, y = images(4)
    attack = PatchFool(steps=4)
    whole = attack(net, x, y, ids=torch.arange(4))
    alone = torch.cat([attack(net, x[i : i + 1], y[i : i + 1], ids=torch.tensor([i])) for i in range(4)])
    torch.testing.assert_close(alone, whole, rtol=0, atol=1e-4)


def test_rewired_attention_is_attacked_through_its_true_map_and_the_model_is_left_as_it_was() -> None:
    net = model(attention=("rpc",))
    x, y = images()
    before = net(x)
    PatchFool(steps=2)(net, x, y)
    assert torch.equal(net(x), before)
    bare = model()
    PatchFool(steps=2)(bare, x, y)
    assert "core" not in dict(bare.named_modules())
    assert all("attn.core" not in name for name, _ in bare.named_modules())


def test_models_without_attention_over_patches_are_refused_in_a_sentence() -> None:
    x, y = images()
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 10)).eval()
    with pytest.raises(UnsuitableSite, match="patch_fool needs a model with attention over patches"):
        PatchFool()(net, x, y)
    xcit = vitruvius.create_model("vitruvius/xcit_small_12_p8_32", depth=1).eval()
    with pytest.raises(UnsuitableSite, match="patch_fool needs attention over one grid of patches; 0 of"):
        token_sites(xcit, torch.rand(1, 3, 32, 32))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"patches": 0}, "patches=0; expected 1 or more"),
        ({"steps": 0}, "steps=0; expected 1 or more"),
        ({"lr": 0.0}, "lr=0; expected more than 0"),
        ({"attention_weight": -1.0}, "attention_weight=-1; expected 0 or more"),
        ({"norm": "l2"}, "PatchFool works in linf, not in l2"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PatchFool(**wrong)


def test_more_patches_than_there_are_and_bad_labels_are_refused() -> None:
    x, y = images()
    with pytest.raises(ConfigError, match="patches=17; the image has 16"):
        PatchFool(patches=17)(model(), x, y)
    with pytest.raises(DataError, match="one whole number per image"):
        PatchFool()(model(), x, torch.eye(10)[:3])
    with pytest.raises(DataError, match="NaN pixels"):
        PatchFool()(model(), x * math.nan, y)


def test_it_is_a_threat_like_any_other() -> None:
    x, y = images()
    assert "patch_fool" in attacks
    threat = make_threat("patch_fool:patches=2,steps=2")
    assert threat == PatchFool(patches=2, steps=2)
    report = evaluate(model(), [(x, y)], [threat])
    assert report.threats[-1].spec == "patchfool(patches=2, steps=2)"


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family_is_attacked_or_refused_in_a_sentence(family: Family) -> None:
    net, x = family.randomised()
    x = x.sigmoid()
    y = torch.zeros(len(x), dtype=torch.long)
    if family.name.startswith(("swin", "xcit", "levit", "crossvit", "maxvit")):
        with pytest.raises(UnsuitableSite, match="patch_fool needs attention over one grid of patches"):
            PatchFool(steps=1)(net.eval(), x, y)
        return
    moved = PatchFool(steps=1)(net.eval(), x, y)
    assert 0 < float((moved != x).any(1).double().mean()) <= 0.1
