"""AutoAttack: stages and versions, which stage broke which image, fast search with exact judgement, strength."""

from __future__ import annotations

import pytest
import torch
from attacked import digits_cnn, digits_vit, golden, labels_of, small_net, some_images
from torch import Tensor, nn

import vitruvius
from vitruvius._errors import ConfigError, DataError, UnknownName
from vitruvius._random import Dice
from vitruvius.attacks._compiled import compile_model
from vitruvius.attacks._lower_precision import Autocast, Bfloat16Copy, bfloat16_view
from vitruvius.attacks._models import SurrogateGradient
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.attacks.base import CE, attacks
from vitruvius.attacks.losses import DLR
from vitruvius.attacks.pgd import PGD


def test_standard_is_the_four_stages_of_the_paper() -> None:
    names, stages = zip(*AutoAttack(eps=0.1, seed=3, batch_size=7).stages(), strict=True)
    assert names == ("apgd-ce", "apgd-t", "fab-t", "square")
    assert [type(stage).__name__ for stage in stages] == ["APGD", "APGDTargeted", "FABTargeted", "Square"]
    assert {(stage.eps, stage.seed, stage.batch_size) for stage in stages} == {(0.1, 3, 7)}
    ce, t, fab, square = stages
    assert (ce.steps, t.steps, t.targets, fab.steps, fab.targets, square.queries) == (100, 100, 9, 100, 9, 5000)
    assert (ce.restarts, t.restarts, fab.restarts) == (1, 1, 1)


def test_versions_differ_as_published() -> None:
    assert [n for n, _ in AutoAttack(eps=0.1, version="plus").stages()] == [
        "apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t",
    ]  # fmt: skip
    rand = [stage for _, stage in AutoAttack(eps=0.1, version="rand").stages()]
    assert [(stage.loss, stage.eot_iterations) for stage in rand] == [(CE, 20), (DLR, 20)]
    l1 = [stage for _, stage in AutoAttack(eps=5.0, norm="l1").stages()]
    assert (l1[0].restarts, l1[1].targets) == (5, 5)


def test_custom_lists_mix_names_and_any_threats() -> None:
    def darken(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return x * 0.9

    attack = AutoAttack(eps=0.1, version="custom", attacks=("apgd-dlr", darken, PGD(eps=0.1)))
    assert [name for name, _ in attack.stages()] == ["apgd-dlr", "darken", "pgd"]
    net, (x, y) = small_net(), some_images()
    assert [stage.name for stage in attack.run(net, x, y).stages] == ["clean", "apgd-dlr", "darken", "pgd"]


def test_custom_lists_take_any_attack_by_name_with_settings() -> None:
    items = ("pgd:steps=3", {"use": "apgd", "loss": "dlr", "eps": 0.2}, "square")
    (first, pgd), (second, apgd), (third, square) = AutoAttack(
        eps=0.1, norm="l2", seed=4, version="custom", attacks=items
    ).stages()
    assert (first, second, third) == ("pgd", "apgd", "square")
    assert pgd == PGD(eps=0.1, norm="l2", seed=4, steps=3)
    assert apgd == APGD(eps=0.2, norm="l2", seed=4, loss="dlr")
    assert (square.eps, square.seed) == (0.1, 4)
    with pytest.raises(ConfigError, match=r"attacks: unknown key 'pgd.step'"):
        AutoAttack(eps=0.1, version="custom", attacks=("pgd:step=3",))


def test_stages_of_one_name_are_numbered() -> None:
    attack = AutoAttack(eps=0.1, version="custom", attacks=("square", PGD(eps=0.1), PGD(eps=0.2), "square"))
    assert [name for name, _ in attack.stages()] == ["square", "pgd", "pgd 2", "square 2"]


def test_wrong_versions_lists_and_precisions_are_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'standard'"):
        AutoAttack(eps=0.1, version="standart")
    with pytest.raises(UnknownName, match="no precision named 'bf16'"):
        AutoAttack(eps=0.1, precision="bf16")
    with pytest.raises(ConfigError, match="belongs to version='custom'"):
        AutoAttack(eps=0.1, attacks=("square",))
    with pytest.raises(ConfigError, match="belongs to version='custom'"):
        AutoAttack(eps=0.1, version="custom")
    with pytest.raises(UnknownName, match="did you mean 'apgd-ce'"):
        AutoAttack(eps=0.1, version="custom", attacks=("apgd-se",))


def test_every_image_is_charged_to_the_first_stage_that_broke_it() -> None:
    net, (x, _) = small_net(), some_images(8)
    right = labels_of(net, x)
    y = torch.where(torch.arange(8) < 2, (right + 1) % 5, right)
    wrong_way = x.clone()

    def fell(numbers: set[int]):  # type: ignore[no-untyped-def]
        def threat(model: nn.Module, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
            chosen = torch.tensor([int(i) in numbers for i in ids])
            elsewhere = torch.stack([next(z for z in wrong_way if labels_of(net, z[None])[0] != c) for c in y])
            return torch.where(chosen.view(-1, 1, 1, 1), elsewhere, x)

        return threat

    attack = AutoAttack(eps=1.0, version="custom", attacks=(fell({0, 2, 3}), fell({3, 4}), fell({5})))
    outcome = attack.run(net, x, y, ids=torch.arange(8))
    assert outcome.broken_by.tolist() == [0, 0, 1, 1, 2, 3, -1, -1]
    assert [(stage.searched, stage.broken) for stage in outcome.stages] == [(8, 2), (6, 2), (4, 1), (3, 1)]
    assert outcome.robust.tolist() == [False] * 6 + [True] * 2
    assert [int(robust.sum()) for robust in outcome.robust_by_stage().values()] == [6, 4, 3, 2]
    assert torch.equal(labels_of(net, outcome.x) == y, outcome.robust)


def test_a_robust_image_keeps_the_point_of_the_first_stage() -> None:
    """From which a short search begins; later stages replace it only where they fool the model."""
    net, (x, _) = small_net(), some_images(4)

    def nudged(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (x + 1e-5).clamp(0, 1)

    def unmoved(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return x

    outcome = AutoAttack(eps=0.1, version="custom", attacks=(nudged, unmoved)).run(net, x, labels_of(net, x))
    assert bool(outcome.robust.all())
    assert torch.equal(outcome.x, (x + 1e-5).clamp(0, 1))


def test_a_fast_claim_counts_only_if_the_exact_model_is_fooled() -> None:
    """A bfloat16 view that is wrong about everything must not fell a single image."""

    class Touchy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()

        def forward(self, x: Tensor) -> Tensor:
            logits = self.net(x)
            return logits.roll(1, 1) if self.net[-1].weight.dtype == torch.bfloat16 else logits

    net, (x, _) = Touchy().eval(), some_images(6)
    y = labels_of(net, x)
    outcome = AutoAttack(eps=1e-6, precision="fast", version="custom", attacks=("apgd-ce", "apgd-dlr")).run(net, x, y)
    assert bool(outcome.robust.all())
    assert [(s.name, s.search, s.searched) for s in outcome.stages[1:]] == [
        ("apgd-ce", "fast", 6), ("apgd-dlr", "fast", 6),
        ("apgd-ce", "polish", 6), ("apgd-ce", "exact", 6), ("apgd-dlr", "polish", 6), ("apgd-dlr", "exact", 6),
    ]  # fmt: skip


def test_images_that_fooled_the_view_alone_are_searched_in_full() -> None:
    net, (x, _) = small_net(), some_images(6)
    y = labels_of(net, x)

    class Jumpy(nn.Module):
        """In bfloat16 right about the images themselves and wrong about all others."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, z: Tensor) -> Tensor:
            logits = self.net(z)
            known = (z[:, None] == x).flatten(2).all(2).any(1)
            return (
                logits if self.net[-1].weight.dtype != torch.bfloat16 else torch.where(known[:, None], logits, -logits)
            )

    attack = AutoAttack(eps=1e-6, precision="fast", version="custom", attacks=("square:queries=60",))
    outcome = attack.run(Jumpy().eval(), x, y)
    assert outcome.view_trusted
    assert bool(outcome.robust.all())
    found = [(stage.label, stage.searched) for stage in outcome.stages[1:]]
    assert found == [("square (fast)", 6), ("square (polish)", 6), ("square", 6)]


def test_where_the_fast_search_is_blind_the_exact_one_follows_in_full() -> None:
    """A view that shows nothing in bfloat16: the short search fells many images, so the full one is run as well."""
    net, x, y = digits_cnn()

    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            blind = self.net[-1].weight.dtype == torch.bfloat16
            return self.net(x.detach()) + 0 * x.sum() if blind else self.net(x)

    model, custom = Blind().eval(), {"version": "custom", "attacks": (APGD(eps=0.15, steps=20),)}
    fast = AutoAttack(eps=0.15, precision="fast", **custom).run(model, x, y)
    exact = AutoAttack(eps=0.15, **custom).run(model, x, y)
    assert [stage.label for stage in fast.stages] == ["clean", "apgd (fast)", "apgd (polish)", "apgd"]
    assert fast.stages[2].broken > 10
    assert fast.stages[3].searched == fast.stages[2].searched - fast.stages[2].broken > 0
    assert int(fast.robust.sum()) <= int(exact.robust.sum())


@pytest.mark.parametrize(
    ("name", "norm"), [("apgd-ce", "linf"), ("apgd-ce", "l1"), ("apgd-t", "l2"), ("fab-t", "linf"), ("square", "linf")]
)
def test_refining_is_short_and_stays_in_the_ball(name: str, norm: str) -> None:
    net, x, y = digits_cnn()
    x, y, eps = x[:6], y[:6], {"linf": 0.15, "l2": 1.0, "l1": 4.0}[norm]
    ((_, attack),) = AutoAttack(eps=eps, norm=norm, version="custom", attacks=(name,)).stages()
    dice = Dice(torch.arange(6))
    start = attacks["pgd"](eps=eps, norm=norm)(net, x, y)
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(len(x))
        return net(x)

    moved = attack.refine(counted, x, y, dice, start)
    assert float(attack.norm.length(moved - x).max()) <= eps + 1e-6
    assert len(calls) <= {"apgd-ce": 11, "apgd-t": 100, "fab-t": 181, "square": 500}[name]


def test_the_fast_view_answers_in_float32_with_a_gradient_for_the_image() -> None:
    net, (x, _) = small_net(), some_images()
    x.requires_grad_()
    logits = Bfloat16Copy(net)(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, net(x), rtol=0.05, atol=0.05)
    assert not torch.equal(logits, net(x))
    assert torch.autograd.grad(logits.sum(), x)[0].dtype == torch.float32


def test_models_that_cannot_live_in_bfloat16_are_searched_by_autocast() -> None:
    class Stubborn(nn.Module):
        """Multiplies by a float32 matrix that is no parameter."""

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ torch.ones(108, 3)

    x, _ = some_images()
    assert isinstance(bfloat16_view(Stubborn().eval(), x), Autocast)
    assert isinstance(bfloat16_view(small_net(), x), Bfloat16Copy)
    torch.testing.assert_close(Autocast(small_net())(x), small_net()(x), rtol=0.05, atol=0.05)


def test_where_the_fast_search_is_trusted_only_its_claims_are_searched_in_full() -> None:
    net, x, y = digits_cnn()
    attack = AutoAttack(eps=0.1, precision="fast", version="custom", attacks=(APGD(eps=0.1, steps=30),))
    stages = attack.run(net, x, y).stages
    fast, polish, *full = stages[1:]
    assert (fast.search, polish.search) == ("fast", "polish")
    assert polish.searched == fast.searched - fast.broken
    assert sum(stage.searched for stage in full) < 0.2 * polish.searched


def test_what_cannot_be_compiled_is_attacked_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: nn.Module, **settings: object) -> nn.Module:
        class Fails(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                raise RuntimeError("no compiler here\nand a long story")

        return Fails()

    monkeypatch.setattr(torch, "compile", broken)
    net, (x, _) = small_net(), some_images()
    with pytest.warns(UserWarning, match=r"failed on Sequential \(no compiler here\)"):
        assert compile_model(net, x) is net


def test_through_answers_like_the_model_and_has_the_gradient_of_the_surrogate() -> None:
    model, surrogate, (x, _) = small_net(seed=0), small_net(seed=1), some_images()
    x.requires_grad_()
    through = SurrogateGradient(model, surrogate)
    torch.testing.assert_close(through(x), model(x))
    torch.testing.assert_close(
        torch.autograd.grad(through(x).sum(), x)[0], torch.autograd.grad(surrogate(x).sum(), x)[0]
    )


def test_a_masked_gradient_is_attacked_through_a_surrogate() -> None:
    net, x, y = digits_cnn()

    class Masked(nn.Module):
        """Steps of 1/64 in the logits: right, and without any gradient."""

        def forward(self, x: Tensor) -> Tensor:
            return (64 * net(x)).round() / 64 + 0 * x.sum()

    masked = Masked().eval()
    blind = int((masked(APGD(eps=0.15, steps=20)(masked, x, y)).argmax(1) == y).sum())
    seeing = int((masked(APGD(eps=0.15, steps=20)(SurrogateGradient(masked, net).eval(), x, y)).argmax(1) == y).sum())
    assert seeing < blind - 10


@pytest.mark.parametrize(
    ("kind", "case_id"), [("cnn", "Linf_0.15_seed0"), ("cnn", "L2_1_seed0"), ("vit", "Linf_0.1_seed0")]
)
def test_the_white_box_stages_leave_no_more_images_robust_than_the_original(kind: str, case_id: str) -> None:
    net, x, y = digits_cnn() if kind == "cnn" else digits_vit()
    x, y = x[:24], y[:24]
    flags, cases, _ = golden(f"aa_runs_{kind}")
    case = next(c for c in cases if c["id"] == case_id)
    common = {"eps": case["eps"], "norm": case["norm"]}
    attack = AutoAttack(
        version="custom",
        attacks=(attacks["apgd"](**common), attacks["apgd_targeted"](steps=50, targets=3, **common)),
        **common,
    )
    robust = attack.run(net, x, y).robust
    original = flags[f"{case_id}.final_robust"][:24]
    assert int((robust & ~original).sum()) <= 1
    assert int((original & ~robust).sum()) <= 1


def test_the_model_must_be_in_eval_mode_and_answer_numbers() -> None:
    (x, y) = some_images()
    with pytest.raises(ConfigError, match="train mode"):
        AutoAttack(eps=0.1)(small_net().train(), x, y)
    with pytest.raises(DataError, match="labels reach up to 7"):
        AutoAttack(eps=0.1)(small_net(), x, torch.full_like(y, 7))


def test_an_evaluation_in_small_batches_asks_the_model_no_more_often() -> None:
    """Targets and queries are tried side by side whatever the loader's batches are."""
    net, x, y = digits_cnn()
    calls = {}
    for size in (4, 20):
        asked: list[int] = []
        handle = net.register_forward_hook(lambda *_, asked=asked: asked.append(1))
        batches = list(zip(x[:20].split(size), y[:20].split(size), strict=True))
        stages = ("apgd_targeted:steps=10", "square:queries=200")
        report = vitruvius.evaluate(net, batches, [AutoAttack(eps=0.1, version="custom", attacks=stages)])
        handle.remove()
        calls[size] = (len(asked), report.threats[-1].accuracy)
    assert calls[4][0] <= calls[20][0] + 40  # clean images and rows come in more batches
    assert calls[4][1] == calls[20][1]


def test_autoattack_is_a_threat_that_returns_images() -> None:
    net, (x, _) = small_net(), some_images()
    y = labels_of(net, x)
    attack = AutoAttack(eps=0.3, version="custom", attacks=("apgd-ce",))
    assert torch.equal(attack(net, x, y), attack.run(net, x, y).x)
