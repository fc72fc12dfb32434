"""kill -9 at any moment, also while a checkpoint is half written: the run goes on and ends bit for bit the same."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from small_run import assert_same_run, rows_of, small_run, state_of
from vitruvius._files import PREVIOUS, paths
from vitruvius.training.loop import Trainer
from vitruvius.training.run_folder import Run, verify_checksum

KILLS = 20
LIVELY = (  # everything with a memory: averages, momentum, dice of layers, of mixup and of images, a schedule, rows
    "train.epochs=6",
    "train.warmup_epochs=1",
    "train.model_ema=true",
    "train.model_ema_decay=0.8",
    "train.save_every=1",
    "train.clip_grad=1.0",
    "data.mixup=0.4",
    "data.reprob=0.5",
    "data.pad=1",
    "model.kwargs={depth: 1, embed_dim: 24, drop_path_rate: 0.3, proj_drop_rate: 0.2}",
    "tracking=[csv]",
)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(at: int) -> None:
    """Die in the middle of the so-many-th file that is written."""
    write, files = paths.write_synced, 0

    def dying(path: Path, data: bytes) -> None:
        nonlocal files
        files += 1
        if files == at:
            path.write_bytes(data[: len(data) // 2])
            die()
        write(path, data)

    paths.write_synced = dying


def die_between_moves(at: int) -> None:
    """Die when the old state has been moved and the new one has not."""
    replace, moves = Path.replace, 0

    def dying(self: Path, target: Path) -> Path:
        nonlocal moves
        moved = replace(self, target)
        moves += target.name == PREVIOUS
        if moves == at:
            die()
        return moved

    Path.replace = dying  # type: ignore[method-assign,assignment]


def die_after_updates(at: int) -> None:
    update, updates = Trainer.update, 0

    def dying(self: Trainer) -> None:
        nonlocal updates
        update(self)
        updates += 1
        if updates == at:
            die()

    Trainer.update = dying  # type: ignore[method-assign]


def die_after_milliseconds(at: int) -> None:
    """Any instruction, by the time the process has computed: other processes do not matter."""
    signal.signal(signal.SIGVTALRM, die)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.05 + 0.03 * at)


def doomed(run: Path, way: Any, at: int) -> None:
    way(at)
    small_run(run, *LIVELY)


def test_a_run_killed_at_twenty_random_points_ends_as_the_unbroken_one(tmp_path: Path) -> None:
    unbroken = small_run(tmp_path / "unbroken", *LIVELY)
    moments, kills, whole = random.Random(0), 0, 0
    ways = (die_half_way, die_between_moves, die_after_updates, die_after_milliseconds)
    run = tmp_path / "run0"
    while kills < KILLS:
        at = moments.randint(1, 6)
        child = multiprocessing.get_context("fork").Process(target=doomed, args=(run, ways[kills % len(ways)], at))
        child.start()
        child.join()
        if child.exitcode == -signal.SIGKILL:
            kills += 1
            continue
        assert child.exitcode == 0
        assert_same_run(run, unbroken)
        whole += 1
        run = tmp_path / f"run{whole}"
    small_run(run, *LIVELY)
    assert_same_run(run, unbroken)
    assert [row["epoch"] for row in rows_of(run)] == list(range(6))
    assert len((run / "metrics.csv").read_text().splitlines()) == 7


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty"])
def test_a_damaged_state_is_passed_over_for_the_one_before(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unbroken = small_run(tmp_path / "unbroken")
    run = small_run(tmp_path / "run")
    harm(run / "state.pt", damage)
    small_run(run)
    assert "state.pt is damaged" in caplog.text
    assert "resuming from state.previous.pt" in caplog.text
    assert_same_run(run, unbroken)


def test_a_state_is_what_torch_reads_and_carries_its_checksum(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", "train.epochs=1")
    data = (run / "state.pt").read_bytes()
    assert verify_checksum(data)["epoch"] == state_of(run)["epoch"] == 1
    assert Run(run).load_state() is not None


def harm(file: Path, damage: str) -> None:
    data = bytearray(file.read_bytes())
    if damage == "one bit":
        data[len(data) // 2] ^= 1
    file.write_bytes({"truncated": data[: len(data) // 2], "one bit": data, "empty": b""}[damage])
