"""Folders have one owner: the second process is told, a dead one's lock is taken over. The processes here are real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from other_machines import Machine, require_names
from small_run import RECIPE, SMALL, small_run
from vitruvius._errors import RunError
from vitruvius._files import Lock, MadeFolder, _lock, _owners
from vitruvius.cli import main
from vitruvius.corrupted_copies import write_corrupted

needs_proc = pytest.mark.skipif(_owners.system() is None, reason="this system has no /proc to know processes by")


@pytest.fixture
def somebody() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"]) as process:
        yield process
        process.kill()


def lock_of(process: subprocess.Popen[bytes], **other: Any) -> dict[str, Any]:
    mine = _owners.myself()
    return {**mine, "pid": process.pid, "started": _owners.started(process.pid), "since": "noon", **other}


def leave_lock(folder: Path, note: dict[str, Any], name: str = ".lock") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(note))
    return folder / name


def test_a_lock_says_who_has_it_and_leaves_nothing(tmp_path: Path) -> None:
    with Lock(tmp_path / "a" / "b"):
        note = json.loads((tmp_path / "a" / "b" / ".lock").read_text())
        assert note["pid"] == os.getpid()
        assert {"host", "started", "since", "token"} <= set(note)
        with Lock(tmp_path / "a" / "b"):  # the same process
            pass
        assert (tmp_path / "a" / "b" / ".lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_stays(tmp_path: Path) -> None:
    with Lock(tmp_path / "new"):
        (tmp_path / "new" / "result").write_text("1")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result"]


def test_a_locked_folder_that_comes_to_nothing_goes_with_its_records(tmp_path: Path) -> None:
    with Lock(tmp_path / "made" / "out"):
        made = MadeFolder(tmp_path / "made" / "out")
        (tmp_path / "made" / "out" / "record").write_text("begun")
        made.take_back("record")
    assert list(tmp_path.iterdir()) == []


@needs_proc
def test_the_second_process_is_told_and_a_dead_ones_lock_is_taken_over(
    tmp_path: Path, somebody: subprocess.Popen[bytes]
) -> None:
    lock = leave_lock(tmp_path / "run", lock_of(somebody))
    with pytest.raises(RunError, match=rf"run is being written by process {somebody.pid} on .*since noon.*Wait for it"):
        Lock(tmp_path / "run").take()
    assert lock.exists()
    somebody.kill()
    somebody.wait()
    with Lock(tmp_path / "run"):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert not list((tmp_path / "run").iterdir())


@needs_proc
def test_a_number_that_another_process_has_got_since_is_not_the_owner(
    tmp_path: Path, somebody: subprocess.Popen[bytes]
) -> None:
    leave_lock(tmp_path / "run", lock_of(somebody, started="1"))
    with Lock(tmp_path / "run"):
        pass


def test_of_a_process_elsewhere_the_heartbeat_tells(
    tmp_path: Path, somebody: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other machine is simulated; the test after this one has a true one."""
    monkeypatch.setattr(_owners, "BEAT", 0.04)
    lock = leave_lock(tmp_path / "run", lock_of(somebody, host="far-away"))
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.02):
            os.utime(lock)

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        with pytest.raises(RunError, match="on far-away"):
            Lock(tmp_path / "run").take()
    finally:
        over.set()
        heart.join()
    with Lock(tmp_path / "run"):  # silent now
        assert json.loads(lock.read_text())["host"] != "far-away"


def test_a_process_on_a_machine_with_another_name_is_told_by_its_heart_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A true host name, in a UTS namespace of its own, and a true SIGKILL: its number is not looked up here."""
    require_names()
    monkeypatch.setattr(_owners, "BEAT", 0.2)
    other = Machine(tmp_path / "run", tmp_path / "other", name="far-away")
    try:
        other.takes_it()
        with pytest.raises(RunError, match=f"is being written by process {other.process.pid} on far-away"):
            Lock(tmp_path / "run").take()
    finally:
        other.dies()
    assert json.loads((tmp_path / "run" / ".lock").read_text())["host"] == "far-away"
    with Lock(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / ".lock").read_text())["pid"] == os.getpid()


def test_the_owner_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_owners, "BEAT", 0.02)
    with Lock(tmp_path):
        first = (tmp_path / ".lock").stat().st_mtime_ns
        end = time.monotonic() + 5
        while (tmp_path / ".lock").stat().st_mtime_ns == first:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_an_owner_that_was_thought_dead_does_not_go_on(tmp_path: Path, somebody: subprocess.Popen[bytes]) -> None:
    with Lock(tmp_path / "run") as lock:
        lock.check()
        leave_lock(tmp_path / "run", lock_of(somebody))
        with pytest.raises(RunError, match=f"was taken over by process {somebody.pid}"):
            lock.check()
    assert (tmp_path / "run" / ".lock").exists()  # the other's


def test_a_faster_process_keeps_the_lock_it_has_just_taken(tmp_path: Path, somebody: subprocess.Popen[bytes]) -> None:
    lock = leave_lock(tmp_path / "run", lock_of(somebody))
    _lock._take_away(lock, {"pid": "one that died before"})
    assert json.loads(lock.read_text())["pid"] == somebody.pid
    assert [path.name for path in lock.parent.iterdir()] == [".lock"]


# the verbs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "run")


@needs_proc
@pytest.mark.parametrize(
    ("words", "lock"),
    [
        (["train", str(RECIPE), *SMALL, "out={out}", "--quiet"], ".lock"),
        (["evaluate", "{run}", "--images", "4", "--out", "{out}"], ".lock"),
        (["evaluate", "{run}", "--images", "4", "--fresh", "--out", "{out}"], ".lock"),
        (["attack", "{run}", "--threat", "fgsm:eps=0.1", "--images", "4", "--out", "{out}"], ".lock"),
        (["attack", "{run}", "--threat", "fgsm:eps=0.1", "--images", "4", "--out", "{out}/a.safetensors"], "file"),
        (["analyse", "{run}", "norms", "--images", "4", "--out", "{out}"], ".lock"),
        (["study", "eps-sweep", "{run}", "steps=1", "--images", "4", "--out", "{out}"], ".lock"),
        (["corrupt", "digits", "--workers", "1", "--images", "4", "--out", "{out}"], ".lock"),
        (["compress", "{run}", "--out", "{out}"], ".lock"),
        (["maps", "{run}", "--images", "4", "--out", "{out}/a.safetensors"], "file"),
        (["report", "{run}", "--images", "0", "--out", "{out}/a.safetensors"], "file"),
        (["export", "{run}", "--format", "safetensors", "--out", "{out}/a.safetensors"], "file"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else words,
)  # fmt: skip
def test_every_verb_that_writes_a_folder_respects_its_owner(
    words: list[str],
    lock: str,
    run: Path,
    tmp_path: Path,
    somebody: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = ".a.safetensors.lock" if lock == "file" else lock
    leave_lock(tmp_path / "out", lock_of(somebody), name)
    spoken = [word.replace("{run}", str(run)).replace("{out}", str(tmp_path / "out")) for word in words]
    assert main(spoken) == 1
    assert f"is being written by process {somebody.pid}" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


KILLED = """
import os, signal, sys
from vitruvius._files import _local
from vitruvius.corrupted_copies import write_corrupted
_local.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # at the first file, before it has its name
write_corrupted("digits", out=sys.argv[1], names=["contrast"], images=3, workers=1)
"""


@needs_proc
def test_a_copy_killed_in_its_first_moments_is_taken_up_again(tmp_path: Path) -> None:
    """A true SIGKILL: nothing was cleaned up."""
    out = tmp_path / "out"
    assert subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False).returncode == -9
    left = sorted(path.name for path in out.iterdir())
    assert left[0].startswith(".corrupt.json.")
    assert left[1:] == [".lock"]
    write_corrupted("digits", out=out, names=["contrast"], images=3, workers=1)
    assert sorted(path.name for path in out.rglob("*")) == ["contrast.npy", "corrupt.json", "labels.npy"]


def test_a_lock_on_a_full_or_read_only_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated; the true ones are in test_real_faults.py."""

    def failing(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing)
        with pytest.raises(RunError, match="the disk is full"):
            Lock(tmp_path / "new").take()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_being_written_has_a_page_without_a_viewer(
    run: Path, tmp_path: Path, somebody: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    leave_lock(copy, lock_of(somebody))
    before = sorted(path.name for path in copy.iterdir())
    assert main(["report", str(copy), "--images", "2", "--out", str(tmp_path / "page.html")]) == 1
    assert f"is being written by process {somebody.pid}" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
    assert main(["report", str(copy), "--out", str(tmp_path / "page.html")]) == 0
    assert f"no attention viewer: {copy} is being written by process {somebody.pid}" in capsys.readouterr().err
    assert sorted(path.name for path in copy.iterdir()) == before
