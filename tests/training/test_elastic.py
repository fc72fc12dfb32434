"""A run resumes with another number of processes: the images of an update stay, the processes share them out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_two_processes import SETTINGS, assert_close_runs, assert_close_weights

from small_run import RECIPE, SMALL, Stop, assert_same_run, small_config, small_session, state_of, stop_at
from two_processes import in_two_processes
from vitruvius._errors import RunError
from vitruvius._yaml import read_yaml
from vitruvius.training import train
from vitruvius.training.checkpoint import shared_out
from vitruvius.training.loop import Trainer
from vitruvius.training.run_folder import share_out

MORE = (*SETTINGS, "train.save_every=1", "train.opt=adamw", "train.lr=1e-3")


def _train(rank: int, out: str, *overrides: str) -> None:
    train(small_config(Path(out), *MORE, *overrides), quiet=True)


def _stopped(rank: int, out: str, *overrides: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, Trainer, "train_batch", 6)
        with pytest.raises(Stop):
            _train(rank, out, *overrides)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_begin_and_one_ends_with_the_same_updates(
    parallel: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ("data.batch_size=6", f"train.parallel={parallel}")
    in_two_processes(_stopped, str(tmp_path / "run"), *settings)
    assert state_of(tmp_path / "run")["updates"] == 5
    _train(0, str(tmp_path / "run"), *settings)
    in_two_processes(_train, str(tmp_path / "whole"), *settings)
    assert_close_runs(tmp_path / "run", tmp_path / "whole")
    assert read_yaml(tmp_path / "run" / "config.yaml")["processes"] == [2, 1]
    assert read_yaml(tmp_path / "run" / "config.yaml")["data"]["batch_size"] == 6
    assert "trained by 2 process(es) and resumes with 1: 12 images an update" in caplog.text


def test_one_process_begins_and_two_end_with_the_same_updates(tmp_path: Path) -> None:
    settings = ("data.batch_size=6", "train.grad_accum_steps=2")
    _stopped(0, str(tmp_path / "run"), *settings)
    updates = state_of(tmp_path / "run")["updates"]
    in_two_processes(_train, str(tmp_path / "run"), *settings)
    _train(0, str(tmp_path / "whole"), *settings)
    assert state_of(tmp_path / "run")["updates"] == state_of(tmp_path / "whole")["updates"] > updates > 0
    assert_close_weights(tmp_path / "run", tmp_path / "whole", 1e-4)


@pytest.mark.parametrize("before", [(8,), (8, 4), (8, 4, 2)])
@pytest.mark.parametrize(
    ("processes", "batch", "steps"), [(8, 6, 1), (4, 6, 2), (16, 3, 1), (3, 4, 4), (2, 6, 4), (1, 6, 8), (48, 1, 1)]
)
def test_any_number_that_divides_an_update_shares_it_out(
    processes: int, batch: int, steps: int, before: tuple[int, ...]
) -> None:
    config = share_out(small_config(Path("run"), "data.batch_size=6"), before, processes)
    assert (config.data.batch_size, config.train.grad_accum_steps) == (batch, steps)


def test_a_number_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(RunError, match=r"which 7 processes cannot share evenly; resume it with [68]\."):
        share_out(small_config(Path("run"), "data.batch_size=6"), (8,), 7)


def test_what_each_process_had_is_added_up_or_averaged_and_the_place_in_the_epoch_kept() -> None:
    session = small_session()  # 4 updates an epoch
    means = {"sums": {"loss": 2.0}, "recent": [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(3.0)}]}
    statistics = [{"model": [torch.tensor([mean, 1.0]), torch.tensor(7)]} for mean in (1.0, 4.0)]
    place = {"epoch": 1, "batch": 2, "updates": 7, "updates_per_epoch": 5}
    state = shared_out({**place, "means": means, "task": [{}, {}], "statistics": statistics}, session)
    assert (state["updates"], state["batch"]) == (6, 2)  # of the second epoch both were done
    assert state["means"] == {"sums": {"loss": 2.0}, "recent": [{"loss": torch.tensor(4.0)}]}
    (averaged,) = state["statistics"]
    assert [value.tolist() for value in averaged["model"]] == [[2.5, 1.0], 7]


def test_a_state_with_a_damaged_shard_gives_way_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What one process saves with `parallel: fsdp`: the files of at most two states, all of them checked."""
    settings = ("data.batch_size=12", "train.parallel=fsdp")
    _stopped(0, str(tmp_path / "run"), *settings)
    folders = sorted((tmp_path / "run" / "shards").iterdir())
    assert len(folders) == 2
    file = next(folders[-1].iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    _train(0, str(tmp_path / "run"), *settings)
    assert "state.pt is damaged" in caplog.text
    _train(0, str(tmp_path / "whole"), *settings)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_back_on_as_many_as_began_the_batches_are_those_of_the_recipe() -> None:
    config = share_out(small_config(Path("run"), "data.batch_size=6", "train.grad_accum_steps=2"), (4, 8), 4)
    assert (config.data.batch_size, config.train.grad_accum_steps, config.processes) == (6, 2, (4, 8, 4))


DYING = """
import os, signal
from pathlib import Path
from vitruvius.training.loop import Trainer

update, updates = Trainer.update, 0

def dying(self):
    global updates
    update(self)
    updates += 1
    if updates == 6 and os.environ["RANK"] == "1" and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

Trainer.update = dying
"""


@pytest.mark.long
@pytest.mark.timeout(900)  # half a minute, on a machine that nobody shares
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_torchrun_starts_again_after_a_killed_rank_and_ends_as_if_undisturbed(parallel: str, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    settings = [*SMALL, *MORE, "data.batch_size=4", f"train.parallel={parallel}", "plugins=[dying]", "out=run"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [*command, "-m", "vitruvius", "train", str(RECIPE), *settings],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    assert "after 5 updates" in done.stderr or "after 6 updates" in done.stderr
    in_two_processes(_train, str(tmp_path / "whole"), "data.batch_size=4", f"train.parallel={parallel}")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
