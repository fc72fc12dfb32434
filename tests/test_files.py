"""Files are whole or absent, and every failure is one clear error."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import fsspec
import pytest
import torch

from vitruvius import _files
from vitruvius._errors import CheckpointError, MissingExtra, RunError


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def half_a_write(handle: int, data: bytes) -> int:
    """A disk that takes a few bytes, then no more."""
    if os.fstat(handle).st_size > 0:
        return full_disk()
    with os.fdopen(os.dup(handle), "wb") as file:
        return file.write(bytes(data)[:3])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_bytes_and_text_come_back_as_written(tmp_path):
    _files.atomic_write_bytes(tmp_path / "new" / "a.bin", b"\x00\r\n\xff")
    _files.atomic_write_text(str(tmp_path / "b.txt"), "größer\n")
    assert _files.read_bytes(tmp_path / "new" / "a.bin") == b"\x00\r\n\xff"
    assert _files.read_text(tmp_path / "b.txt") == "größer\n"
    assert names(tmp_path) == ["b.txt", "new"]


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_previous_file_and_nothing_else(tmp_path, monkeypatch, broken):
    path = tmp_path / "last.safetensors"
    _files.atomic_write_bytes(path, b"before")
    monkeypatch.setattr(os, broken, full_disk)
    with pytest.raises(RunError, match=r"cannot write .*last\.safetensors: the disk is full\. .* intact"):
        _files.atomic_write_bytes(path, b"after")
    monkeypatch.undo()
    assert path.read_bytes() == b"before"
    assert names(tmp_path) == ["last.safetensors"]


def test_a_disk_that_fills_up_half_way_leaves_the_previous_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a"
    _files.atomic_write_bytes(path, b"before")
    monkeypatch.setattr(os, "write", half_a_write)
    with pytest.raises(RunError, match="disk is full"):
        _files.atomic_write_bytes(path, b"something longer")
    monkeypatch.undo()
    assert path.read_bytes() == b"before"
    assert names(tmp_path) == ["a"]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, bytes(data)[:2]))
    _files.atomic_write_bytes(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_lines_are_appended_whole(tmp_path):
    for i in range(3):
        _files.append_line(tmp_path / "metrics.jsonl", json.dumps({"step": i}))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 0}, {"step": 1}, {"step": 2}]


@pytest.mark.parametrize("write", [full_disk, half_a_write])
def test_a_line_that_does_not_fit_is_taken_back(tmp_path, monkeypatch, write):
    path = tmp_path / "metrics.jsonl"
    path.touch()
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(RunError, match=r"cannot append to .*disk is full"):
        _files.append_line(path, "second")
    monkeypatch.undo()
    assert path.read_text() == ""


def test_tensors_of_every_kind_come_back_with_their_metadata(tmp_path):
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    tensors = {
        "transposed": weight.T,
        "tied": weight,
        "tied_again": weight,
        "row": weight[1],
        "half": weight.bfloat16(),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 2),
        "mask": weight > 0,
    }
    _files.save_tensors(tmp_path / "a.safetensors", tensors, {"epoch": "3"})
    loaded, metadata = _files.load_tensors(tmp_path / "a.safetensors")
    assert metadata == {"epoch": "3"}
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def test_equal_weights_have_equal_bytes(tmp_path):
    """Whatever the order of their names and of the metadata, which safetensors shuffles."""
    tensors = {"b": torch.arange(3), "a": torch.ones(2, 2), "c": torch.zeros(1, dtype=torch.bfloat16)}
    metadata = {f"key{number}": "ü" * number for number in range(9)}
    first = _files.pack_tensors(tensors, metadata)
    again = _files.pack_tensors(dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert first == again
    with (tmp_path / "a").open("wb") as file:
        file.write(first)
    from safetensors import safe_open

    with safe_open(tmp_path / "a", "pt") as file:
        assert file.metadata().items() >= metadata.items()
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_one_number_out_of_a_wider_table_is_written_as_any_other(tmp_path):
    column = torch.arange(12).view(1, 12)[:, 3]  # its stride is 12, though it is contiguous for PyTorch
    _files.save_tensors(tmp_path / "a.safetensors", {"a": column})
    assert _files.load_tensors(tmp_path / "a.safetensors")[0]["a"].tolist() == [3]


def test_the_file_is_ordinary_safetensors_for_others(tmp_path):
    from safetensors.torch import load_file, save_file

    _files.save_tensors(tmp_path / "ours.safetensors", {"a": torch.arange(3)})
    assert torch.equal(load_file(tmp_path / "ours.safetensors")["a"], torch.arange(3))
    save_file({"b": torch.arange(2)}, tmp_path / "theirs.safetensors")
    tensors, metadata = _files.load_tensors(tmp_path / "theirs.safetensors")
    assert torch.equal(tensors["b"], torch.arange(2))
    assert metadata == {}


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_truncated_file_is_recognised(tmp_path, kept):
    path = tmp_path / "a.safetensors"
    _files.save_tensors(path, {"a": torch.arange(100)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"a\.safetensors is not a whole safetensors file .*earlier checkpoint"):
        _files.load_tensors(path)


def test_one_flipped_bit_is_recognised(tmp_path):
    path = tmp_path / "a.safetensors"
    _files.save_tensors(path, {"a": torch.arange(100)})
    whole = path.read_bytes()
    data = bytearray(whole)
    data[-17] ^= 4
    for damaged in (data, whole.replace(b'"a"', b'"b"'), whole.replace(b'"I64"', b'"F64"')):  # another name or type
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="tensors do not match its checksum"):
            _files.load_tensors(path)


def test_a_pickled_checkpoint_is_named_as_such(tmp_path):
    torch.save({"a": torch.arange(2)}, tmp_path / "old.pth")
    with pytest.raises(CheckpointError, match="pickled PyTorch file"):
        _files.load_tensors(tmp_path / "old.pth")


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere\.safetensors: there is no such file"):
        _files.load_tensors(tmp_path / "nowhere.safetensors")


def test_a_writable_folder_is_made_and_left_clean(tmp_path):
    assert _files.ensure_writable(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert names(tmp_path / "a" / "b") == []


def test_a_file_in_the_way_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("I am a file")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunError, match="is a file, not a folder"):
            _files.ensure_writable(path)
    with pytest.raises(RunError, match="is a file, not a folder"):
        _files.atomic_write_text(tmp_path / "file" / "below", "x")
    assert (tmp_path / "file").read_text() == "I am a file"


def test_a_folder_without_permission_is_an_error(tmp_path, monkeypatch):
    def forbidden(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(RunError, match="no permission"):
        _files.ensure_writable(tmp_path)
    with pytest.raises(RunError, match="no permission"):
        _files.append_line(tmp_path / "a", "x")


def test_a_full_disk_is_noticed_before_a_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(RunError, match="disk is full"):
        _files.ensure_writable(tmp_path)
    assert names(tmp_path) == []


def test_what_a_killed_process_left_is_swept(tmp_path):
    (tmp_path / ".last.safetensors.123.tmp").write_bytes(b"half")
    (tmp_path / "last.safetensors").write_bytes(b"whole")
    _files.sweep(tmp_path)
    assert names(tmp_path) == ["last.safetensors"]


def test_urls_are_read_and_written_through_fsspec():
    folder = _files.join("memory://runs-of-test-files/", "one")
    try:
        assert not _files.exists(_files.join(folder, "a"))
        _files.atomic_write_text(_files.join(folder, "a"), "one")
        _files.atomic_write_text(_files.join(folder, "a"), "two")
        _files.save_tensors(_files.join(folder, "c"), {"x": torch.arange(3)}, {"epoch": "1"})
        assert _files.exists(_files.join(folder, "a"))
        assert _files.read_text(_files.join(folder, "a")) == "two"
        tensors, metadata = _files.load_tensors(_files.join(folder, "c"))
        assert torch.equal(tensors["x"], torch.arange(3))
        assert metadata == {"epoch": "1"}
        with pytest.raises(CheckpointError, match="no such file"):
            _files.load_tensors(_files.join(folder, "nothing"))
    finally:
        fsspec.filesystem("memory").rm("/runs-of-test-files", recursive=True)


def test_an_unknown_scheme_is_an_error():
    with pytest.raises(RunError, match=r"cannot open nothing://a"):
        _files.read_bytes("nothing://a")


def test_a_missing_cloud_package_is_one_line(monkeypatch):
    def absent(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", absent)
    with pytest.raises(MissingExtra, match=r"s3:// paths is not installed; run: pip install .*\[cloud\]'"):
        _files.exists("s3://bucket/a")
