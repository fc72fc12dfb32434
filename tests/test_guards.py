"""The guards, each with the quickest test that fails when it is gone; `make mutants` breaks them one by one."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from vitruvius._errors import CheckpointError, RunError
from vitruvius._files import append_line, atomic_write_text, read_text, save_tensors
from vitruvius._files.paths import make_folder
from vitruvius.cli import main
from vitruvius.converters.base import read_checkpoint
from vitruvius.evaluation.metrics.calibration import EqualWidth
from vitruvius.models import create_model
from vitruvius.models.weights import load_weights
from vitruvius.training.run_folder import Run, add_checksum, verify_checksum

SECRET = "https://me:planted-1@host/data?token=planted-2"


class Intruder:
    """Pickled, it makes a folder when it is unpickled with code allowed."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.mkdir, (self.mark,)


def hostile(tmp_path: Path) -> tuple[bytes, Path]:
    """A file that torch.load would run, and the mark that it would leave."""
    buffer = io.BytesIO()
    torch.save({"state_dict": {"a": torch.zeros(1)}, "more": Intruder(tmp_path / "ran")}, buffer)
    return buffer.getvalue(), tmp_path / "ran"


def test_the_hostile_file_is_hostile(tmp_path: Path) -> None:
    data, mark = hostile(tmp_path)
    torch.load(io.BytesIO(data), weights_only=False)
    assert mark.is_dir()


def test_weights_are_read_without_running_code(tmp_path: Path) -> None:
    data, mark = hostile(tmp_path)
    (tmp_path / "weights.pth").write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        load_weights(create_model("vitruvius/vit_digits", depth=1), tmp_path / "weights.pth")
    assert not mark.exists()


def test_checkpoints_are_converted_without_running_code(tmp_path: Path) -> None:
    data, mark = hostile(tmp_path)
    (tmp_path / "old.pth").write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot be read without running code"):
        read_checkpoint(str(tmp_path / "old.pth"))
    assert not mark.exists()


def test_states_are_read_without_running_code(tmp_path: Path) -> None:
    sealed = add_checksum({"updates": 1, "more": Intruder(tmp_path / "ran")})
    with pytest.raises(pickle.UnpicklingError):
        verify_checksum(sealed)
    assert not (tmp_path / "ran").exists()


def test_a_state_with_another_bit_does_not_match_its_checksum() -> None:
    data = bytearray(add_checksum({"updates": 1, "weights": torch.arange(1000.0)}))
    data[len(data) // 2] ^= 1
    with pytest.raises(ValueError, match="does not match its checksum"):
        verify_checksum(bytes(data))


def test_a_damaged_state_is_answered_by_the_one_before(tmp_path: Path) -> None:
    Run(tmp_path).save_state({"updates": 1})
    Run(tmp_path).save_state({"updates": 2})
    assert Run(tmp_path).load_state() == {"updates": 2}
    (tmp_path / "state.pt").write_bytes(b"cut off")
    assert Run(tmp_path).load_state() == {"updates": 1}
    Run(tmp_path).save_state({"updates": 3})
    (tmp_path / "state.pt").write_bytes(b"cut off")
    (tmp_path / "state.previous.pt").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match=r"state\.pt is damaged.*state\.previous\.pt is damaged"):
        Run(tmp_path).load_state()


def test_folders_are_made_where_there_are_folders_and_never_a_bucket() -> None:
    class Store:
        protocol = ("s3", "s3a")

        def makedirs(self, *_: object, **__: object) -> None:
            raise AssertionError("a bucket was made")

    make_folder(Store(), "bucket/run")
    memory = fsspec.filesystem("memory")
    make_folder(memory, "/guards/run")
    assert memory.isdir("/guards/run")
    memory.rm("/guards", recursive=True)


def test_every_writer_hides_secrets(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "text", SECRET)
    append_line(tmp_path / "lines", SECRET)
    save_tensors(tmp_path / "tensors", {"a": torch.zeros(1)}, {"origin": SECRET})
    for name in ("text", "lines", "tensors"):
        assert b"planted" not in (tmp_path / name).read_bytes()
    assert read_text(tmp_path / "text") == "https://***@host/data?token=***"


@pytest.mark.parametrize("error", [None, RunError(f"cannot read {SECRET}")], ids=["answer", "error"])
def test_the_command_line_hides_secrets(
    error: Exception | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        sys.stdout.write(SECRET)
        if error is not None:
            raise error

    monkeypatch.setattr("vitruvius.cli.about.list_pieces", run)
    main(["list"])
    out, err = capsys.readouterr()
    assert "***" in out
    assert "planted" not in out + err


def test_confidences_fall_into_the_bins_that_are_closed_above() -> None:
    """By hand: ten bins, and a confidence on each edge belongs to the bin below it."""
    confidence = torch.tensor([0.05, 0.1, 0.11, 0.2, 0.55, 0.95, 1.0], dtype=torch.float64)
    correct = torch.tensor([1.0, 0, 1, 1, 0, 1, 1])
    bins = EqualWidth(number=10)(confidence, correct)
    torch.testing.assert_close(bins.low, torch.tensor([0.0, 0.1, 0.5, 0.9], dtype=torch.float64))
    torch.testing.assert_close(bins.high, torch.tensor([0.1, 0.2, 0.6, 1.0], dtype=torch.float64))
    assert bins.count.tolist() == [2, 2, 1, 2]
    torch.testing.assert_close(bins.accuracy, torch.tensor([0.5, 1, 0, 1], dtype=torch.float64))
    torch.testing.assert_close(bins.confidence, torch.tensor([0.075, 0.155, 0.55, 0.975], dtype=torch.float64))
