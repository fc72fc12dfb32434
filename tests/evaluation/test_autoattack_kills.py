"""AutoAttack in an evaluation that is killed, truly and at random moments, in one process and in two."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from crews import finish, kill
from judging import assert_same_rows, model, rows

from vitruvius._processes import process_group
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.apgd_targeted import APGDTargeted
from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.attacks.square import Square
from vitruvius.data import DataConfig, eval_loader
from vitruvius.evaluation import evaluate

EPS = 6 / 255
SHORT = (APGD(eps=EPS, steps=6), APGDTargeted(eps=EPS, steps=4, targets=2), Square(eps=EPS, queries=20))
ENSEMBLE = AutoAttack(eps=EPS, version="custom", attacks=SHORT)
IMAGES = 40  # in batches of two: 20 parts of clean and three pools of the ensemble, in two processes two each


def work(folder: Path) -> None:
    data = DataConfig(val_num_samples=IMAGES, batch_size=2)
    with process_group("cpu") as process:
        mine = eval_loader(data, input_size=(3, 8, 8), rank=process.rank, world_size=process.world_size)
        evaluate(model(), mine, [ENSEMBLE], folder=folder, process=process)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "evaluation"
    finish(1, work, folder)
    return folder


def test_the_short_ensemble_is_worth_interrupting(undisturbed: Path) -> None:
    columns = rows(undisturbed)[next(iter(rows(undisturbed)))]
    standing = [int(column.sum()) for name, column in columns.items() if name.startswith("standing after")]
    assert len(standing) == 4
    assert IMAGES > max(standing) > min(standing) > 0


def test_two_processes_give_the_same_results_image_by_image(undisturbed: Path, tmp_path: Path) -> None:
    finish(2, work, tmp_path)
    assert_same_rows(tmp_path, undisturbed, atol=1e-5)


@pytest.mark.parametrize(("world_size", "ledgers"), [(1, 3), (2, 2)])
def test_killed_at_random_moments_and_resumed_the_ledger_is_the_undisturbed_one(
    world_size: int, ledgers: int, undisturbed: Path, tmp_path: Path
) -> None:
    """Ten kills: a ledger is killed, resumed by the other number of processes, killed again, and finished."""
    dice, interrupted = random.Random(world_size), 0
    for number in range(ledgers):
        folder, first = tmp_path / str(number), dice.randrange(22)
        interrupted += kill(world_size, folder, first, dice.uniform(0, 0.05), work, folder)
        interrupted += kill(
            3 - world_size, folder, min(first + dice.randrange(4), 22), dice.uniform(0, 0.05), work, folder
        )
        finish(1 + number % 2, work, folder)
        assert_same_rows(folder, undisturbed, atol=1e-5)
    assert interrupted >= ledgers  # at least half of the plugs were pulled in time
