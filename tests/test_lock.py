"""Folders have one writer: the second process is told, a dead one's lock is taken over. The processes here are real."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from small_run import RECIPE, SMALL, small_run
from vitruvius._errors import RunError
from vitruvius._files import Lock, discard
from vitruvius._files import lock as lock_module
from vitruvius.cli import main
from vitruvius.corrupted_copies import write_corrupted

pytest.importorskip("fcntl", reason="the other processes here lock as on POSIX")
HOLDER = """
import fcntl, json, os, socket, sys
file, host = sys.argv[1:]
os.makedirs(os.path.dirname(file), exist_ok=True)
with open(file, "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    json.dump({"pid": os.getpid(), "host": host or socket.gethostname(), "since": "noon", "token": "other"}, lock)
    lock.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""
TAKER = """
import sys
from vitruvius._files import Lock
Lock(sys.argv[1]).take()
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def somebody(file: Path, *, host: str = "", program: str = HOLDER, before: tuple[str, ...] = ()) -> Iterator[int]:
    """Another process that holds a lock; its number. It dies by SIGKILL."""
    command = [*before, sys.executable, *(["-S"] if program == HOLDER else []), "-c", program, str(file)]
    if program == HOLDER:
        command.append(host)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def note_of(folder: Path) -> dict[str, object]:
    note: dict[str, object] = json.loads((folder / ".lock").read_text())
    return note


def test_a_lock_says_who_has_it_and_leaves_nothing(tmp_path: Path) -> None:
    with Lock(tmp_path / "a" / "b"):
        note = note_of(tmp_path / "a" / "b")
        assert note["pid"] == os.getpid()
        assert {"host", "since", "token"} <= set(note)
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
        (tmp_path / "made" / "out" / "record").write_text("begun")
        discard(tmp_path / "made" / "out", "record")
    assert list(tmp_path.iterdir()) == []


def test_the_second_process_is_told_and_a_dead_ones_lock_is_taken_over(tmp_path: Path) -> None:
    with somebody(tmp_path / "run" / ".lock") as pid:
        with pytest.raises(RunError, match=rf"run is being written by process {pid} on .*since noon.*Wait for it"):
            Lock(tmp_path / "run").take()
        assert note_of(tmp_path / "run")["pid"] == pid
    with Lock(tmp_path / "run"):
        assert note_of(tmp_path / "run")["pid"] == os.getpid()
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("left", ["", "{", '{"pid": 1, "host": 3}'])
def test_a_lock_that_is_not_whole_is_taken_over(left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a machine leaves it that has lost its power."""
    monkeypatch.setattr(lock_module, "BEAT", 0.02)
    (tmp_path / ".lock").write_text(left)
    with Lock(tmp_path):
        assert note_of(tmp_path)["pid"] == os.getpid()


def test_of_many_processes_at_once_one_has_the_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, refused, answers = context.Barrier(6), context.Semaphore(0), context.Queue()

    def race() -> None:
        barrier.wait()
        try:
            with Lock(tmp_path / "run"):
                answers.put("has it")
                for _ in range(5):
                    refused.acquire(timeout=30)
        except RunError as error:
            answers.put(str(error))
            refused.release()

    processes = [context.Process(target=race) for _ in range(6)]
    for process in processes:
        process.start()
    told = sorted(answers.get(timeout=30) for _ in processes)
    for process in processes:
        process.join()
    assert told[-1].endswith("another place.") or told[-1] == "has it"
    assert told.count("has it") == 1
    assert [*tmp_path.rglob("*")] in ([], [tmp_path / "run"])  # who made the folder may have been refused meanwhile


def test_a_lock_that_somebody_is_just_making_is_waited_for(tmp_path: Path) -> None:
    """Else a process that starts at the same moment takes half a note for a dead owner's, and both give up."""
    file = tmp_path / "run" / ".lock"
    file.parent.mkdir()
    file.touch()
    threading.Timer(0.2, file.unlink).start()  # whoever made it has given up
    start = time.monotonic()
    with Lock(tmp_path / "run"):
        assert 0.2 <= time.monotonic() - start < 5


def test_the_workers_of_a_dead_process_do_not_keep_its_lock(tmp_path: Path) -> None:
    """A forked child outlives its parent for a while, as the workers of a loader do."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        Lock(tmp_path / "run").take()
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.write(writing, str(child).encode())
        time.sleep(60)
        os._exit(0)
    child = int(os.read(reading, 20))
    os.kill(parent, 9)
    os.waitpid(parent, 0)
    try:
        with Lock(tmp_path / "run"):
            assert note_of(tmp_path / "run")["pid"] == os.getpid()
    finally:
        os.kill(child, 9)


def test_of_a_process_elsewhere_the_heartbeat_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other machine is simulated, once with a file system that locks across machines and once without."""
    monkeypatch.setattr(lock_module, "BEAT", 0.15)
    lock, over = tmp_path / "run" / ".lock", threading.Event()

    def beat() -> None:
        while not over.wait(0.02):
            os.utime(lock)

    with somebody(lock, host="far-away"):
        heart = threading.Thread(target=beat)
        heart.start()
        try:
            with pytest.raises(RunError, match="on far-away"):
                Lock(tmp_path / "run").take()
        finally:
            over.set()
            heart.join()
        with Lock(tmp_path / "run"):  # silent now, though the file system keeps its lock
            assert note_of(tmp_path / "run")["pid"] == os.getpid()
    lock.write_text(json.dumps({"pid": 1, "host": "far-away"}))
    with Lock(tmp_path / "run"):
        assert note_of(tmp_path / "run")["pid"] == os.getpid()


def test_where_the_file_system_knows_no_locks_the_heartbeat_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: flock is refused."""

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock_module, "BEAT", 0.02)
    monkeypatch.setattr("fcntl.flock", refuse)
    with Lock(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "other")
    with Lock(tmp_path / "other"):  # nobody touches what is there
        pass
    with Lock(tmp_path / "run") as lock, monkeypatch.context() as patch:
        patch.setattr(lock_module, "_held", {})  # as another process sees it
        with pytest.raises(RunError, match="is being written by process"):
            Lock(tmp_path / "run").take()
        lock.check()


def test_a_process_on_a_machine_with_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A true host name, in a UTS namespace of its own, and a true SIGKILL."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--uts", "true"], check=False).returncode:
        pytest.skip("no other host name is allowed here")
    monkeypatch.setattr(lock_module, "BEAT", 0.2)
    far_away = ("unshare", "--uts", "sh", "-c", 'hostname far-away; exec "$@"', "sh")
    taker = f"from vitruvius._files import lock\nlock.BEAT = 0.2\n{TAKER}"
    with somebody(tmp_path / "run", program=taker, before=far_away):
        with pytest.raises(RunError, match=r"is being written by process \d+ on far-away"):
            Lock(tmp_path / "run").take()
        assert note_of(tmp_path / "run")["host"] == "far-away"
    with Lock(tmp_path / "run"):
        assert note_of(tmp_path / "run")["pid"] == os.getpid()


def test_the_owner_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "BEAT", 0.02)
    with Lock(tmp_path):
        first = (tmp_path / ".lock").stat().st_mtime_ns
        end = time.monotonic() + 5
        while (tmp_path / ".lock").stat().st_mtime_ns == first:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_an_owner_that_was_thought_dead_stops(tmp_path: Path) -> None:
    with Lock(tmp_path / "run") as lock:
        lock.check()
        (tmp_path / "run" / ".lock").write_text(json.dumps({"pid": 7, "host": "elsewhere", "token": "other"}))
        with pytest.raises(RunError, match="was taken over by process 7 on elsewhere"):
            lock.check()
    assert (tmp_path / "run" / ".lock").exists()  # the other's


# the verbs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "run")


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
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = ".a.safetensors.lock" if lock == "file" else lock
    words = [word.replace("{run}", str(run)).replace("{out}", str(tmp_path / "out")) for word in words]
    with somebody(tmp_path / "out" / name) as pid:
        assert main(words) == 1
        assert f"is being written by process {pid}" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


KILLED = """
import os, signal, sys
from vitruvius._files import paths
from vitruvius.corrupted_copies import write_corrupted
paths.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # at the first file, before it has its name
write_corrupted("digits", out=sys.argv[1], names=["contrast"], images=3, workers=1)
"""


def test_a_copy_killed_in_its_first_moments_is_taken_up_again(tmp_path: Path) -> None:
    """A true SIGKILL: nothing was cleaned up."""
    out = tmp_path / "out"
    assert subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False).returncode == -9
    left = sorted(path.name for path in out.iterdir())
    assert left[0].startswith(".corrupt.json.")
    assert left[1:] == [".lock"]
    write_corrupted("digits", out=out, names=["contrast"], images=3, workers=1)
    assert sorted(path.name for path in out.rglob("*")) == ["contrast.npy", "corrupt.json", "labels.npy"]


def test_a_lock_on_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated; the true ones are in test_real_faults.py."""

    def failing(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lock_module.json, "dump", failing)
        with pytest.raises(RunError, match="the disk is full"):
            Lock(tmp_path / "new").take()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_being_written_has_a_page_without_a_viewer(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    before = sorted(path.name for path in copy.iterdir())
    with somebody(copy / ".lock") as pid:
        assert main(["report", str(copy), "--images", "2", "--out", str(tmp_path / "page.html")]) == 1
        assert f"is being written by process {pid}" in capsys.readouterr().err
        assert not (tmp_path / "page.html").exists()
        assert main(["report", str(copy), "--out", str(tmp_path / "page.html")]) == 0
        assert f"no attention viewer: {copy} is being written by process {pid}" in capsys.readouterr().err
    assert sorted(path.name for path in copy.iterdir()) == [".lock", *before]
