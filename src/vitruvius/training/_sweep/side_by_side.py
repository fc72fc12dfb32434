"""Runs of a sweep in processes of their own, several at a time on one device."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from vitruvius._files import atomic_write_text
from vitruvius._secrets import redact

LOOK_EVERY = 2.0  # seconds between two looks at what runs have said


class SideBySide:
    """Runs of a sweep in processes of their own; what they print goes to a log each.

    `file` and `overrides` are those of the sweep; `logs` is the folder for what runs print.
    """

    def __init__(self, file: str, overrides: list[str], logs: Path) -> None:
        self.command = [sys.executable, "-m", "vitruvius", "sweep", file, *overrides, "--run"]
        self.logs = logs
        self.children: dict[str, tuple[subprocess.Popen[str], float]] = {}

    def __enter__(self) -> SideBySide:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """What still runs is asked to stop, so that it saves its state."""
        for child, _begun in self.children.values():
            child.terminate()
        for child, _begun in self.children.values():
            child.wait()

    def __len__(self) -> int:
        return len(self.children)

    def start(self, name: str) -> None:
        """Begin a run.

        `name` is that of the run in the sweep.
        """
        with (self.logs / f"{name}.txt").open("w", encoding="utf-8") as log:
            child = subprocess.Popen([*self.command, name], stdout=log, stderr=subprocess.STDOUT, text=True)
        self.children[name] = (child, time.monotonic())

    def in_words(self) -> str:
        """Every run that is under way, with the last line of its log."""
        return "; ".join(f"{name}: {self._last_line(name)}" for name in self.children)

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> list[tuple[str, str, float]]:
        """(name, outcome, seconds) of the runs that have ended; at least one, if any is under way.

        `meanwhile` is called every few seconds as long as none has.
        """
        asked = time.monotonic()
        while self.children:
            ended = [name for name, (child, _) in self.children.items() if child.poll() is not None]
            if ended:
                return [self._outcome(name) for name in ended]
            if time.monotonic() - asked >= LOOK_EVERY:
                asked = time.monotonic()
                meanwhile()
            time.sleep(0.2)
        return []

    def _outcome(self, name: str) -> tuple[str, str, float]:
        child, begun = self.children.pop(name)
        seconds = time.monotonic() - begun
        log = self.logs / f"{name}.txt"
        text = log.read_text(encoding="utf-8")
        if redact(text) != text:  # of a library that printed by itself, or of a traceback
            atomic_write_text(log, text)
        last = self._last_line(name)
        if child.returncode == 0:
            return name, "finished", seconds
        return name, f"failed: {last.removeprefix('failed: ')}", seconds

    def _last_line(self, name: str) -> str:
        """What a run has said last."""
        log = self.logs / f"{name}.txt"
        lines = redact(log.read_text(encoding="utf-8", errors="replace")).split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing printed")
