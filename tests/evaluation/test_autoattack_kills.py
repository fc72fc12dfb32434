"""AutoAttack in an evaluation that is killed, truly and at random moments, in one process and in two."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from judging import model, rows

from vitruvius._processes import joined
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


def _work(rank: int, world_size: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    os.environ |= places | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    data = DataConfig(val_num_samples=IMAGES, batch_size=2)
    with joined("cpu") as process:
        mine = eval_loader(data, input_size=(3, 8, 8), rank=rank, world_size=world_size)
        evaluate(model(), mine, [ENSEMBLE], folder=folder, process=process)


@contextmanager
def working(world_size: int, folder: Path) -> Iterator[list[mp.Process]]:
    """Processes that evaluate, forked from this one; killed at the end of the block if they still live."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = mp.get_context("fork")
    crew = [fork.Process(target=_work, args=(rank, world_size, str(folder), port)) for rank in range(world_size)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at a fork
        for member in crew:
            member.start()
    try:
        yield crew
    finally:
        for member in crew:
            if member.is_alive():
                os.kill(member.pid, signal.SIGKILL)
            member.join()


def finish(world_size: int, folder: Path) -> None:
    with working(world_size, folder) as crew:
        for member in crew:
            member.join(60)
        assert [member.exitcode for member in crew] == [0] * world_size


def kill(world_size: int, folder: Path, parts: int, after: float) -> bool:
    """Pull the plug some moment after so many parts were written; whether there was still something to interrupt."""
    with working(world_size, folder) as crew:
        while sum(1 for _ in (folder / "parts").glob("*.safetensors")) < parts and crew[0].is_alive():
            time.sleep(0.002)
        time.sleep(after)
        return any(member.is_alive() for member in crew)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "evaluation"
    finish(1, folder)
    return folder


def assert_same(one: Path, other: Path, *, atol: float) -> None:
    ours, theirs = rows(one), rows(other)
    assert ours.keys() == theirs.keys()
    for threat in ours:
        assert ours[threat].keys() == theirs[threat].keys()
        for name, column in ours[threat].items():
            torch.testing.assert_close(column, theirs[threat][name], rtol=0, atol=atol, msg=f"{threat}/{name}")


def test_the_short_ensemble_is_worth_interrupting(undisturbed: Path) -> None:
    columns = rows(undisturbed)[next(iter(rows(undisturbed)))]
    standing = [int(column.sum()) for name, column in columns.items() if name.startswith("standing after")]
    assert len(standing) == 4
    assert IMAGES > max(standing) > min(standing) > 0


def test_two_processes_give_the_same_results_image_by_image(undisturbed: Path, tmp_path: Path) -> None:
    finish(2, tmp_path)
    assert_same(tmp_path, undisturbed, atol=1e-5)


@pytest.mark.parametrize(("world_size", "ledgers"), [(1, 3), (2, 2)])
def test_killed_at_random_moments_and_resumed_the_ledger_is_the_undisturbed_one(
    world_size: int, ledgers: int, undisturbed: Path, tmp_path: Path
) -> None:
    """Ten kills: a ledger is killed, resumed by the other number of processes, killed again, and finished."""
    dice, interrupted = random.Random(world_size), 0
    for number in range(ledgers):
        folder, first = tmp_path / str(number), dice.randrange(22)
        interrupted += kill(world_size, folder, first, dice.uniform(0, 0.05))
        interrupted += kill(3 - world_size, folder, min(first + dice.randrange(4), 22), dice.uniform(0, 0.05))
        finish(1 + number % 2, folder)
        assert_same(folder, undisturbed, atol=1e-5)
    assert interrupted >= ledgers  # at least half of the plugs were pulled in time
