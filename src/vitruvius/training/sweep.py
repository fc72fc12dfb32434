"""Sweep: one recipe trained under many settings, with a table at the end; called again it goes on where it stopped.

A sweep file: `recipe`, `grid` (every combination of the values), `list` (sets of overrides, a run each), `out`.
A run that fails is reported and the others go on. Under torchrun all processes work on one run after the other.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitruvius._config import build
from vitruvius._errors import ConfigError, Preempted, VitruviusError
from vitruvius._files import atomic_write_text, exists, join, read_text
from vitruvius._keys import key, key_from
from vitruvius._processes import Process, process_group
from vitruvius._yaml import read_yaml, to_plain
from vitruvius.training._run.folder import flatten
from vitruvius.training._sweep_table import Row, best_of, markdown, write_tables
from vitruvius.training._train import train
from vitruvius.training.config import Config, read_recipe

Settings = dict[str, Any]
Find = Callable[[str], Path]


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A sweep file."""

    recipe: str = field(metadata={"help": "a path, or the name of a packaged recipe"})
    grid: dict[str, Any] = key_from(dict, "key: list of values; every combination is a run")
    list: tuple[dict[str, Any], ...] = key((), "sets of overrides, a run each")
    out: str | None = key(None, "folder of the runs; null: runs/sweeps/<name of the file>")
    metric: str | None = key(None, "a column of metrics.jsonl; null: what chooses the best weights")
    order: Literal["max", "min"] = key("max", "whether a larger or a smaller metric is better")


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
    """All runs of a sweep file, every one checked before the first begins."""

    def __init__(self, file: str | Path, overrides: Iterable[str] = (), *, find: Find = Path) -> None:
        overrides = list(overrides)
        self.settings: SweepConfig = build(SweepConfig, read_yaml(file), source=str(file))
        outs = [text.partition("=")[2] for text in overrides if text.startswith("out=")]
        self.folder = outs[-1] if outs else self.settings.out or str(Path("runs") / "sweeps" / Path(file).stem)
        self.common = [text for text in overrides if not text.startswith("out=")]
        self.recipe = find(self.settings.recipe)
        self._ledger = join(self.folder, "sweep.json")
        self.runs = self._plan(str(file))

    def train(self, *, quiet: bool = True, tell: Callable[[str], None] = lambda _: None) -> str:
        """Train what is not finished; the summary table, which is also written as summary.csv and summary.md."""
        device = self.runs[0].config.train.device
        with process_group(device) as process:  # one group for all runs
            for number, run in enumerate(self.runs, 1):
                if process.broadcast(self._status(run)) != "finished":
                    tell(f"[{number}/{len(self.runs)}] {run.name}")
                    outcome = self._train(run, process, quiet)
                    process.on_first(lambda run=run, outcome=outcome: self._note(run, outcome))  # type: ignore[misc]
                    if outcome != "finished":
                        tell(f"    {outcome}")
            return process.on_first(self.summarise)

    def summarise(self) -> str:
        """The table of all runs as they stand, best first; written beside them."""
        rows = [self._row(run) for run in self.runs]
        metric = self.settings.metric or ("robust_accuracy" if _all_robust(rows) else "accuracy")
        sign = 1 if self.settings.order == "min" else -1
        scored = [row.scored(best_of(row.metrics, metric, self.settings.order)) for row in rows]
        scored.sort(key=lambda row: (row.score is None, sign * (row.score or 0.0)))
        write_tables(self.folder, scored, metric)
        return markdown(scored, metric)

    def listing(self) -> str:
        """Every run and how it stands; nothing is written."""
        width = max(len(run.name) for run in self.runs)
        lines = [f"{run.name:<{width}}  {self._status(run)}" for run in self.runs]
        return "\n".join([f"{self.recipe}: {len(self.runs)} runs in {self.folder}", *lines])

    def _plan(self, source: str) -> list[Planned]:
        sets = [*_combinations(self.settings.grid, source), *self.settings.list]
        clash = {key for settings in sets for key in settings} & {text.partition("=")[0] for text in self.common}
        if clash or any("out" in settings for settings in sets):
            raise ConfigError(f"{source}: {', '.join(sorted(clash)) or 'out'} is what the sweep varies; do not set it.")
        names = [name_of(settings) for settings in sets]
        twice = {name for name in names if names.count(name) > 1}
        if twice or not sets:
            raise ConfigError(f"{source}: {'twice the same run: ' + min(twice) if twice else 'neither grid nor list'}.")
        return [self._planned(name, settings) for name, settings in zip(names, sets, strict=True)]

    def _planned(self, name: str, settings: Settings) -> Planned:
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        config = read_recipe(self.recipe, [*self.common, *words, f"out={join(self.folder, name)}"])
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
            train(run.config, quiet=quiet)
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

    def _note(self, run: Planned, status: str) -> None:
        notes = {**self._notes(), run.name: {"status": status, "mark": run.mark, "settings": run.settings}}
        atomic_write_text(self._ledger, json.dumps(notes, indent=1) + "\n")

    def _notes(self) -> dict[str, Any]:
        return json.loads(read_text(self._ledger)) if exists(self._ledger) else {}

    def _row(self, run: Planned) -> Row:
        file = join(self.folder, run.name, "metrics.jsonl")
        lines = read_text(file).splitlines() if exists(file) else []
        return Row(run.name, run.settings, self._status(run), [json.loads(line) for line in lines])


def name_of(settings: Settings) -> str:
    """`train.lr=0.0001,seed=0` as the name of a folder; short, and different for different settings."""
    text = ",".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()
    )
    name = re.sub(r"[^\w.=,+-]+", "-", text)
    if name == text and len(name) <= 120:
        return name
    return f"{name[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _combinations(grid: dict[str, Any], source: str) -> list[Settings]:
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{source}: grid.{name} = {values!r}, expected a list of values, e.g. [1e-4, 5e-4].")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []


def _all_robust(rows: list[Row]) -> bool:
    """Whether an attack has chosen the weights of every run that has numbers."""
    trained = [row for row in rows if row.metrics]
    return bool(trained) and all(any("val_robust_accuracy" in m for m in row.metrics) for row in trained)
