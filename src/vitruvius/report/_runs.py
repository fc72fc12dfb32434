"""A run folder as the report sees it: what is there is read, what is missing or damaged is remarked.

config.yaml is required; metrics.jsonl, evaluation/report.json, evaluation/shifts, model.json, maps.safetensors and the
examples of attention are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitruvius._errors import RunError
from vitruvius.evaluation.shift_report import ShiftReport
from vitruvius.report._examples import Examples, read_examples
from vitruvius.report._numbers import interval, number
from vitruvius.report._readers import read_config, read_epochs, read_json, read_maps, read_shifts, read_weight_counts
from vitruvius.report.style import Series, series


@dataclass(frozen=True, kw_only=True)
class Threat:
    """Accuracy under one threat, with its 95 % interval where the evaluation gave one."""

    name: str
    spec: str
    eps: float | None
    accuracy: float
    low: float | None
    high: float | None
    n: int | None
    top5: float | None
    loss: float | None
    seconds: float | None
    doubts: tuple[str, ...] = ()  # open findings: the figure is shown with them

    @property
    def detail(self) -> str:
        """What stands beside the accuracy: its interval, and why it is doubtful."""
        parts = [interval(self.low, self.high)]
        if self.doubts:
            parts.append(f"doubtful: {', '.join(self.doubts)}")
        return "; ".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, read whole."""

    name: str
    folder: Path
    index: int  # its place on the page, and so its colour
    config: dict[str, Any]
    epochs: list[dict[str, Any]]
    evaluation: dict[str, Any]
    threats: list[Threat]
    worst_case: Threat | None
    model: dict[str, Any]  # model.json: parameters, sites
    weights: dict[str, int]  # numbers stored per part of the checkpoint
    maps: dict[str, np.ndarray]  # site → (H, N, M)
    examples: Examples | None
    remarks: list[str]
    shifts: dict[str, ShiftReport] = field(default_factory=dict)  # by name

    @property
    def look(self) -> Series:
        return series(self.index)

    def threat(self, name: str) -> Threat | None:
        """The first threat of that name."""
        return next((threat for threat in self.threats if threat.name == name), None)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read every run; all must be run folders."""
    check_runs(folders)
    named = zip(folders, _names(folders), strict=True)
    return [read_run(folder, name, index) for index, (folder, name) in enumerate(named)]


def check_runs(folders: Sequence[Path]) -> None:
    """Refuse `folders` that are not run folders, before anything is read or written."""
    if not folders:
        raise RunError("a report needs at least one run folder; none was given.")
    for folder in folders:
        _check(folder)


def say_doubts(runs: Sequence[Run]) -> str:
    """A sentence for a caption: which figures are doubtful, and why; nothing if none is."""
    said = []
    for run in runs:
        for threat in run.threats:
            if threat.doubts:
                said.append(f"{run.name} under {threat.name} ({', '.join(threat.doubts)})")
    if not said:
        return ""
    return f" Doubtful, see the remarks: {'; '.join(said)}."


def read_run(folder: Path, name: str, index: int) -> Run:
    """Read one folder; `remarks` tells what was left out and why."""
    remarks: list[str] = []
    # `evaluate MODEL --out FOLDER`
    if (folder / "report.json").is_file():
        judged = folder
    else:
        judged = folder / "evaluation"
    evaluation = read_json(judged / "report.json", remarks, lost="the comparison of threats")
    worst = evaluation.get("worst_case")
    said = evaluation.get("remarks")
    remarks += [f"evaluation: {remark}" for remark in said] if isinstance(said, list) else []
    return Run(
        name=name,
        folder=folder,
        index=index,
        config=read_config(folder / "config.yaml"),
        epochs=read_epochs(folder / "metrics.jsonl", remarks),
        evaluation=evaluation,
        threats=_read_threats(evaluation.get("threats"), remarks),
        worst_case=_read_threat({"name": "worst case", **worst}) if isinstance(worst, dict) else None,
        model=read_json(folder / "model.json", remarks, lost="the table of attention sites"),
        weights=read_weight_counts(folder, remarks),
        maps=read_maps(folder / "maps.safetensors", remarks),
        examples=read_examples(folder, remarks),
        remarks=remarks,
        shifts=read_shifts(judged / "shifts", remarks),
    )


def _check(folder: Path) -> None:
    if not folder.is_dir():
        found = "does not exist"
        if folder.exists():
            found = "is a file"
        raise RunError(f"{folder} {found}; a report needs run folders, as `vitruvius train` and `evaluate` write them.")
    if not (folder / "config.yaml").is_file():
        inside = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise RunError(f"{folder} is not a run folder: it has no config.yaml. It holds: {inside}.")


def _names(folders: Sequence[Path]) -> list[str]:
    """Folder names; with parents where two are alike, with a number where even those are."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" for path in paths]
    seen: dict[str, int] = {}
    for place, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            names[place] = f"{name} ({seen[name]})"
    return names


def _read_threats(entries: Any, remarks: list[str]) -> list[Threat]:
    """Attacks; corruptions have a severity, and a report of their own among the shifts."""
    threats: list[Threat] = []
    if not isinstance(entries, list):
        return threats
    for entry in entries:
        if not isinstance(entry, dict):
            remarks.append(f"evaluation/report.json: threat {entry!r} has no finite accuracy; it is left out.")
        elif entry.get("severity") is None:
            threats += _read_attack(entry, remarks)
    return threats


def _read_attack(entry: dict[str, Any], remarks: list[str]) -> list[Threat]:
    """The threat, or a remark and none."""
    threat = _read_threat(entry)
    if threat is not None:
        return [threat]
    label = entry.get("name", "without a name")
    remarks.append(f"evaluation/report.json: threat {label} has no finite accuracy; it is left out.")
    return []


def _read_threat(entry: dict[str, Any]) -> Threat | None:
    accuracy = number(entry.get("accuracy"))
    if accuracy is None:
        return None
    n = number(entry.get("n"))
    name = str(entry.get("name", entry.get("spec", "threat")))
    return Threat(
        name=name,
        spec=str(entry.get("spec", name)),
        eps=number(entry.get("eps")),
        accuracy=accuracy,
        low=number(entry.get("low")),
        high=number(entry.get("high")),
        n=None if n is None else int(n),
        top5=number(entry.get("top5")),
        loss=number(entry.get("loss")),
        seconds=number(entry.get("seconds")),
        doubts=_read_doubts(entry.get("doubts")),
    )


def _read_doubts(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list):
        return ()
    return tuple(map(str, names))
