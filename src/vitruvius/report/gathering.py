"""Folders that hold more than one run: a sweep is its runs and a table of them, a study its table and its figure.

A sweep has sweep.json beside its runs, as `vitruvius sweep` writes it; a study study.json, table.csv and figure.png.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from vitruvius._errors import RunError
from vitruvius.report._blocks import Block, Cell, Column, Drawing, Html, Note, Table
from vitruvius.report._markup import data_link, inline_svg
from vitruvius.report._names import describe_attention, label_threats
from vitruvius.report._numbers import DASH, duration, number, percent
from vitruvius.report._readers import natural, read_json
from vitruvius.report._runs import Run
from vitruvius.report.sections.config import compare
from vitruvius.report.style import LIGHT, MARKERS, figure_style, legend_below, new_axes, series

SWEEP = "sweep.json"
STUDY = "study.json"
MOST_THREATS = 5  # drawn beside the accuracy of a sweep's runs; the table has all


@dataclass(frozen=True)
class Part:
    """A piece of a page that is made of a folder and not of each run: its address and its heading."""

    name: str
    title: str


def is_sweep(folder: Path) -> bool:
    """Whether `folder` is that of a sweep."""
    return (folder / SWEEP).is_file() and not (folder / "config.yaml").is_file()


def is_study(folder: Path) -> bool:
    """Whether `folder` is that of a study."""
    return (folder / STUDY).is_file() and not (folder / "config.yaml").is_file()


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """The run folders that `folders` mean: themselves, the runs of a sweep, those of a study, each once."""
    found: list[Path] = []
    for folder in folders:
        if is_sweep(folder):
            _add_new(found, _runs_of_sweep(folder))
        elif is_study(folder):
            _add_new(found, _runs_of_study(folder))
        else:
            found.append(folder)
    return found


def _add_new(found: list[Path], runs: Sequence[Path]) -> None:
    found += [run for run in runs if run not in found]


def gathered_parts(folders: Sequence[Path], runs: Sequence[Run]) -> list[tuple[Part, Sequence[Block]]]:
    """What the page shows of sweeps and studies among `folders`; `runs` are all that the page is about, read."""
    parts: list[tuple[Part, Sequence[Block]]] = []
    for folder in folders:
        name = f"gathered-{len(parts)}"
        if is_sweep(folder):
            own = [run for run in runs if run.folder in _runs_of_sweep(folder)]
            parts.append((Part(name, f"Sweep: {folder.resolve().name}"), sweep_blocks(folder, own, name)))
        elif is_study(folder):
            parts.append((Part(name, f"Study: {folder.resolve().name}"), study_blocks(folder, name)))
    return parts


def sweep_blocks(folder: Path, runs: Sequence[Run], name: str) -> list[Block]:
    """A figure and a table of the runs of a sweep, best first, with what differs between them.

    folder: of the sweep. runs: those of its runs that have begun. name: what the downloads are called.
    """
    remarks: list[str] = []
    notes = read_json(folder / SWEEP, remarks, lost="the table of the sweep")
    ranked = sorted(runs, key=lambda run: -(best_accuracy(run) or -1.0))
    blocks: list[Block] = []
    if ranked:
        blocks += [_sweep_drawing(ranked, name), _sweep_table(ranked, notes, name)]
    begun = {run.folder.name for run in runs}
    return [*blocks, *(Note(text=text) for text in [*_remarks_on(notes, begun), *remarks])]


def _remarks_on(notes: Mapping[str, Any], begun: set[str]) -> list[str]:
    """Runs of a sweep that have not begun, and those that have failed."""
    found = []
    waiting = [run for run in notes if run not in begun]
    if waiting:
        found.append(f"Without a folder: {', '.join(waiting)}.")
    return [*found, *(f"{run}: {note.get('status')}" for run, note in notes.items() if _has_failed(note))]


def best_accuracy(run: Run) -> float | None:
    """The best accuracy on held-out images over the epochs of `run`, of weights or their average; None without one."""
    values = [number(row.get(key)) for row in run.epochs for key in ("val_accuracy", "ema_accuracy")]
    return max((value for value in values if value is not None), default=None)


def draw_sweep(runs: Sequence[Run]) -> Figure:
    """One line per run, best first: its best accuracy on held-out images, and that under each threat.

    `runs` are in the order in which they are drawn.
    """
    labels = dict(list(label_threats(runs).items())[:MOST_THREATS])
    with figure_style():
        figure, axes = new_axes(6.2, 1.0 + 0.3 * len(runs))
        best = [best_accuracy(run) for run in runs]
        _draw_dots(axes, best, LIGHT["ink"], "|", "best on held-out images")
        for place, (spec, label) in enumerate(labels.items()):
            values = [_accuracy(run, spec) for run in runs]
            _draw_dots(axes, values, series(place).colour, MARKERS[place % len(MARKERS)], label)
        axes.set_yticks(range(len(runs)), [run.name for run in runs])
        axes.set_ylim(len(runs) - 0.5, -0.5)
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("accuracy")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        legend_below(figure)
    return figure


def study_blocks(folder: Path, name: str) -> list[Block]:
    """The settings, the figure and the table of a study.

    folder: of the study. name: what the downloads are called.
    """
    remarks: list[str] = []
    said = read_json(folder / STUDY, remarks, lost="the settings of the study")
    blocks: list[Block] = [Note(text=_say_settings(said))]
    picture = folder / "figure.png"
    if picture.is_file():
        alt = f"Figure of the study {said.get('study', folder.name)}; its numbers are in the table."
        image = f'<img class="figure" src="{data_link("image/png", picture.read_bytes())}" alt="{escape(alt)}">'
        blocks.append(Html(markup=Markup(image)))
    table = folder / "table.csv"
    if table.is_file():
        with table.open(encoding="utf-8", newline="") as file:
            blocks.append(_csv_table(list(csv.DictReader(file)), name))
    else:
        remarks.append(f"{folder.name} has no table.csv yet: the study has not ended.")
    return [*blocks, *(Note(text=remark) for remark in remarks)]


def _runs_of_sweep(folder: Path) -> list[Path]:
    runs = sorted((path.parent for path in folder.glob("*/config.yaml")), key=lambda run: natural(run.name))
    if not runs:
        raise RunError(f"{folder} is the folder of a sweep none of whose runs has begun.")
    return runs


def _runs_of_study(folder: Path) -> list[Path]:
    """The subjects that are run folders and still there."""
    subjects = read_json(folder / "subjects.json", [], lost="its subjects")
    return [Path(subject) for subject in subjects if (Path(subject) / "config.yaml").is_file()]


def _sweep_drawing(runs: Sequence[Run], name: str) -> Drawing:
    alt = "Dot plot of accuracy: " + "; ".join(f"{run.name} {percent(best_accuracy(run))}" for run in runs) + "."
    return Drawing(
        name=f"{name}-figure",
        panels=[inline_svg(draw_sweep(runs), name=name, alt=alt)],
        caption="Best accuracy on held-out images over the epochs, and accuracy under each threat after training.",
        rows=[{"run": run.name, "best": best_accuracy(run), **_accuracies(run)} for run in runs],
    )


def _sweep_table(runs: Sequence[Run], notes: dict[str, Any], name: str) -> Table:
    """One line per run: what differs, how it stands, how good it is."""
    differing = _what_differs(runs)
    labels = label_threats(runs)
    titles = ["run", *differing, "best", *labels.values(), "epochs", "training", "status"]
    numeric = {"best", "epochs", "training", *labels.values()}
    cells = [_sweep_cells(run, place, differing, labels, notes) for place, run in enumerate(runs)]
    rows = []
    for line in cells:
        rows.append({title: _plain(cell) for title, cell in zip(titles, line, strict=True)})
    return Table(
        name=f"{name}-table",
        columns=[Column(title=title, numeric=title in numeric) for title in titles],
        cells=cells,
        rows=rows,
        caption="What differs between the runs, and what came of it; best: on held-out images over the epochs.",
    )


def _what_differs(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Key → its value in each run; all that differs in attention as one key, in words."""
    keys = compare(runs)
    differing = {key: values for key, values in keys.items() if not key.startswith("attention")}
    if len(differing) < len(keys):
        return {"attention": [describe_attention(run) for run in runs], **differing}
    return differing


def _sweep_cells(
    run: Run, place: int, differing: dict[str, list[str]], labels: dict[str, str], notes: dict[str, Any]
) -> list[Cell]:
    note = notes.get(run.folder.name) or {}
    best = best_accuracy(run)
    seconds = sum(number(row.get("seconds")) or 0.0 for row in run.epochs)
    accuracies = [_accuracy(run, spec) for spec in labels]
    return [
        Cell(text=run.name, colour=run.look.name),
        *(Cell(text=values[place], value=_as_number(values[place])) for values in differing.values()),
        Cell(text=percent(best), value=best),
        *(Cell(text=percent(value), value=value) for value in accuracies),
        Cell(text=str(len(run.epochs)), value=len(run.epochs)),
        Cell(text=duration(seconds), value=seconds),
        Cell(text=str(note.get("status", "unfinished")).partition(":")[0]),
    ]


def _csv_table(rows: list[dict[str, str]], name: str) -> Table:
    """The rows of a file as they are; a column of numbers is one that holds nothing else."""
    titles = list(rows[0]) if rows else []
    columns = [Column(title=title, numeric=_is_numeric(rows, title)) for title in titles]
    cells = [[_csv_cell(row[title]) for title in titles] for row in rows]
    return Table(name=f"{name}-table", columns=columns, cells=cells, rows=rows)


def _is_numeric(rows: list[dict[str, str]], title: str) -> bool:
    return all(_as_number(row[title]) is not None for row in rows if row[title])


def _csv_cell(text: str) -> Cell:
    value = _as_number(text)
    if value is None or value.is_integer():
        return Cell(text=text or DASH, value=value)
    return Cell(text=f"{value:.4g}", value=value)


def _say_settings(said: dict[str, Any]) -> str:
    settings = said.get("settings") or {}
    words = ", ".join(f"{key} {value}" for key, value in settings.items()) or "none, all are the defaults"
    return f"Study {said.get('study', 'without a name')}; settings: {words}."


def _draw_dots(axes: Axes, values: Sequence[float | None], colour: str, marker: str, label: str) -> None:
    known = [(value, place) for place, value in enumerate(values) if value is not None]
    if known:
        x, y = zip(*known, strict=True)
        axes.plot(x, y, linestyle="none", color=colour, marker=marker, markersize=7, label=label)


def _accuracy(run: Run, spec: str) -> float | None:
    return next((threat.accuracy for threat in run.threats if threat.spec == spec), None)


def _accuracies(run: Run) -> dict[str, float]:
    return {threat.spec: threat.accuracy for threat in run.threats}


def _has_failed(note: Any) -> bool:
    return isinstance(note, dict) and str(note.get("status", "")).startswith("failed")


def _plain(cell: Cell) -> object:
    if cell.value is not None:
        return cell.value
    return cell.text


def _as_number(text: str) -> float | None:
    try:
        return number(float(text))
    except ValueError:
        return None
