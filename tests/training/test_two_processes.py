"""Two processes train as one with their batches put together."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from small_run import Stop, assert_same_run, rows_of, small_config, small_run, state_of, stop_at
from two_processes import as_only_rank, in_two_processes
from vitruvius._errors import RunError
from vitruvius._files import load_tensors
from vitruvius._processes import process_group
from vitruvius.evaluation import evaluate
from vitruvius.models import load_model
from vitruvius.tasks.supervised import Supervised
from vitruvius.training import train
from vitruvius.training.loop import Trainer
from vitruvius.training.parallel import PlainSync
from vitruvius.training.session import open_session

SETTINGS = ("train.opt=sgd", "train.lr=0.05", "train.model_ema=true", "train.clip_grad=1.0", "data.pad=1")


def _train(rank: int, out: str, *overrides: str) -> None:
    train(small_config(Path(out), "data.batch_size=4", *SETTINGS, *overrides), quiet=True)


def assert_close_runs(run: Path, other: Path) -> None:
    """Rows, weights and their average to 1e-6."""
    for ours, theirs in zip(rows_of(run), rows_of(other), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    assert_close_weights(run, other)


def assert_close_weights(run: Path, other: Path, tolerance: float = 1e-6) -> None:
    """The weights of the last epoch, and their average."""
    for name in ("last.safetensors", "last_ema.safetensors"):
        ours, theirs = load_tensors(run / name)[0], load_tensors(other / name)[0]
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_reproduce_one_with_the_same_global_batch(accumulate: int, tmp_path: Path) -> None:
    more = f"train.grad_accum_steps={accumulate}"
    one = small_run(tmp_path / "one", *SETTINGS, more)
    in_two_processes(_train, str(tmp_path / "two"), more)
    two = tmp_path / "two"
    for ours, theirs in zip(rows_of(two), rows_of(one), strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
        assert ours["train_accuracy"] == pytest.approx(theirs["train_accuracy"])
        assert ours["val_accuracy"] == theirs["val_accuracy"]  # every held-out image once
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-4)
    assert state_of(two)["processes"] == 2
    assert_close_weights(two, one, 1e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_rank_under_torchrun_trains_as_one_process(parallel: str, tmp_path: Path) -> None:
    """Through the group, DDP or FSDP2 and their files, as many ranks do."""
    alone = small_run(tmp_path / "alone", "data.batch_size=4", *SETTINGS)
    as_only_rank(_train, str(tmp_path / parallel), f"train.parallel={parallel}")
    assert_close_weights(tmp_path / parallel, alone)


@pytest.mark.parametrize("task", ["supervised", "{use: adversarial, eps: 0.05, attack: {use: pgd, steps: 2}}"])
def test_shared_out_weights_train_as_whole_ones(task: str, tmp_path: Path) -> None:
    settings = (f"task={task}", "model.kwargs={depth: 2, embed_dim: 24}", "train.alarm_images=6")
    in_two_processes(_train, str(tmp_path / "ddp"), *settings)
    in_two_processes(_train, str(tmp_path / "fsdp"), *settings, "train.parallel=fsdp")
    whole, shared = tmp_path / "ddp", tmp_path / "fsdp"
    for ours, theirs in zip(rows_of(shared), rows_of(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert_close_weights(shared, whole, 1e-5)
    assert load_model(shared, best=False)(torch.rand(1, 3, 8, 8)).shape == (1, 10)


def _stopped(rank: int, out: str, *overrides: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, Trainer, "train_batch", 7)
        with pytest.raises(Stop):
            _train(rank, out, *overrides)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_resume_in_the_middle_of_an_epoch(parallel: str, tmp_path: Path) -> None:
    settings = (f"train.parallel={parallel}", "train.save_every=3", "train.opt=adamw", "train.lr=1e-3")
    in_two_processes(_train, str(tmp_path / "whole"), *settings)
    in_two_processes(_stopped, str(tmp_path / "run"), *settings)
    assert state_of(tmp_path / "run")["updates"] == 6
    in_two_processes(_train, str(tmp_path / "run"), *settings)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


CONVOLUTIONS = (  # a small ResNet with batch norms
    "model.name=test_resnet",
    "model.kwargs={}",
    "data.image_size=16",
    "train.epochs=1",
    "train.holdout=0.5",
)


def _train_and_judge_the_file(rank: int, out: str, *overrides: str) -> None:
    settings = (*CONVOLUTIONS, *overrides)
    _train(rank, out, *settings)
    with process_group("cpu") as process:
        session = open_session(small_config(Path(out), "data.batch_size=4", *SETTINGS, *settings), process)
        report = evaluate(load_model(out, best=False), session.val_loader, process=process)
        torch.save((report["clean"].accuracy, report["clean"].loss), f"{out}/judged_{rank}.pt")


def logged_and_judged(folder: Path, *overrides: str) -> list[tuple[float, float]]:
    """Accuracy and loss: as logged, and of the saved file on both processes."""
    in_two_processes(_train_and_judge_the_file, str(folder), *overrides)
    row = rows_of(folder)[-1]
    judged = [torch.load(folder / f"judged_{rank}.pt") for rank in (0, 1)]
    return [(row["val_accuracy"], row["val_loss"]), *judged]


@pytest.mark.parametrize("how", ["train.parallel=ddp", "train.parallel=fsdp", "train.dist_bn=broadcast"])
def test_what_is_logged_of_batch_norms_is_what_is_saved(how: str, tmp_path: Path) -> None:
    logged, *judged = logged_and_judged(tmp_path / "run", how)
    assert judged == [logged, logged]


def test_batch_norms_that_are_left_alone_are_logged_as_none_was_saved(tmp_path: Path) -> None:
    logged, *judged = logged_and_judged(tmp_path / "run", "train.dist_bn=none")
    assert logged not in judged


def test_statistics_are_the_mean_over_the_processes(tmp_path: Path) -> None:
    settings = (*CONVOLUTIONS, "train.lr=1e-12", "train.min_lr=0", "data.pad=0")
    in_two_processes(_train, str(tmp_path / "run"), *settings)
    halves = state_of(tmp_path / "run")["statistics"]
    assert len(halves) == 2
    for one, other in zip(halves[0]["model"], halves[1]["model"], strict=True):
        assert torch.equal(one, other)


def _compiled_batch_norm(rank: int) -> None:
    with process_group("cpu"):
        norm, x = PlainSync(3).double(), torch.randn(4, 3, 5, 5, dtype=torch.double, requires_grad=True)
        toward = torch.randn_like(x)
        plain, compiled = (
            torch.autograd.grad((run(x) * toward).sum(), [x, norm.weight])
            for run in (norm, torch.compile(norm, backend="aot_eager"))
        )
        torch.testing.assert_close(compiled, plain)


def test_synchronised_batch_norms_have_the_same_gradient_compiled() -> None:
    in_two_processes(_compiled_batch_norm)


GENTLE = "train.lr=0.001"  # at which rounding does not grow from update to update


def test_synchronised_batch_norms_train_as_one_process_does(tmp_path: Path) -> None:
    one = small_run(tmp_path / "one", *SETTINGS, *CONVOLUTIONS, GENTLE)
    in_two_processes(_train, str(tmp_path / "two"), *CONVOLUTIONS, GENTLE, "train.sync_bn=true")
    assert_close_runs(tmp_path / "two", one)


def test_cait_trains_in_two_processes_as_in_one(tmp_path: Path) -> None:
    """Rewired and under plain DDP; its mixing of heads once got no gradient for a bias."""
    settings = (
        "model.name=cait_xxs24_224",
        "model.kwargs={img_size: 16, patch_size: 4, embed_dim: 24, depth: 2, depth_token_only: 1, num_heads: 2}",
        "attention=[{parts: [softmax]}]",
        "data.image_size=16",
        "train.epochs=1",
        GENTLE,
    )
    one = small_run(tmp_path / "one", *SETTINGS, *settings)
    in_two_processes(_train, str(tmp_path / "two"), *settings)
    assert_close_runs(tmp_path / "two", one)


def test_batch_norms_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    settings = (
        *CONVOLUTIONS,
        "train.epochs=3",
        "train.save_every=3",
        "data.train_num_samples=64",
        "train.alarm_images=6",
    )
    task = "task={use: adversarial, eps: 0.05, attack: {use: pgd, steps: 1}}"
    in_two_processes(_train, str(tmp_path / "whole"), *settings, task)
    in_two_processes(_stopped, str(tmp_path / "run"), *settings, task)
    assert state_of(tmp_path / "run")["updates"] == 6
    in_two_processes(_train, str(tmp_path / "run"), *settings, task)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    "task", ["{use: adversarial, eps: 0.05, attack: {use: pgd, steps: 2}}", "{use: fast, eps: 0.05, align: 0.2}"]
)
def test_adversarial_training_does_not_depend_on_the_number_of_processes(task: str, tmp_path: Path) -> None:
    settings = (f"task={task}", "train.alarm=none", "train.select=clean", GENTLE)
    one = small_run(tmp_path / "one", *SETTINGS, *settings)
    in_two_processes(_train, str(tmp_path / "two"), *settings)
    assert_close_runs(tmp_path / "two", one)


def test_weights_that_no_core_looks_at_do_not_stop_two_processes(tmp_path: Path) -> None:
    idle = ("model.kwargs={depth: 1, embed_dim: 24, qk_norm: true}", "attention=[{parts: [rpc]}]", "train.epochs=1")
    in_two_processes(_train, str(tmp_path / "run"), *idle)
    assert len(rows_of(tmp_path / "run")) == 1


def _let_go(rank: int, out: str) -> None:
    gone: list[str] = []
    with process_group("cpu") as process:
        task = open_session(small_config(Path(out)), process).task
        ddp: Any = next(m for m in task.modules() if isinstance(m, nn.parallel.DistributedDataParallel))
        weakref.finalize(ddp.process_group, gone.append, "group")
        weakref.finalize(ddp.reducer, gone.append, "reducer")
    del task, ddp
    gc.collect()
    assert gone == ["reducer", "group"]  # the other way round, torch 2.11 may wait for ever


def test_the_group_outlives_what_waits_for_it(tmp_path: Path) -> None:
    in_two_processes(_let_go, str(tmp_path))


def _refused(rank: int, out: str) -> None:
    with pytest.raises(RunError, match="holds a run of another recipe: seed was 0, now 1"):
        _train(rank, out, "train.epochs=1", "seed=1")


def test_an_error_of_the_first_process_ends_both(tmp_path: Path) -> None:
    in_two_processes(_train, str(tmp_path / "run"), "train.epochs=1")
    in_two_processes(_refused, str(tmp_path / "run"))


def _drawn(rank: int, out: str) -> None:
    numbers: list[float] = []
    forward = Supervised.forward

    def noting(self: Supervised, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        numbers.append(float(torch.rand(())))
        return forward(self, x, y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Supervised, "forward", noting)
        _train(rank, out, "train.epochs=1")
    torch.save(numbers, f"{out}/drawn_{rank}.pt")


def test_every_process_draws_random_numbers_of_its_own(tmp_path: Path) -> None:
    in_two_processes(_drawn, str(tmp_path / "run"))
    one, other = (torch.load(tmp_path / "run" / f"drawn_{rank}.pt") for rank in (0, 1))
    assert len(one) == len(other) > 0
    assert not set(one) & set(other)


def _mixed(rank: int, out: str) -> None:
    with process_group("cpu") as process:
        mixer = open_session(small_config(Path(out), "data.mixup=0.5"), process).mixer
    assert mixer is not None
    images = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.save(mixer(images, torch.arange(8), epoch=1, step=2)[0], f"{out}/mixed_{rank}.pt")


def test_every_process_mixes_its_images_in_its_own_way(tmp_path: Path) -> None:
    in_two_processes(_mixed, str(tmp_path))
    one, other = (torch.load(tmp_path / f"mixed_{rank}.pt") for rank in (0, 1))
    assert not torch.equal(one, other)
