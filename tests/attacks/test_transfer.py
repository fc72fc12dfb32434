"""Transfer: found on one model, judged on another, whatever names the one it was found on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import vitruvius
from small_run import small_run
from vitruvius._errors import ConfigError, DataError, UnknownName
from vitruvius.attacks.base import CE, LINF, loss_and_grad
from vitruvius.attacks.pgd import PGD
from vitruvius.attacks.transfer import Source, Transfer
from vitruvius.cli import main
from vitruvius.evaluation import describe, evaluate, make_threat

NAME = "vitruvius/vit_digits"


def model(seed: int = 0, **settings: Any) -> nn.Module:
    return vitruvius.create_model(NAME, **{"depth": 1, "seed": seed, **settings}).eval()


def images(count: int = 4, size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0)), torch.arange(count)


class Blind(nn.Module):
    """Counts how often it is asked, and refuses to be differentiated."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.asked = 0
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        assert not x.requires_grad, "an attack on another model has no use for this one's gradient"
        self.asked += 1
        out: Tensor = self.inside(x)
        return out


def test_the_attack_is_made_on_the_source_and_never_sees_the_model() -> None:
    x, y = images()
    source = model(1)
    ids = torch.arange(4)
    target = Blind(model(2))
    moved = Transfer(source=source, eps=0.1, attack="pgd:steps=3", seed=5)(target, x, y, ids=ids)
    expected = PGD(eps=0.1, steps=3, seed=5)(source, x, y, ids=ids)
    assert torch.equal(moved, expected)
    assert target.asked == 1  # how many classes it has


def test_any_form_of_an_attack_is_taken() -> None:
    x, y = images()
    source = model(1)
    object_ = Transfer(source=source, attack=PGD(eps=0.1, steps=3))
    mapping = Transfer(source=source, eps=0.1, attack={"use": "pgd", "steps": 3})
    assert torch.equal(object_(model(), x, y), mapping(model(), x, y))
    assert object_.eps == 0.1
    l2 = Transfer(source=source, eps=0.5, norm="l2", attack="pgd")  # type: ignore[arg-type]
    assert float((l2(model(), x, y) - x).flatten(1).norm(dim=1).max()) <= 0.5 + 1e-5
    assert Transfer(source=source, eps=0.1).made.decay == 1.0  # type: ignore[attr-defined]  # mi_fgsm


def test_a_description_names_the_source_and_its_weights() -> None:
    source = model(1)
    first = describe(Transfer(source=source, eps=8 / 255))
    assert first.startswith("transfer(source=PixelModel@")
    assert first.endswith(", eps=8/255)")
    assert describe(Transfer(source=model(1), eps=8 / 255)) == first
    assert describe(Transfer(source=model(2), eps=8 / 255)) != first  # a ledger does not mix them up
    assert Source(source, "a") == Source(model(1), "a")


def test_one_line_of_a_command_is_enough() -> None:
    threat = make_threat(f"transfer:source={NAME},eps=4/255,attack={{use: pgd, steps: 2, loss: dlr}}")
    assert isinstance(threat, Transfer)
    assert threat.made == PGD(eps=4 / 255, steps=2, loss="dlr")  # type: ignore[arg-type]
    assert describe(threat).startswith(f"transfer(source={NAME}@")


def test_a_source_by_name_takes_a_file_of_weights(tmp_path: Path) -> None:
    source = vitruvius.create_model(NAME, seed=7).eval()
    save_file(source.model.state_dict(), tmp_path / "weights.safetensors")  # type: ignore[operator]
    threat = Transfer(source=NAME, weights=str(tmp_path / "weights.safetensors"), eps=0.1)
    x, y = images()
    assert torch.equal(threat(model(), x, y), Transfer(source=source, eps=0.1)(model(), x, y))


def test_a_source_of_another_size_sees_the_images_in_its_own() -> None:
    x, y = images(size=12)
    source = model(1)
    threat = Transfer(source=source, eps=0.1, attack="pgd:steps=2")
    net = nn.Sequential(nn.Flatten(), nn.Linear(432, 10)).eval()
    moved = threat(net, x, y)
    assert moved.shape == x.shape
    assert float(LINF.length(moved - x).max()) <= 0.1 + 1e-6

    def loss(points: Tensor) -> Tensor:
        return loss_and_grad(threat.source.on(x), points, lambda logits: CE(logits, y)).loss  # type: ignore[union-attr]

    assert bool((loss(moved) > loss(x)).all())


def test_a_source_with_other_classes_is_refused() -> None:
    x, y = images()
    with pytest.raises(DataError, match=r"the source PixelModel@\w+ has 5 classes and the model 10"):
        Transfer(source=model(num_classes=5), eps=0.1)(model(), x, y)


def test_mistakes_are_answered_before_anything_runs() -> None:
    with pytest.raises(UnknownName, match="neither a run folder nor a model"):
        Transfer(source="runs/nowhere", eps=0.1)
    with pytest.raises(ConfigError, match=r"transfer\.attack: pgd.eps is missing"):
        Transfer(source=model(), attack="pgd")
    with pytest.raises(ConfigError, match=r"eps=0\.2 and an attack with eps=0\.1"):
        Transfer(source=model(), eps=0.2, attack=PGD(eps=0.1))
    with pytest.raises(UnknownName, match=r"transfer\.attack: no attack named 'pgdd'; did you mean 'pgd'"):
        Transfer(source=model(), eps=0.2, attack="pgdd")


def test_an_evaluation_judges_both_and_keeps_them_apart(tmp_path: Path) -> None:
    x, y = images()
    threats = [Transfer(source=model(seed), eps=0.1, attack="pgd:steps=2") for seed in (1, 2)]
    report = evaluate(model(), [(x, y)], threats, folder=tmp_path)
    assert len({score.spec for score in report.threats}) == 3
    assert all(score.eps == 0.1 for score in report.threats[1:])


def test_the_command_takes_a_run_as_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "other"
    small_run(run)
    target = ["evaluate", NAME, "data.dataset=digits", "data.val_num_samples=4", "model.kwargs.depth=1", "device=cpu"]
    threat = ["--threat", f"transfer:source={run},eps=8/255,attack=pgd:steps=2", "--out", str(tmp_path / "out")]
    assert main([*target, *threat]) == 0
    assert "transfer(source=" in capsys.readouterr().out
