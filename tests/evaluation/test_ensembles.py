"""An ensemble in an evaluation: pools of batches, stage by stage in the ledger, the same whatever the pool."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vitruvius
from vitruvius.attacks import Attack, Ensemble, Outcome, StageResult
from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.attacks.pgd import PGD
from vitruvius.data import DataConfig, eval_loader
from vitruvius.evaluation import evaluate

ENSEMBLE = AutoAttack(eps=16 / 255, version="custom", attacks=(PGD(eps=16 / 255, steps=2), PGD(eps=16 / 255, steps=4)))


def model() -> torch.nn.Module:
    return vitruvius.create_model("vitruvius/vit_digits", depth=1, init="skip")


def loader(batch_size: int) -> object:
    return eval_loader(DataConfig(val_num_samples=30, batch_size=batch_size), input_size=(3, 8, 8))


def test_the_report_says_what_each_stage_left_robust() -> None:
    score = evaluate(model(), loader(8), [ENSEMBLE]).threats[-1]  # type: ignore[arg-type]
    shares = list(score.stages.values())
    assert len(shares) == 3  # clean, then two attacks
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(score.accuracy)
    report = evaluate(model(), loader(8), [ENSEMBLE])  # type: ignore[arg-type]
    assert "after clean" in str(report)
    assert report.to_dict()["threats"][-1]["stages"] == score.stages


def test_the_batch_size_changes_nothing() -> None:
    one, other = (evaluate(model(), loader(size), [ENSEMBLE]) for size in (4, 30))  # type: ignore[arg-type]
    mine, theirs = (report.ledger.rows(report.threats[-1].spec) for report in (one, other))
    for column in ("id", "correct", "prediction"):
        assert torch.equal(mine[column], theirs[column]), column


def test_a_killed_ensemble_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    whole = evaluate(model(), loader(2), [ENSEMBLE], folder=tmp_path / "whole")  # type: ignore[arg-type]

    class Cut:
        name, num_images = "digits/validation", 30

        def with_ids(self) -> object:
            for number, batch in enumerate(loader(2).with_ids()):  # type: ignore[attr-defined]
                if number == 10:  # in the middle of the second pool
                    raise KeyboardInterrupt
                yield batch

    with pytest.raises(KeyboardInterrupt):
        evaluate(model(), Cut(), [ENSEMBLE], folder=tmp_path / "broken")  # type: ignore[arg-type]
    again = evaluate(model(), loader(2), [ENSEMBLE], folder=tmp_path / "broken")  # type: ignore[arg-type]
    assert list(again.threats[-1].stages) == ["clean", "pgd", "pgd 2"]
    assert again.threats[-1].correct == whole.threats[-1].correct
    assert again.threats[-1].stages == whole.threats[-1].stages
    assert again.threats[-1].n == 30


def test_stages_read_from_a_ledger_are_in_the_order_in_which_they_ran(tmp_path: Path) -> None:
    ensemble = AutoAttack(eps=1 / 255, version="custom", attacks=("square", "apgd-ce"))
    few = eval_loader(DataConfig(val_num_samples=3), input_size=(3, 8, 8))
    first, again = (evaluate(model(), few, [ensemble], folder=tmp_path).threats[-1] for _ in range(2))
    assert list(first.stages) == list(again.stages) == ["clean", "square", "apgd-ce"]
    assert first.stages == again.stages


class Brighter:
    """An ensemble of one's own, without any base class: it brightens what is dark enough."""

    batch_size = None
    pool_batches = 2

    def __call__(self, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.run(model, x, y).x

    def run(self, model, x, y, *, ids=None, batch_size=None):  # type: ignore[no-untyped-def]
        Brighter.sizes.append((len(x), batch_size))
        moved = (x + 0.5).clamp(0, 1)
        broken = model(moved).argmax(1) != y
        stages = (StageResult("clean", "exact", len(x), 0, 0.0), StageResult("bright", "exact", len(x), 0, 0.0))
        return Outcome(moved, torch.where(broken, 1, -1), stages)

    sizes: list[tuple[int, int]] = []  # noqa: RUF012


def test_an_ensemble_of_ones_own_is_recognised_and_given_pools_of_batches() -> None:
    Brighter.sizes.clear()
    score = evaluate(model(), loader(8), [Brighter()]).threats[-1]  # type: ignore[arg-type]
    assert Brighter.sizes == [(16, 8), (14, 8)]
    assert list(score.stages) == ["clean", "bright"]
    assert score.stages["bright"] == pytest.approx(score.accuracy)


def test_autoattack_is_an_ensemble_and_a_single_attack_is_not() -> None:
    assert isinstance(ENSEMBLE, Ensemble)
    assert not isinstance(ENSEMBLE, Attack)
    assert not isinstance(PGD(eps=0.1), Ensemble)
