"""One process or two: what is gathered, summed, done once; and which device is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from two_processes import as_only_rank, in_two_processes
from vitruvius._errors import ConfigError, RunError
from vitruvius._processes import Process, _backend_for, choose_device, process_group


def test_alone_everything_is_immediate() -> None:
    with process_group("cpu") as process:
        assert process == Process(device=torch.device("cpu"))
        assert process.first
        assert process.gather("x") == ["x"]
        assert process.on_first(lambda: 3) == 3
        numbers = torch.tensor([1.0, 2.0])
        total = process.total(numbers)
        assert torch.equal(total, numbers)
        assert total is not numbers
        with pytest.raises(RunError, match="no"):
            process.on_first(_fail)
    assert not torch.distributed.is_initialized()


def _fail() -> None:
    raise RunError("no place")


def _talk(rank: int, folder: str) -> None:
    with process_group("cpu") as process:
        assert (process.rank, process.world_size, process.first) == (rank, 2, rank == 0)
        assert process.gather(rank) == [0, 1]
        assert torch.equal(process.total(torch.tensor([rank + 1.0])), torch.tensor([3.0]))
        with process_group("cpu") as inside:  # a group that exists is used
            assert inside == process
        assert process.on_first(lambda: _note(folder, rank)) == 0
        with pytest.raises(RunError, match="no place"):  # on both, though only the first has tried
            process.on_first(_fail)
    assert not torch.distributed.is_initialized()


def _note(folder: str, rank: int) -> int:
    (Path(folder) / f"{rank}").touch()
    return rank


def test_two_talk_and_share_one_failure(tmp_path: Path) -> None:
    in_two_processes(_talk, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_device_is_found_or_named_or_refused() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda", "mps", "xpu")
    for wanted in ("quantum", "xpu:99"):
        with pytest.raises(
            ConfigError, match=rf"device '{wanted}' cannot be used here: .* Use device=auto or device=cpu"
        ):
            choose_device(wanted)


def _meet_often(rank: int) -> None:
    for number in range(20):
        with process_group("cpu") as process:
            assert process.gather((rank, number)) == [(0, number), (1, number)]
        assert not torch.distributed.is_initialized()


def test_two_processes_meet_again_after_their_group_has_ended() -> None:
    """A second store at the first one's address could be taken for it; then one of two waited for ever."""
    in_two_processes(_meet_often)


def _only_rank(rank: int) -> None:
    with process_group("cpu") as process:
        assert process == Process(device=torch.device("cpu"), grouped=True)
        assert dist.get_world_size() == 1
        assert process.gather("x") == ["x"]
        assert process.broadcast("y") == "y"
        assert process.any(True)
        assert torch.equal(process.total(torch.tensor([2.0])), torch.tensor([2.0]))
    assert not dist.is_initialized()


def test_one_rank_under_torchrun_is_a_group_too() -> None:
    """What is tried with one rank is what many run: NCCL refuses two on the one GPU that most people try with."""
    as_only_rank(_only_rank)


def test_ranks_that_share_a_device_talk_by_gloo(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert _backend_for(torch.device("cuda")) == "nccl"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert _backend_for(torch.device("cpu")) == "gloo"
    assert not caplog.records
    assert _backend_for(torch.device("cuda")) == "gloo"
    assert "2 processes share 1 cuda device(s)" in caplog.text


def test_a_device_without_a_number_is_each_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device("cuda", rank).index for rank in (0, 1, 2)] == [0, 1, 0]
    assert choose_device("cuda:0", 1).index == 0
