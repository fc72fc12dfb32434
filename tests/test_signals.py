"""Signals are answered within five seconds, whatever the command is doing, and the answer names what was kept."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from small_run import SMALL, small_run, state_of
from vitruvius import _signals
from vitruvius._files import load_tensors
from vitruvius._signals import (
    FINISHED,
    GRACE,
    LONGEST,
    Terminated,
    exit_message,
    handle_signals,
    on_interrupt,
    saving,
    set_grace_period,
)

SECONDS = 5.0
STUCK = """\
import ctypes
from pathlib import Path

from vitruvius.tasks import tasks
from vitruvius.tasks.supervised import Supervised

seen = 0


@tasks.register("stuck")
class Stuck(Supervised):
    \"\"\"Like a compiler: native code that returns when it is done and not before, signal or no signal.\"\"\"

    def forward(self, input, target):
        global seen
        seen += 1
        if seen == AT:
            Path("reached").touch()
            libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            for _ in range(2):  # nobody unlocks it
                libc.pthread_mutex_lock(lock)
        return super().forward(input, target)
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The command line in a process of its own, which hears Ctrl-C even where these tests run in the background."""
    heard = "import signal, runpy; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        heard + "runpy.run_module('vitruvius', run_name='__main__')",
        *words,
    ]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def interrupt(child: subprocess.Popen[str], number: int, when: Callable[[], bool]) -> tuple[float, str]:
    """Seconds from the signal to the end, and what was said; the signal comes when something has happened."""
    begun = time.monotonic()
    while not when():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() - begun < 120
        time.sleep(0.02)
    sent = time.monotonic()
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    return time.monotonic() - sent, said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_during_autoattack_ends_it_and_what_was_judged_is_kept(number: int, code: int, tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    words = ["evaluate", "run", "--threat", "autoattack:eps=8/255", "data.val_num_samples=24"]
    child = start(tmp_path, *words)
    parts = tmp_path / "run" / "evaluation" / "parts"
    seconds, said = interrupt(child, number, lambda: any(parts.glob("clean*.safetensors")))
    assert child.returncode == code, said
    assert seconds < SECONDS
    assert "run/evaluation keeps what was done so far; the same command resumes from there." in said
    rows, about = load_tensors(next(parts.glob("clean*.safetensors")))
    assert about["threat"] == "clean"
    assert len(rows["id"]) > 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_while_native_code_blocks_ends_the_run_and_its_last_state_is_whole(
    number: int, code: int, tmp_path: Path
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK.replace("AT", "6"))
    settings = [*SMALL, "plugins=[stuck]", "task={use: stuck}", "train.save_every=2", "out=run"]
    child = start(tmp_path, "train", "digits/softmax", *settings)
    seconds, said = interrupt(child, number, (tmp_path / "reached").exists)
    assert child.returncode == code, said
    assert seconds < SECONDS
    assert "run keeps the state of update 4; the same command resumes from there." in said
    assert state_of(tmp_path / "run")["updates"] == 4


def test_a_false_start_leaves_no_folder_and_says_that_nothing_was_saved(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK.replace("AT", "1"))
    settings = [*SMALL, "plugins=[stuck]", "task={use: stuck}", "out=run"]
    child = start(tmp_path, "train", "digits/softmax", *settings)
    seconds, said = interrupt(child, signal.SIGTERM, (tmp_path / "reached").exists)
    assert child.returncode == 75, said
    assert seconds < SECONDS
    assert "SIGTERM: nothing was saved yet; the same command starts again." in said
    assert not (tmp_path / "run").exists()


def test_nobody_is_hurried_while_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    over = threading.Event()

    def end(number: int) -> None:
        ended.append(number)
        over.set()

    monkeypatch.setattr(_signals, "_end", end)
    monkeypatch.setattr(_signals._work, "grace", 0.1)
    thread = threading.Thread(target=_signals._wait_for_end, args=(signal.SIGTERM, over))
    with saving():
        thread.start()
        time.sleep(0.3)
        assert not ended
    thread.join(5)
    assert ended == [signal.SIGTERM]


def test_a_signal_waits_for_work_that_takes_longer_but_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_signals._work, "grace", GRACE)
    for asked, given in ((0.1, GRACE), (20.0, 20.0), (600.0, LONGEST)):
        set_grace_period(asked)
        assert _signals._work.grace == given


def send_itself(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(2)


def test_sigterm_is_raised_where_the_work_stands_and_the_words_travel_with_it() -> None:
    for number, code in ((signal.SIGTERM, 75), (signal.SIGUSR2, 85)):
        before = signal.getsignal(number)
        with pytest.raises(Terminated) as caught, handle_signals(), on_interrupt(lambda: "all is kept."):
            send_itself(number)
        assert exit_message(caught.value) == (f"{number.name}: all is kept.", code)
        assert signal.getsignal(number) is before
    assert exit_message(KeyboardInterrupt()) == (f"interrupted; {FINISHED}", 130)
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_signal_to_a_forked_process_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    monkeypatch.setattr(_signals, "_wait_for_end", lambda number, over: heard.append(number))
    with handle_signals():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join()
    assert child.exitcode == -signal.SIGTERM
    assert heard == []


def _interrupt_beside(child: BaseProcess) -> None:
    with handle_signals():
        child.start()
        send_itself(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_that_lives_on_does_not_keep_the_command_from_ending() -> None:
    """Loaders of images fork workers, which outlive an interrupt as long as its traceback holds the loader."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
    begun = time.monotonic()
    try:
        with pytest.raises(Terminated):
            _interrupt_beside(child)
        assert time.monotonic() - begun < 10
    finally:
        child.kill()
        child.join()
