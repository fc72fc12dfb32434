"""Run the GPU tests in several processes at once: most of their time is compiling kernels, which is the CPU's.

    python scripts/gpu_tests.py [--processes 15] [--seconds 520] [--limit 150] [--results gpu_tests.jsonl] [paths …]

Each process takes the next test when it has done one. Tests marked `kernels("…")` alike compile the same kernels and
go to one process, one after the other; compiled kernels are also shared on disk. A test over `--limit` seconds is
stopped, with its process, and the others continue. Every result is printed and written to `--results` as it comes, one
JSON object per line, so that a run that is cut off still tells what it has seen; a next run with the same file takes
the longest tests first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TextIO

PATHS = [
    "tests/gpu/test_fused_gpu.py",
    "tests/attention/test_on_accelerator.py",
    "tests/gpu/test_replay_gpu.py",
    "tests/gpu/test_recorded_training_gpu.py",
    "tests/init/test_initialise.py",
    "tests/data/test_loaders.py",
    "tests/gpu/test_corruptions_gpu.py",
    "tests/gpu/test_augmentation_gpu.py",
]
PYTEST = ["-p", "no:benchmark", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "gpu", "-q"]
ONE_THREAD = {  # every process has one core
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
START = 120.0  # seconds within which a process must have collected its tests
spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Result:
    """What became of one test."""

    name: str
    fate: str  # passed, failed, skipped, timed out, crashed, unfinished
    seconds: float = 0.0
    text: str = ""


def main() -> None:
    options = read_options()
    os.environ.update(ONE_THREAD)
    run = Run(options)
    threads = [threading.Thread(target=run.work) for _ in range(options.processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(run.report())


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=PATHS, help="test files or folders")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--seconds", type=float, default=520, help="for all tests together")
    parser.add_argument("--limit", type=float, default=150, help="seconds for one test")
    parser.add_argument("--results", type=Path, default=Path("gpu_tests.jsonl"))
    return parser.parse_args()


class Run:
    """All tests, and the processes that take them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begun = time.monotonic()
        self.groups: queue.Queue[list[str]] = queue.Queue()
        self.names: list[str] = []
        self.results: dict[str, Result] = {}
        self.lock = threading.Lock()
        self.seconds_before = read_seconds(options.results)
        self.file: TextIO = options.results.open("w", encoding="utf-8")

    def work(self) -> None:
        """One process after another: a new one wherever a test has stopped the last."""
        worker = self._start()
        try:
            while worker is not None:
                for name in self.groups.get_nowait():
                    if worker is None or self._time_left() <= 0:
                        return
                    worker = self._try(worker, name)
        except queue.Empty:
            return
        finally:
            if worker is not None:
                worker.stop()

    def _try(self, worker: Worker, name: str) -> Worker | None:
        """Run one test; the worker that takes the next one."""
        begun = time.monotonic()
        limit = min(self.options.limit, self._time_left())
        result = worker.run(name, limit)
        if result is None and self._time_left() <= 0:
            worker.stop()
            return None
        self._add(result or Result(name, worker.fate(), time.monotonic() - begun))
        if result is not None and "CUDA error" not in result.text:
            return worker
        worker.stop()
        return self._start()

    def _start(self) -> Worker | None:
        """A process that has collected the tests; the first one fills the queue."""
        worker = Worker(self.options.paths)
        collected = worker.collected(min(START, self._time_left()))
        if collected is None:
            worker.stop()
            print("a process could not collect the tests; see pytest --collect-only", flush=True)
            return None
        with self.lock:
            first = not self.names
            self.names = [name for name, _ in collected.tests]
            if first:
                for group in in_groups(collected.tests, self.seconds_before):
                    self.groups.put(group)
        if first:
            for name, text in collected.errors:
                self._add(Result(name, "failed", text=text))
        return worker

    def _time_left(self) -> float:
        left: float = self.options.seconds - (time.monotonic() - self.begun)
        return left

    def _add(self, result: Result) -> None:
        with self.lock:
            self.results[result.name] = result
            self.file.write(json.dumps(asdict(result)) + "\n")
            self.file.flush()
            at = time.monotonic() - self.begun
            print(f"{at:6.1f} s  {result.fate:9} {result.seconds:6.1f} s  {result.name}", flush=True)
            if result.fate == "failed":
                print(result.text[-3000:], flush=True)

    def report(self) -> int:
        """Print what became of all; the exit code."""
        for name in self.names:
            if name not in self.results:
                self._add(Result(name, "unfinished"))
        self.file.close()
        fates = [result.fate for result in self.results.values()]
        counts = ", ".join(f"{fates.count(fate)} {fate}" for fate in dict.fromkeys(fates))
        print(f"{len(self.names)} tests in {time.monotonic() - self.begun:.0f} s: {counts or 'none found'}")
        for result in self.results.values():
            if result.fate not in ("passed", "skipped"):
                print(f"  {result.fate}: {result.name}")
        return int(not fates or any(fate not in ("passed", "skipped") for fate in fates))


def in_groups(collected: Iterable[tuple[str, str]], seconds: dict[str, float]) -> list[list[str]]:
    """Tests of one group together; those that took longest before come first, then new ones as they are."""
    groups: dict[str, list[str]] = {}
    for name, key in collected:
        groups.setdefault(key or name, []).append(name)
    return sorted(groups.values(), key=lambda names: -sum(seconds.get(name, 0.0) for name in names))


def read_seconds(path: Path) -> dict[str, float]:
    """How long each test took when this file was written; nothing without the file."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return {row["name"]: row["seconds"] for row in rows}


class Collected(NamedTuple):
    """What pytest found: (name, group) of every test, (file, error) of every file that cannot be imported."""

    tests: list[tuple[str, str]]
    errors: list[tuple[str, str]]


class Worker:
    """A process with one pytest in it, which runs the tests it is told, one by one."""

    def __init__(self, paths: list[str]) -> None:
        self.ours, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(theirs, paths))
        self.process.start()
        theirs.close()

    def collected(self, limit: float) -> Collected | None:
        """What pytest found, or nothing if it found no test or took too long."""
        answer = self._answer(limit)
        if answer is None or not any(answer):
            return None
        return Collected(*answer)

    def run(self, name: str, limit: float) -> Result | None:
        """What became of a test; nothing if it took too long or the process has died."""
        self.ours.send(name)
        answer = self._answer(limit)
        return None if answer is None else Result(**answer)

    def fate(self) -> str:
        """Why there was no answer."""
        return "timed out" if self.process.is_alive() else "crashed"

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.ours.close()

    def _answer(self, limit: float) -> Any:
        try:
            if self.ours.poll(max(limit, 0.0)):
                return self.ours.recv()
        except (EOFError, ConnectionError):
            self.process.join(5)
        return None


def serve(connection: Connection, paths: list[str]) -> None:
    """In the process: collect the tests once, then run what is asked for."""
    import pytest

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the verdicts tell it all
    pytest.main([*PYTEST, *paths], plugins=[Served(connection)])


class Served:
    """A pytest plugin: names come in, verdicts go out."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.reports: list[Any] = []
        self.errors: list[tuple[str, str]] = []

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors.append((report.nodeid, report.longreprtext))

    def pytest_runtestloop(self, session: Any) -> bool:
        items = {item.nodeid: item for item in session.items}
        self.connection.send(([(name, group_of(item)) for name, item in items.items()], self.errors))
        while True:
            try:
                name = self.connection.recv()
            except EOFError:
                return True
            self.reports.clear()
            items[name].config.hook.pytest_runtest_protocol(item=items[name], nextitem=None)
            self.connection.send(asdict(verdict(name, self.reports)))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.reports.append(report)


def group_of(item: Any) -> str:
    """The key of a test's `kernels` mark; empty without one."""
    mark = item.get_closest_marker("kernels")
    return str(mark.args[0]) if mark else ""


def verdict(name: str, reports: list[Any]) -> Result:
    """One result of a test's set-up, call and tear-down."""
    seconds = sum(report.duration for report in reports)
    failed = [report for report in reports if report.failed]
    if failed:
        return Result(name, "failed", seconds, "\n".join(report.longreprtext for report in failed))
    if any(report.skipped for report in reports):
        return Result(name, "skipped", seconds)
    return Result(name, "passed", seconds)


if __name__ == "__main__":
    main()
