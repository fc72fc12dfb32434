"""Ctrl-C and SIGTERM end a command within seconds, also while native code keeps Python waiting.

Python runs its signal handlers in the main thread, between two instructions. While one of them takes minutes (a
compiler, a collective operation, a large kernel), signals wait. `handle_signals` starts a thread that hears of a signal
at once; when the command has not ended a few seconds later, the thread says what was kept and ends the process. It
never does so while something is being saved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

GRACE = 3.0  # seconds between a signal and the end of a process that has not ended by itself
LONGEST = 60.0  # seconds that a signal waits for work which is worth saving
FINISHED = "files that were already finished stay."
TIME_OVER = 85  # exit code after SIGUSR2, by which Slurm says that the time is nearly over: put the job back
CODES = {  # exit codes: 75 is "try again later", for schedulers
    getattr(signal, name): code
    for name, code in (("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR1", 75), ("SIGUSR2", TIME_OVER))
    if hasattr(signal, name)
}
ENDING = [number for number in CODES if number != signal.SIGINT]  # Python answers Ctrl-C itself


class Terminated(KeyboardInterrupt):
    """SIGTERM or another of `ENDING` has reached a command that does not save by itself; raised wherever it stood."""


@dataclass
class _Work:
    """What the listening thread must know of the work in the main thread."""

    on_interrupt: list[tuple[Callable[[], str], Callable[[], object]]] = field(default_factory=list)
    saving: int = 0  # saves under way, one inside another
    grace: float = GRACE  # seconds
    socket: socket.socket | None = None  # where Python writes the numbers of signals


_work = _Work()


@contextlib.contextmanager
def on_interrupt(describe_kept: Callable[[], str], clean_up: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Inside, somebody who interrupts is told what was kept.

    describe_kept: asked at the end, in the thread that ends the process or where the interrupt was raised.
    clean_up: called before that, when the process is ended without unwinding; nothing by default.
    """
    _work.on_interrupt.append((describe_kept, clean_up))
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(describe_kept())
        raise
    finally:
        _work.on_interrupt.pop()
        _work.grace = GRACE


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Inside, no signal ends the process: what is being saved is saved whole."""
    _work.saving += 1
    try:
        yield
    finally:
        _work.saving -= 1


def set_grace_period(seconds: float) -> None:
    """How long a signal may wait for the work at hand, which is saved then; between GRACE and LONGEST."""
    _work.grace = min(max(seconds, GRACE), LONGEST)


def exit_message(error: KeyboardInterrupt) -> tuple[str, int]:
    """What to say of an interrupt, and the exit code."""
    kept = " ".join(getattr(error, "__notes__", [])) or FINISHED
    if isinstance(error, Terminated):
        return f"{error.args[0]}: {kept}", CODES[signal.Signals[error.args[0]]]
    return f"interrupted; {kept}", CODES[signal.SIGINT]


@contextlib.contextmanager
def handle_signals() -> Iterator[None]:
    """Inside, signals end the command in time; earlier handlers come back. Only the main thread can ask for this."""
    if threading.current_thread() is not threading.main_thread() or _work.socket is not None:
        yield
        return
    ours, pythons = socket.socketpair()
    pythons.setblocking(False)
    finished = threading.Event()
    thread = threading.Thread(target=_listen, args=(ours, finished), name="signals", daemon=True)
    untouched = [number for number in ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in untouched:
        signal.signal(number, _terminate)
    descriptor = signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
    _work.socket = pythons
    thread.start()
    try:
        yield
    finally:
        finished.set()
        _work.socket = None
        signal.set_wakeup_fd(descriptor)
        for number in untouched:
            signal.signal(number, signal.SIG_DFL)
        pythons.close()
        thread.join()
        ours.close()


def _terminate(number: int, frame: object) -> None:
    raise Terminated(signal.Signals(number).name)


def _listen(numbers: socket.socket, finished: threading.Event) -> None:
    """Wait for signals until the command has finished."""
    while received := numbers.recv(64):  # nothing when the other side is closed
        asked = [number for number in received if number in CODES]
        if asked:
            _wait_for_end(asked[-1], finished)


def _wait_for_end(number: int, finished: threading.Event) -> None:
    """End the process unless the command finishes in time; saves are not counted."""
    since = time.monotonic()
    announced = False
    while not finished.wait(0.05):
        waited = time.monotonic() - since
        if _work.saving:
            since = time.monotonic()
        elif waited > _work.grace:
            _end(number)
        elif waited > GRACE and not announced:
            announced = True
            _write_error(f"{signal.Signals(number).name}: the work at hand is finished and saved first.")


def _end(number: int) -> None:
    sentences = []
    for describe_kept, clean_up in reversed(_work.on_interrupt):
        try:
            clean_up()
            sentences.append(describe_kept())
        except Exception as error:  # which must not keep the process alive
            sentences.append(f"what was kept is not known ({error}).")
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # a live display hides the cursor
    _write_error(f"{signal.Signals(number).name}: {' '.join(sentences) or FINISHED}")
    os._exit(CODES[signal.Signals(number)])


def _write_error(text: str) -> None:
    """To standard error past Python's buffers, whose locks the main thread may hold; of many processes one speaks."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"vitruvius: {text}\n".encode())


def _hold_signals() -> None:
    """Before a fork: the new process must not hear a signal with the handlers and the socket of this one."""
    if _work.socket is not None:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, CODES)


def _release_signals() -> None:
    """After a fork, on both sides; a signal that came in between is heard now."""
    mask: Any = getattr(_forking, "mask", None)
    _forking.mask = None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget_in_child() -> None:
    """A forked process answers its own signals, as if nobody had asked for more."""
    if _work.socket is not None:
        signal.set_wakeup_fd(-1)
        _work.socket.close()  # while it is open here, the thread that listens there does not hear that it was closed
        _work.socket = None
        for number in ENDING:
            if signal.getsignal(number) is _terminate:
                signal.signal(number, signal.SIG_DFL)
    _release_signals()


_forking = threading.local()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_forget_in_child)
