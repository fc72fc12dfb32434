"""Sweep: one recipe trained under many settings, with a table at the end; called again it goes on where it stopped.

A sweep file: `recipe`, `grid` (every combination of the values), `list` (sets of overrides, a run each; `name` names
its folder, `recipe` replaces the common one), `maps` and `masks` (made of another run before the first begins),
`evaluate` (how each run is judged when it is trained), `out`. A run that fails is reported and the others go on. With a
time limit no run is started that would not end in time, and several runs may share one device. Under torchrun all
processes work on one run after the other.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from vitruvius._bar import Bar
from vitruvius._checks import check_count
from vitruvius._config import build, override
from vitruvius._errors import ConfigError, Preempted, VitruviusError
from vitruvius._files import Lock, atomic_write_text, exists, is_url, join, place_of, read_json, read_text
from vitruvius._processes import Process, process_group
from vitruvius._registry import load_plugins
from vitruvius._secrets import redact, redact_text
from vitruvius._yaml import read_yaml, to_plain
from vitruvius.training._progress_bar import make_teller
from vitruvius.training._run.folder import flatten
from vitruvius.training._seeding import preserve_rng
from vitruvius.training._sweep.judging import check_names, check_plans, judge, keep_start
from vitruvius.training._sweep.masks import (
    check_masks,
    check_trained,
    make_missing,
    missing_masks,
)
from vitruvius.training._sweep.side_by_side import SideBySide
from vitruvius.training._sweep.table import Row, best_of, markdown, plain_text, sorted_by_score, write_tables
from vitruvius.training._train import train
from vitruvius.training.config import Config, EvaluationPlan, SweepConfig, read_recipe
from vitruvius.training.dry_run import rehearse

__all__ = ["Clock", "Planned", "Sweep", "name_of"]

OWN = ("out=", "metric=", "order=", "evaluate=", "evaluate.", "maps=", "maps.", "masks=", "masks.")  # no recipe's keys
Settings = dict[str, Any]
Find = Callable[[str], Path]


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
    """All runs of a sweep file, every one checked before the first begins.

    `file` is the YAML file; `overrides` are settings for every run, and of the sweep itself, `out=…`,
    `evaluate.0.images=8` (default: none); `find` makes a path of the recipe that the file names (default: it is a
    path).
    """

    def __init__(self, file: str | Path, overrides: Iterable[str] = (), *, find: Find = Path) -> None:
        overrides = list(overrides)
        self.file = str(file)
        self.overrides = overrides
        own = [text for text in overrides if text.startswith(OWN)]
        self.common = [text for text in overrides if text not in own]
        self.settings: SweepConfig = build(SweepConfig, override(read_yaml(file), own), source=str(file))
        self.folder = self.settings.out or str(Path("runs") / "sweeps" / Path(file).stem)
        self.find = find
        self.recipe = find(self.settings.recipe)
        self._ledger = join(self.folder, "sweep.json")
        self.runs = self._plan(str(file))
        self.chosen = self.runs
        check_names(self.settings.evaluate, [run.name for run in self.runs], str(file))
        check_masks(self.settings.maps, self.settings.masks, str(file))

    def choose(self, patterns: Sequence[str]) -> None:
        """Train only the runs whose names fit one of these `patterns`, such as `*_seed1`."""
        names = [run.name for run in self.runs]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"--only {pattern}: no run has such a name; there are {', '.join(names)}.")
        self.chosen = [run for run in self.runs if any(fnmatchcase(run.name, pattern) for pattern in patterns)]

    def train(
        self,
        *,
        quiet: bool = True,
        tell: Callable[[str], None] = lambda _: None,
        minutes: float | None = None,
        jobs: int = 1,
    ) -> str:
        """Train and judge what is not finished; the summary table, which is also written as summary.csv and summary.md.

        quiet: no progress bars.
        tell: told which run begins, and what went wrong with one.
        minutes: start no run that would not end within this many minutes, going by the longest run so far.
        jobs: runs trained at a time, each in a process of its own, on one device.
        """
        check_count(jobs, "--jobs")
        clock = Clock(minutes)
        self._check_plans()
        with Lock(self.folder):
            if self._waiting():
                make_missing(self.settings.maps, self.settings.masks, self._of_other_runs(), tell)
            if jobs > 1:
                return self._train_side_by_side(clock, jobs, tell)
            return self._train_in_turn(clock, quiet, tell)

    def _train_in_turn(self, clock: Clock, quiet: bool, tell: Callable[[str], None]) -> str:
        device = self.runs[0].config.train.device
        with process_group(device) as process:  # one group for all runs
            for number, run in enumerate(self.chosen, 1):
                if process.broadcast(self._status(run)) == "finished":
                    continue
                if process.broadcast(not clock.allows(self._longest())):
                    tell(f"[{number}/{len(self.chosen)}] {run.name}: no time left, not started")
                    continue
                tell(f"[{number}/{len(self.chosen)}] {run.name}")
                begun = time.monotonic()
                outcome = self._train(run, process, quiet)
                seconds = time.monotonic() - begun
                process.on_first(lambda run=run, outcome=outcome, s=seconds: self._note(run, outcome, s))  # type: ignore[misc]
                if outcome != "finished":
                    tell(f"    {outcome}")
            return process.on_first(self.summarise)

    def train_one(self, name: str) -> str:
        """Train and judge one run by its name; `finished`, or what went wrong. The caller keeps the notes."""
        for run in self.runs:
            if run.name == name:
                with process_group(run.config.train.device) as process:
                    return self._train(run, process, quiet=False)
        raise ConfigError(
            f"{self.folder} has no run named {name!r}; it has {', '.join(run.name for run in self.runs)}."
        )

    def _waiting(self) -> list[Planned]:
        return [run for run in self.chosen if self._status(run) != "finished"]

    def _of_other_runs(self) -> list[str]:
        """The overrides that a run folder takes: its data, and the device."""
        data = [text for text in self.common if text.startswith("data.")]
        return [*data, f"device={self.runs[0].config.train.device}"]

    def _train_side_by_side(self, clock: Clock, jobs: int, tell: Callable[[str], None]) -> str:
        waiting = self._waiting()
        by_name = {run.name: run for run in self.runs}
        done = len(self.chosen) - len(waiting)
        with Bar("sweep") as bar, SideBySide(self.file, self.overrides, self._logs()) as children:
            while waiting or children:
                while waiting and len(children) < jobs:
                    self._begin(waiting.pop(0), children, clock, tell)
                show = partial(self._show, bar, done, children)
                show()
                for name, outcome, seconds in children.wait(show):
                    done += 1
                    self._note(by_name[name], outcome, seconds)
                    tell(f"{name}: {outcome} after {seconds:.0f} s")
        return self.summarise()

    def _show(self, bar: Bar, done: int, children: SideBySide) -> None:
        bar(done, len(self.chosen), children.in_words())

    def _logs(self) -> Path:
        """The folder of the logs, on this machine also where the sweep is elsewhere."""
        if is_url(self.folder):
            return place_of(self.folder) / "logs"
        return Path(self.folder) / "logs"

    def _begin(self, run: Planned, children: SideBySide, clock: Clock, tell: Callable[[str], None]) -> None:
        if clock.allows(self._longest()):
            tell(f"{run.name}: begins")
            children.start(run.name)
        else:
            tell(f"{run.name}: no time left, not started")

    def _longest(self) -> float:
        """Seconds of the longest finished run."""
        return max((float(note.get("seconds", 0.0)) for note in self._notes().values()), default=0.0)

    def summarise(self) -> str:
        """The table of all runs as they stand, best first; written beside them."""
        rows = [self._row(run) for run in self.runs]
        metric = self.settings.metric or _choosing_metric(rows)
        order = self.settings.order
        scored = [row.scored(best_of(row.metrics, metric, order)) for row in rows]
        ranked = sorted_by_score(scored, order)
        write_tables(self.folder, ranked, metric)
        return markdown(ranked, metric)

    def failed(self) -> dict[str, str]:
        """The runs that have failed, and why."""
        statuses = {run.name: self._status(run) for run in self.runs}
        return {name: status for name, status in statuses.items() if status.startswith("failed")}

    def find_faults(self) -> dict[str, str]:
        """The unfinished runs that would fail, and why: each is opened as for training, and nothing is written."""
        faults: dict[str, str] = {}
        waiting = self._waiting()
        with Bar("opening runs") as bar:
            for number, run in enumerate(waiting):
                bar(number, len(waiting), run.name)
                fault = self._fault(run)
                if fault:
                    faults[run.name] = fault
                gc.collect()
        return faults

    def _fault(self, run: Planned) -> str:
        """Why a run would fail; nothing if it would not."""
        try:
            self._check_plans()
            if self.settings.maps is not None and missing_masks(run.config, self.settings.masks):
                check_trained(self.settings.maps)  # the rest is known when the masks are made
            else:
                rehearse(run.config)
        except VitruviusError as error:
            return " ".join(str(error).split())
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        return ""

    def _check_plans(self) -> None:
        """Find a misspelt threat before hours of training, with the plugins that may have brought some."""
        for run in self.runs:
            load_plugins(run.config.plugins)
        check_plans(self.settings.evaluate)

    def listing(self, faults: Mapping[str, str] | None = None) -> str:
        """Every run and how it stands; nothing is written.

        faults: what `find_faults` has found, shown with the runs; default: not looked for.
        """
        width = max(len(run.name) for run in self.runs)
        lines = []
        for run in self.runs:
            status = self._status(run)
            if faults and run.name in faults:
                status = f"would fail: {redact_text(faults[run.name])}"
            lines.append(f"{run.name:<{width}}  {status}")
        return "\n".join([f"{self.recipe}: {len(self.runs)} runs in {self.folder}", *lines])

    def _plan(self, source: str) -> list[Planned]:
        sets = [*_combinations(self.settings.grid, source), *self.settings.list]
        if not sets:
            raise ConfigError(f"{source}: neither grid nor list.")
        self._check_overrides(sets, source)
        names = [str(settings.get("name") or name_of(settings)) for settings in sets]
        _refuse_doubles(names, source)
        return [self._planned(name, settings) for name, settings in zip(names, sets, strict=True)]

    def _check_overrides(self, sets: list[Settings], source: str) -> None:
        """Refuse overrides of what the sweep varies, and a run's own folder, which is the sweep's to choose."""
        varied = {key for settings in sets for key in settings}
        clash = varied & {text.partition("=")[0] for text in self.common}
        if "out" in varied:
            clash.add("out")
        if clash:
            raise ConfigError(f"{source}: {', '.join(sorted(clash))} is what the sweep varies; do not set it.")

    def _planned(self, name: str, settings: Settings) -> Planned:
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items() if key not in ("name", "recipe")]
        recipe = self.recipe
        if "recipe" in settings:
            recipe = self.find(settings["recipe"])
        config = read_recipe(recipe, [*self.common, *words, f"out={join(self.folder, name)}"])
        return Planned(name, settings, config)

    def _status(self, run: Planned) -> str:
        """waiting, unfinished, finished, or failed and why."""
        noted = self._notes().get(run.name)
        has_metrics = exists(join(self.folder, run.name, "metrics.jsonl"))
        if noted is None or noted["mark"] != run.mark or (noted["status"] == "finished" and not has_metrics):
            return "unfinished" if exists(join(self.folder, run.name, "config.yaml")) else "waiting"
        return str(noted["status"])

    def _train(self, run: Planned, process: Process, quiet: bool) -> str:
        """`finished`, or what went wrong, the same on every process."""
        try:
            plans = self._plans_of(run)
            with preserve_rng(process.device):
                keep_start(run.config, plans, process, make_teller(None, shown=process.first and not quiet))
            with self._timed(run, "train", process):
                train(run.config, quiet=quiet)
            with self._timed(run, "judge", process):
                judge(run.config, plans, process)
            outcome = "finished"
        except Preempted:
            raise
        except VitruviusError as error:
            outcome = f"failed: {' '.join(str(error).split())}"
        except Exception as error:  # of many processes perhaps only this one has failed: then nobody can go on
            if process.world_size > 1:
                raise
            outcome = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
        gc.collect()
        return next((said for said in process.gather(outcome) if said != "finished"), outcome)

    def _plans_of(self, run: Planned) -> list[EvaluationPlan]:
        return [plan for plan in self.settings.evaluate if plan.is_for(run.name)]

    @contextlib.contextmanager
    def _timed(self, run: Planned, part: str, process: Process) -> Iterator[None]:
        """Add the seconds of a part of a run to what earlier calls have spent on it, in seconds/NAME.json."""
        begun = time.monotonic()
        yield
        file = join(self.folder, "seconds", f"{run.name}.json")
        if process.first:
            known: dict[str, float] = read_json(file) if exists(file) else {}
            spent = known.get(part, 0.0) + time.monotonic() - begun
            atomic_write_text(file, json.dumps({**known, part: round(spent, 2)}) + "\n")

    def _note(self, run: Planned, status: str, seconds: float) -> None:
        note = {"status": status, "mark": run.mark, "settings": run.settings, "seconds": round(seconds, 1)}
        notes = {**self._notes(), run.name: note}
        atomic_write_text(self._ledger, json.dumps(redact(notes), indent=1) + "\n")

    def _notes(self) -> dict[str, Any]:
        if not exists(self._ledger):
            return {}
        notes: dict[str, Any] = read_json(self._ledger)
        return notes

    def _row(self, run: Planned) -> Row:
        file = join(self.folder, run.name, "metrics.jsonl")
        lines: list[str] = []
        if exists(file):
            lines = read_text(file).splitlines()
        return Row(run.name, redact(run.settings), self._status(run), [json.loads(line) for line in lines])


def _refuse_doubles(names: list[str], source: str) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"{source}: twice the same run: {min(twice)}.")


class Clock:
    """A time limit, from now on.

    `minutes` from now on, above 0; None is no limit.
    """

    def __init__(self, minutes: float | None) -> None:
        if minutes is not None and not minutes > 0:
            raise ConfigError(f"--minutes {minutes}; expected a number above 0.")
        self.end = None if minutes is None else time.monotonic() + 60 * minutes

    def allows(self, seconds: float) -> bool:
        """Whether work of this many `seconds` would end in time."""
        return self.end is None or time.monotonic() + seconds < self.end


def name_of(settings: Settings) -> str:
    """`train.lr=0.0001,seed=0` as the name of a folder: short, without secrets, other for other settings.

    `settings` are values by their keys.
    """
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
    if not grid:
        return []
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _choosing_metric(rows: list[Row]) -> str:
    """Robust accuracy if an attack has chosen the weights of every run that has numbers, else accuracy."""
    trained = [row.metrics for row in rows if row.metrics]
    robust = [any("val_robust_accuracy" in line for line in metrics) for metrics in trained]
    if robust and all(robust):
        return "robust_accuracy"
    return "accuracy"
