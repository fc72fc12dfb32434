"""Pre-emption: SIGTERM or SIGUSR1 asks a run to save and end; it does so after the update at hand."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class Stop:
    """Whether somebody has asked."""

    def __init__(self) -> None:
        self.name = ""

    @property
    def asked(self) -> bool:
        return bool(self.name)

    def __call__(self, number: int, frame: Any = None) -> None:
        """As a signal handler: only remember."""
        self.name = signal.Signals(number).name


@contextmanager
def listening() -> Iterator[Stop]:
    """Catch the signals inside; the handlers of before come back. Threads cannot listen, they just train."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
