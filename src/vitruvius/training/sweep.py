"""Sweep: one recipe trained under many settings, with a table at the end; called again it resumes where it stopped.

A sweep file: `recipe`, `grid` (every combination of the values), `list` (sets of overrides, a run each; `name` names
its folder, `recipe` replaces the common one), `maps` and `masks` (made of another run before the first begins),
`evaluate` (how each run is judged when it is trained), `out`. A run that fails is reported and the others continue.
With a time limit no run is started that would not end in time, and several runs may share one device. Under torchrun
all processes work on one run after the other.
"""

from __future__ import annotations

import contextlib
import csv
import gc
import hashlib
import io
import itertools
import json
import logging
import math
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vitruvius._checks import check_count
from vitruvius._config import build, override
from vitruvius._errors import ConfigError, Preempted, VitruviusError
from vitruvius._files import Lock, atomic_write_text, exists, is_url, join, local_path, read_json, read_text
from vitruvius._processes import Process, process_group
from vitruvius._progress import Progress, no_progress
from vitruvius._random import preserve_rng
from vitruvius._recipes import find_recipe
from vitruvius._registry import load_plugins
from vitruvius._secrets import redact
from vitruvius._yaml import read_yaml, to_plain
from vitruvius.training.config import Config, SweepConfig, read_recipe
from vitruvius.training.judging import (
    check_masks,
    check_plans,
    check_trained,
    judge,
    keep_start,
    make_missing,
    needs_missing_masks,
)
from vitruvius.training.loop import check_run, train
from vitruvius.training.run_folder import flatten
from vitruvius.training.slurm import states_of, submit_runs

logger = logging.getLogger(__name__)

OWN = ("out=", "metric=", "order=", "evaluate=", "evaluate.", "maps=", "maps.", "masks=", "masks.")  # no recipe's keys
MOST_RUNS = 10_000
FAILED = "vitruvius: failed: "  # begins the line that says why a run in another process has failed
LOOK_EVERY = 2.0  # seconds between two looks at the logs of runs in other processes
Settings = dict[str, Any]
Rows = list[dict[str, Any]]  # of metrics.jsonl


@dataclass(frozen=True)
class Planned:
    """One run of a sweep, checked."""

    name: str
    settings: Settings
    config: Config

    @property
    def mark(self) -> str:
        """A fingerprint of everything that decides the result."""
        return hashlib.sha256(json.dumps(flatten(to_plain(self.config)), sort_keys=True).encode()).hexdigest()[:16]


class Sweep:
    """All runs of a sweep file, every one checked before the first starts."""

    def __init__(self, file: str | Path, overrides: Iterable[str] = ()) -> None:
        self.file, self.overrides = str(file), list(overrides)
        own = [text for text in self.overrides if text.startswith(OWN)]
        self.common = [text for text in self.overrides if text not in own]
        self.settings: SweepConfig = build(SweepConfig, override(read_yaml(file), own), source=self.file)
        self.folder = self.settings.out or str(Path("runs") / "sweeps" / Path(file).stem)
        self.recipe = find_recipe(self.settings.recipe)
        self.runs = self._plan()
        self.chosen = self.runs
        self._check_patterns([pattern for plan in self.settings.evaluate for pattern in plan.runs], "evaluate.runs:")
        check_masks(self.settings.maps, self.settings.masks, self.file)

    # planning

    def _plan(self) -> list[Planned]:
        sets = [*_combinations(self.settings.grid, self.file), *self.settings.list]
        if not sets:
            raise ConfigError(f"{self.file}: neither grid nor list.")
        varied = {key for settings in sets for key in settings}
        clash = varied & {"out", *(text.partition("=")[0] for text in self.common)}
        if clash:
            raise ConfigError(f"{self.file}: the sweep varies {', '.join(sorted(clash))}; leave that out.")
        names = [str(settings.get("name") or name_of(settings)) for settings in sets]
        twice = [name for name, times in Counter(names).items() if times > 1]
        if twice:
            raise ConfigError(f"{self.file}: twice the same run: {min(twice)}.")
        return [self._planned(name, settings) for name, settings in zip(names, sets, strict=True)]

    def _planned(self, name: str, settings: Settings) -> Planned:
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items() if key not in ("name", "recipe")]
        recipe = find_recipe(settings["recipe"]) if "recipe" in settings else self.recipe
        return Planned(name, settings, read_recipe(recipe, [*self.common, *words, f"out={join(self.folder, name)}"]))

    def choose(self, patterns: Sequence[str]) -> None:
        """Train only the runs whose names fit one of these `patterns`, such as `*_seed1`."""
        self._check_patterns(patterns, "--only")
        self.chosen = [run for run in self.runs if any(fnmatchcase(run.name, pattern) for pattern in patterns)]

    def _check_patterns(self, patterns: Sequence[str], where: str) -> None:
        names = [run.name for run in self.runs]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"{self.file}: {where} {pattern!r} fits no run; there are {', '.join(names)}.")

    def find_faults(self, *, progress: Progress = no_progress) -> dict[str, str]:
        """The unfinished runs that would fail, and why: each is opened as for training, and nothing is written."""
        faults: dict[str, str] = {}
        waiting = self._waiting()
        for number, run in enumerate(waiting):
            progress(number, len(waiting), run.name)
            try:
                self._check_plans()
                if self.settings.maps is not None and needs_missing_masks(run.config, self.settings.masks):
                    check_trained(self.settings.maps)  # the rest is known when the masks are made
                else:
                    check_run(run.config)
            except Exception as error:
                faults[run.name] = _in_one_line(error)
            gc.collect()
        return faults

    def _check_plans(self) -> None:
        """Find a misspelt threat before hours of training, with the plugins that may have brought some."""
        for run in self.runs:
            load_plugins(run.config.plugins)
        check_plans(self.settings.evaluate)

    # training

    def train(
        self, *, quiet: bool = True, minutes: float | None = None, jobs: int = 1, progress: Progress = no_progress
    ) -> str:
        """Train and judge what is not finished; the summary table, which is also written as summary.csv and summary.md.

        quiet: no progress bars of the runs.
        minutes: start no run that would not end within this many minutes, going by the longest run so far.
        jobs: runs trained at a time, each in a process of its own, on one device.
        progress: with several jobs, told every few seconds how many runs are done and what the others are doing.
        """
        check_count(jobs, "--jobs")
        if minutes is not None and not minutes > 0:
            raise ConfigError(f"--minutes {minutes}; expected a number above 0.")
        end = None if minutes is None else time.monotonic() + 60 * minutes
        self._check_plans()
        with Lock(self.folder):
            if self._waiting():
                data = [text for text in self.common if text.startswith("data.")]
                device = f"device={self.runs[0].config.train.device}"
                make_missing(self.settings.maps, self.settings.masks, [*data, device])
            if jobs > 1:
                return self._train_side_by_side(end, jobs, progress)
            return self._train_in_turn(end, quiet)

    def _train_in_turn(self, end: float | None, quiet: bool) -> str:
        with process_group(self.runs[0].config.train.device) as process:  # one group for all runs
            for number, run in enumerate(self.chosen, 1):
                if process.broadcast(self._status(run)) == "finished":
                    continue
                label = f"[{number}/{len(self.chosen)}] {run.name}"
                if process.broadcast(not self._has_time(end)):
                    logger.info("%s: no time left, not started", label)
                    continue
                logger.info("%s", label)
                outcome = self._train(run, process, quiet)
                if outcome != "finished":
                    logger.info("    %s", outcome)
            return process.on_first(self.summarise)

    def _train_side_by_side(self, end: float | None, jobs: int, progress: Progress) -> str:
        waiting = {run.name: run for run in self._waiting()}
        done = len(self.chosen) - len(waiting)

        def names() -> Iterator[str]:
            for name in waiting:
                has_time = self._has_time(end)
                logger.info("%s: %s", name, "started" if has_time else "no time left, not started")
                if has_time:
                    yield name

        command = [sys.executable, "-m", "vitruvius", "sweep", self.file, *self.overrides, "--run"]
        logs = (local_path(self.folder) if is_url(self.folder) else Path(self.folder)) / "logs"
        started = in_processes(command, names(), jobs, logs, lambda text: progress(done, len(self.chosen), text))
        with contextlib.closing(started) as ended:
            for name, outcome, seconds in ended:
                done += 1
                self._note(waiting[name], outcome, seconds)
                logger.info("%s: %s after %.0f s", name, outcome, seconds)
        return self.summarise()

    def train_one(self, name: str) -> str:
        """Train and judge one run by its name; `finished`, or what went wrong."""
        run = next((run for run in self.runs if run.name == name), None)
        if run is None:
            names = ", ".join(run.name for run in self.runs)
            raise ConfigError(f"{self.folder} has no run named {name!r}; it has {names}.")
        with process_group(run.config.train.device) as process:
            return self._train(run, process, quiet=False)

    def _train(self, run: Planned, process: Process, quiet: bool) -> str:
        """`finished`, or what went wrong, the same on every process; it is noted with the time that it took."""
        start = time.monotonic()
        plans = [plan for plan in self.settings.evaluate if plan.is_for(run.name)]
        try:
            with preserve_rng(process.device):
                keep_start(run.config, plans, process)
            with self._timed(run, "train", process):
                train(run.config, quiet=quiet)
            with self._timed(run, "judge", process):
                judge(run.config, plans, process)
            outcome = "finished"
        except Preempted:
            raise
        except Exception as error:
            # of many processes perhaps only this one has failed unexpectedly: then nobody can continue
            if process.world_size > 1 and not isinstance(error, VitruviusError):
                raise
            outcome = f"failed: {_in_one_line(error)}"
        gc.collect()
        outcome = next((other for other in process.gather(outcome) if other != "finished"), outcome)
        seconds = time.monotonic() - start
        process.on_first(lambda: self._note(run, outcome, seconds))
        return outcome

    @contextlib.contextmanager
    def _timed(self, run: Planned, part: str, process: Process) -> Iterator[None]:
        """Add the seconds of a part of a run to what earlier calls have spent on it, in seconds/NAME.json."""
        start = time.monotonic()
        yield
        if process.first:
            names = "seconds", f"{run.name}.json"
            before = self._read(*names)
            spent = before.get(part, 0.0) + time.monotonic() - start
            atomic_write_text(join(self.folder, *names), json.dumps({**before, part: round(spent, 2)}) + "\n")

    def _has_time(self, end: float | None) -> bool:
        """Whether a run would end in time, if it takes as long as the longest finished one."""
        longest = max((float(note.get("seconds", 0.0)) for note in self._notes().values()), default=0.0)
        return end is None or time.monotonic() + longest < end

    # as a job array

    def submit(self, spec: str) -> str:
        """Submit what is not finished to Slurm, a task each, as `spec` says; a last job prints the table."""
        self._check_plans()
        waiting = self._waiting()
        if not waiting:
            return self.summarise()
        if any(needs_missing_masks(run.config, self.settings.masks) for run in waiting):
            raise ConfigError(
                f"{self.file}: its masks are not made yet; make them first, or train one run with --only."
            )
        names = [run.name for run in waiting]
        return submit_runs(["sweep", self.file, *self.overrides], names, self.folder, spec)

    def status(self) -> str:
        """How each run stands, here and in Slurm's queue, how far it is, its log; the table when no run is left."""
        jobs = {} if is_url(self.folder) else states_of(Path(self.folder).absolute() / "slurm")

        def describe(run: Planned) -> str:
            queued, log = jobs.get(run.name, ("", None))
            parts = [redact(self._status(run)), f"epoch {len(self._rows(run))} of {run.config.train.epochs}", queued]
            parts += [str(log)] if log is not None and log.exists() else []
            return ", ".join(part for part in parts if part)

        lines = self._lines(describe)
        queue = any(state for state, _ in jobs.values())
        return "\n".join(lines if queue else [*lines, "", self.summarise()])

    # how runs stand

    def _notes(self) -> dict[str, Any]:
        """What is known of runs: status, mark, settings, seconds; each in a file of its own, and all in sweep.json."""
        own = {run.name: self._read("notes", f"{run.name}.json") for run in self.runs}
        return self._read("sweep.json") | {name: note for name, note in own.items() if note}

    def _read(self, *names: str) -> dict[str, Any]:
        file = join(self.folder, *names)
        return read_json(file) if exists(file) else {}

    def _note(self, run: Planned, status: str, seconds: float) -> None:
        """Runs may end in several processes at once: sweep.json is what one of them knows of all."""
        note = {"status": status, "mark": run.mark, "settings": run.settings, "seconds": round(seconds, 1)}
        atomic_write_text(join(self.folder, "notes", f"{run.name}.json"), json.dumps(redact(note)) + "\n")
        atomic_write_text(join(self.folder, "sweep.json"), json.dumps(self._notes(), indent=1) + "\n")

    def _status(self, run: Planned) -> str:
        """waiting, unfinished, finished, or failed and why."""
        note = self._notes().get(run.name)
        has_metrics = exists(join(self.folder, run.name, "metrics.jsonl"))
        if note is None or note["mark"] != run.mark or (note["status"] == "finished" and not has_metrics):
            return "unfinished" if exists(join(self.folder, run.name, "config.yaml")) else "waiting"
        return str(note["status"])

    def _rows(self, run: Planned) -> Rows:
        """The metrics of a run as far as it has come."""
        file = join(self.folder, run.name, "metrics.jsonl")
        return [json.loads(line) for line in read_text(file).splitlines()] if exists(file) else []

    def _waiting(self) -> list[Planned]:
        return [run for run in self.chosen if self._status(run) != "finished"]

    def failed(self) -> dict[str, str]:
        """The runs that have failed, and why."""
        statuses = {run.name: self._status(run) for run in self.runs}
        return {name: status for name, status in statuses.items() if status.startswith("failed")}

    def listing(self, faults: Mapping[str, str] | None = None) -> str:
        """Every run and how it stands; nothing is written."""
        fails = {name: f"would fail: {redact(fault)}" for name, fault in (faults or {}).items()}
        lines = self._lines(lambda run: fails.get(run.name) or self._status(run))
        return "\n".join([f"{self.recipe}: {len(self.runs)} runs in {self.folder}", *lines])

    def _lines(self, describe: Callable[[Planned], str]) -> list[str]:
        width = max(len(run.name) for run in self.runs)
        return [f"{run.name:<{width}}  {describe(run)}" for run in self.runs]

    # the table

    def summarise(self) -> str:
        """The table of all runs as they stand, best first; also written as summary.csv and summary.md.

        A line holds the mean over corruptions; summary.csv holds each of them at each severity.
        """
        metrics = {run.name: self._rows(run) for run in self.runs}
        metric, order = self.settings.metric or choosing_metric(metrics.values()), self.settings.order
        best = {name: best_of(rows, metric, order) for name, rows in metrics.items()}
        scored = [run for run in self.runs if best[run.name]]
        scored.sort(key=lambda run: (best[run.name] or (0.0, 0))[0], reverse=order == "max")
        keys = list(dict.fromkeys(key for run in self.runs for key in redact(run.settings)))

        def table(brief: bool) -> list[list[str]]:
            judged = {run.name: self._judgements(run, brief) for run in self.runs}
            threats = list(dict.fromkeys(threat for found in judged.values() for threat in found))
            lines = [[*keys, metric, "epoch", "epochs", "train_loss", *threats, "minutes", "status"]]
            for run in [*scored, *(run for run in self.runs if not best[run.name])]:
                rows, score, found = metrics[run.name], best[run.name], judged[run.name]
                settings = redact(run.settings)
                cells = [plain_text(settings[key]) if key in settings else "" for key in keys]
                cells += [f"{score[0]:.4f}", str(score[1] + 1)] if score else ["", ""]
                cells += [str(len(rows)), f"{rows[-1]['train_loss']:.4f}" if rows and "train_loss" in rows[-1] else ""]
                cells += [f"{found[threat]:.4f}" if threat in found else "" for threat in threats]
                minutes = sum(float(row.get("seconds", 0.0)) for row in rows) / 60
                lines.append([*cells, f"{minutes:.1f}", self._status(run)])
            return lines

        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(table(brief=False))
        atomic_write_text(join(self.folder, "summary.csv"), text.getvalue())
        shown = markdown(table(brief=True))
        atomic_write_text(join(self.folder, "summary.md"), shown + "\n")
        return shown

    def _judgements(self, run: Planned, brief: bool) -> dict[str, float]:
        """Accuracy by threat that the sweep's `evaluate:` has found of a run; of several plans, behind its folder.

        `brief`: of several corruptions only their mean.
        """
        found: dict[str, float] = {}
        for plan in self.settings.evaluate:
            folder = [*(["start"] if plan.start else []), plan.out]
            report = self._read(run.name, *folder, "report.json") if plan.is_for(run.name) else {}
            if report:
                prefix = f"{'/'.join(folder)} " if len(self.settings.evaluate) > 1 else ""
                scores: Rows = report["threats"]
                corrupted = [score["accuracy"] for score in scores if score["severity"] is not None]
                if brief and len(corrupted) > 1:
                    scores = [score for score in scores if score["severity"] is None]
                    scores.append({"name": "corruptions", "accuracy": sum(corrupted) / len(corrupted)})
                found |= {f"{prefix}{score['name']}": score["accuracy"] for score in scores}
        return found


def best_of(rows: Rows, metric: str, order: str) -> tuple[float, int] | None:
    """The best value of a metric and its epoch. `accuracy` means that of the weights or of their running average."""
    names = (metric, f"val_{metric}", f"ema_{metric}")
    values = [(float(row[name]), int(row["epoch"])) for row in rows for name in names if row.get(name) is not None]
    return (max if order == "max" else min)(values, key=lambda value: value[0], default=None)


def choosing_metric(metrics: Iterable[Rows]) -> str:
    """Robust accuracy if an attack has chosen the weights of every run that has numbers, else accuracy."""
    robust = [any("val_robust_accuracy" in row for row in rows) for rows in metrics if rows]
    return "robust_accuracy" if robust and all(robust) else "accuracy"


def markdown(table: list[list[str]]) -> str:
    cells = [[text.replace("|", "\\|") for text in line] for line in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def plain_text(value: Any) -> str:
    """A setting as one writes it: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def name_of(settings: Settings) -> str:
    """`train.lr=0.0001,seed=0` as the name of a folder: short, without secrets, other for other settings."""
    text = ",".join(f"{key}={plain_text(value)}" for key, value in settings.items())
    shown = ",".join(f"{key}={plain_text(value)}" for key, value in redact(settings).items())
    name = re.sub(r"[^\w.=,+-]+", "-", shown)
    if name == text and len(name) <= 120:
        return name
    return f"{name[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _combinations(grid: dict[str, Any], source: str) -> list[Settings]:
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{source}: grid.{name} = {values!r}, expected a list of values, e.g. [1e-4, 5e-4].")
    runs = math.prod(map(len, grid.values()))
    if runs > MOST_RUNS:
        raise ConfigError(f"{source}: the grid has {runs:,} runs, expected at most {MOST_RUNS:,}; vary fewer keys.")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, VitruviusError) else f"{type(error).__name__}: {text}"


def in_processes(
    command: list[str], names: Iterator[str], jobs: int, logs: Path, look: Callable[[str], object]
) -> Generator[tuple[str, str, float]]:
    """(name, outcome, seconds) of `command NAME` for each of the names as they end, `jobs` at a time, with a log each.

    `look` is told every few seconds what the last lines of the logs say. What still runs when the generator is closed
    is asked to stop, so that it saves its state.
    """

    def last_line(name: str, start: str = "") -> str:
        text = redact((logs / f"{name}.txt").read_text(encoding="utf-8", errors="replace"))
        lines = [line.strip() for line in reversed(text.split("\n")) if line.strip()]
        chosen = [line.removeprefix(start) for line in lines if line.startswith(start)]
        return [*chosen, *lines, "nothing printed"][0]

    logs.mkdir(parents=True, exist_ok=True)
    running: dict[str, tuple[subprocess.Popen[str], float]] = {}  # and when they were started
    looked_at = float("-inf")
    try:
        while True:
            for name in itertools.islice(names, jobs - len(running)):
                with (logs / f"{name}.txt").open("w", encoding="utf-8") as log:
                    child = subprocess.Popen([*command, name], stdout=log, stderr=subprocess.STDOUT, text=True)
                running[name] = child, time.monotonic()
            if not running:
                return
            if time.monotonic() - looked_at >= LOOK_EVERY:
                looked_at = time.monotonic()
                look("; ".join(f"{name}: {last_line(name)}" for name in running))
            time.sleep(0.2)
            for name in [name for name, (child, _) in running.items() if child.poll() is not None]:
                child, start = running.pop(name)
                text = (logs / f"{name}.txt").read_text(encoding="utf-8")
                atomic_write_text(logs / f"{name}.txt", redact(text))  # a library may have printed a secret
                failed = f"failed: {last_line(name, FAILED)}"  # libraries may print more when the process ends
                yield name, "finished" if child.returncode == 0 else failed, time.monotonic() - start
    finally:
        for child, _ in running.values():
            child.terminate()
        for child, _ in running.values():
            child.wait()
