"""Processes that warm up several at a time and are then timed in turn, each alone: what benchmarks of training share.

A contestant is a process that prints lines starting with `#`, each a JSON object: one when it is ready, then one for
every line that it is given. Whatever else it prints goes to its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
Tell = Callable[[Answer], None]  # given every event as it comes
PAUSE = 0.05  # seconds between two looks at who is ready


@dataclass
class Contestant:
    """A process, and what it has said."""

    name: str
    command: Sequence[str]
    log: Path
    settings: dict[str, str] = field(default_factory=dict)  # environment variables
    after: str = ""  # a contestant that must be ready before this one starts
    ready: Answer | None = None
    failure: str = ""
    rounds: list[Answer] = field(default_factory=list)

    def start(self) -> None:
        self.begun = time.perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self.settings},
                start_new_session=True,
            )
        self.answers: queue.Queue[Answer | None] = queue.Queue()
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("#"):
                self.answers.put(json.loads(line[1:]))
        self.answers.put(None)  # the process has ended

    def look(self, limit: float) -> None:
        """Whether it is ready by now; after `limit` seconds it has failed."""
        seconds = time.perf_counter() - self.begun
        try:
            answer = self.answers.get_nowait()
        except queue.Empty:
            if seconds > limit:
                self.fail(f"not ready after {limit:g} s")
            return
        if answer is None:
            self.fail(self.last_words())
        else:
            self.ready = {**answer, "started_s": seconds}

    def play(self, limit: float) -> None:
        """One round; one that takes longer than `limit` seconds is the last."""
        try:
            assert self.process.stdin is not None
            print("go", file=self.process.stdin, flush=True)
            answer = self.answers.get(timeout=limit)
        except (queue.Empty, BrokenPipeError):
            self.fail(f"a round took longer than {limit:g} s")
            return
        if answer is None:
            self.fail(self.last_words())
        else:
            self.rounds.append(answer)

    def fail(self, reason: str) -> None:
        self.failure = reason
        self.end()

    def last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "ended without a word"

    def end(self) -> None:
        """Stop the process and all that it has started."""
        if not hasattr(self, "process"):
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.listener.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def warm_up(contestants: Sequence[Contestant], tell: Tell, *, together: int, limit: float, deadline: float) -> None:
    """Start all, at most `together` at a time, until each is ready or has failed; by the deadline the rest has."""
    waiting = list(contestants)
    starting: list[Contestant] = []
    while waiting or starting:
        if time.perf_counter() > deadline:
            _give_up(waiting, starting)
        while len(starting) < together and (chosen := _next(waiting, contestants)) is not None:
            waiting.remove(chosen)
            if not chosen.failure:
                chosen.start()
            starting.append(chosen)
        for one in list(starting):
            if not one.failure:
                one.look(limit)
            if one.ready is not None or one.failure:
                starting.remove(one)
                tell(_news(one))
        time.sleep(PAUSE)


def _give_up(waiting: Sequence[Contestant], starting: Sequence[Contestant]) -> None:
    for one in waiting:
        one.failure = "no time was left to start it"
    for one in starting:
        one.fail("not ready when the time for warming up was over")


def _news(one: Contestant) -> Answer:
    if one.failure:
        return {"event": "failed", "name": one.name, "reason": one.failure}
    return {"event": "ready", "name": one.name, **(one.ready or {})}


def _next(waiting: Sequence[Contestant], everyone: Sequence[Contestant]) -> Contestant | None:
    """The first that waits for nobody; the failure of whom it waits for is its own."""
    known = {one.name: one for one in everyone}
    for one in waiting:
        before = known.get(one.after)
        if before is None or before.ready is not None or before.failure:
            return one
    return None


def take_turns(contestants: Sequence[Contestant], tell: Tell, *, rounds: int, limit: float, deadline: float) -> None:
    """Rounds in turn, one process at a time, as far as time allows."""
    for number in range(rounds):
        for one in contestants:
            if one.ready is None or one.failure or time.perf_counter() > deadline:
                continue
            one.play(limit)
            if one.failure:
                tell({"event": "failed", "name": one.name, "reason": one.failure})
            else:
                tell({"event": "round", "name": one.name, "number": number, **one.rounds[-1]})
