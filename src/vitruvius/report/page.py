"""The page: runs are read, sections drawn in order, one HTML file written whole; it needs no network.

Folders may hold more than one run. A sweep, with sweep.json beside its runs, is its runs and a table of them; a study,
with study.json, table.csv and figure.png, is its table and its figure.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from vitruvius._errors import RunError
from vitruvius._files import atomic_write_text, check_out
from vitruvius._format import DASH, count, format_duration, natural_key, number, percent
from vitruvius._style import (
    DARK,
    HEAT,
    LIGHT,
    MARKERS,
    css_variables,
    figure_style,
    in_percent,
    legend_below,
    new_axes,
    series,
)
from vitruvius._version import __version__
from vitruvius.report.blocks import (
    Block,
    Cell,
    Drawing,
    Html,
    Note,
    Table,
    data_link,
    number_cell,
    plain_table,
    run_cell,
    sections,
)
from vitruvius.report.run import Run, label_threats, read_json, read_runs
from vitruvius.report.sections.summary import compare
from vitruvius.targets.base import local_run

Part = tuple[str, str, Sequence[Block]]  # address, heading, blocks
SWEEP = "sweep.json"
STUDY = "study.json"
MOST_THREATS = 5  # drawn beside the accuracy of a sweep's runs; the table has all


def write_page(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    title: str = "A vitruvius report",
    evaluations: Mapping[Path, Path] | None = None,
) -> Path:
    """Write one self-contained HTML page about run folders, sweeps and studies; returns its path.

    Pieces that a run does not have are left out and named under Remarks. Nothing is written unless all is well.

    runs: run folders or their URLs, side by side; the folder of a sweep means its runs and a table of them, that of a
        study its table and figure, and the runs it is about.
    out: the file of the page.
    title: its heading.
    evaluations: by run folder, the folder of an evaluation that lies elsewhere than in the run.
    """
    out = check_page(out)
    folders = [Path(local_run(run)) for run in runs]
    run_folders = runs_in(folders)
    read = read_runs(run_folders, evaluations) if run_folders or not folders else []
    atomic_write_text(out, render_page(read, title=title, parts=gathered_parts(folders, read)))
    return out


def check_page(out: str | Path) -> Path:
    """Refuse a place where no page can be written; nothing is made there."""
    check_out(out, example="report.html")
    if not Path(out).absolute().parent.is_dir():
        raise RunError(f"cannot write {out}: the folder {Path(out).parent} does not exist. Make it first.")
    return Path(out)


def render_page(runs: Sequence[Run], *, title: str, parts: Sequence[Part] = ()) -> str:
    """The page as text; `parts` come before the sections about the runs, which are shown in the given order."""
    ordered = sorted(sections, key=lambda name: (sections[name].order, name)) if runs else []
    drawn = [(name, sections[name].title, sections[name](runs)) for name in ordered]
    return (
        _environment()
        .get_template("templates/page.html.j2")
        .render(
            title=title,
            runs=runs,
            parts=[part for part in (*parts, *drawn) if part[2]],
            made=datetime.now().astimezone(),
            version=__version__,
            motif=Markup(_read("motif.svg").strip()),
            heat=HEAT,
            css=Markup(_colours() + _read("style.css")),
            scripts=[Markup(_read(name)) for name in ("page.js", "viewer.js")],
        )
    )


@cache
def _environment() -> Environment:
    settings: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FunctionLoader(_read), undefined=StrictUndefined, **settings)
    environment.filters["channel"] = (
        lambda colours, place: " ".join(  # 0 red, 1 green, 2 blue, in [0, 1]
            f"{int(colour[1 + 2 * place : 3 + 2 * place], 16) / 255:.4f}" for colour in colours
        )
    )
    return environment


def _read(name: str) -> str:
    return (files("vitruvius.report") / name).read_text("utf-8")


def _colours() -> str:
    """The palettes as CSS variables: light, dark by the system's wish or the reader's, and light on paper."""
    light, dark = css_variables(LIGHT), css_variables(DARK)
    return (
        f":root{{color-scheme:light;{light}--heat:url(#heat-light)}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light])"
        f"{{color-scheme:dark;{dark}--heat:url(#heat-dark)}}}}\n"
        f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{dark}--heat:url(#heat-dark)}}}}\n"
    )


# sweeps and studies


def is_sweep(folder: Path) -> bool:
    """Whether `folder` is that of a sweep."""
    return (folder / SWEEP).is_file() and not (folder / "config.yaml").is_file()


def is_study(folder: Path) -> bool:
    """Whether `folder` is that of a study."""
    return (folder / STUDY).is_file() and not (folder / "config.yaml").is_file()


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """The run folders that `folders` mean: themselves, the runs of a sweep, those of a study, each once."""
    runs: list[Path] = []
    for folder in folders:
        if is_sweep(folder):
            runs += [run for run in _runs_of_sweep(folder) if run not in runs]
        elif is_study(folder):  # those of its subjects that are run folders and still there
            subjects = map(Path, read_json(folder / "subjects.json", [], lost="its subjects"))
            runs += [run for run in subjects if (run / "config.yaml").is_file() and run not in runs]
        else:
            runs.append(folder)
    return runs


def gathered_parts(folders: Sequence[Path], runs: Sequence[Run]) -> list[Part]:
    """Address, heading and blocks of each sweep and study; `runs` are all that the page is about, read."""
    parts: list[Part] = []
    for folder in filter(lambda folder: is_sweep(folder) or is_study(folder), folders):
        name, title = f"gathered-{len(parts)}", folder.resolve().name
        if is_sweep(folder):
            own = [run for run in runs if run.folder in _runs_of_sweep(folder)]
            parts.append((name, f"Sweep: {title}", sweep_blocks(folder, own, name)))
        else:
            parts.append((name, f"Study: {title}", study_blocks(folder, name)))
    return parts


def sweep_blocks(folder: Path, runs: Sequence[Run], name: str) -> list[Block]:
    """A figure and a table of the `runs` of a sweep that have started, best first; downloads are called `name`."""
    remarks: list[str] = []
    notes = read_json(folder / SWEEP, remarks, lost="the table of the sweep")
    ranked = sorted(runs, key=lambda run: -(best_accuracy(run) or -1.0))
    blocks: list[Block] = []
    if ranked:
        best = [f"{run.name} {percent(best_accuracy(run))}" for run in ranked]
        accuracies = {run.name: {threat.spec: threat.accuracy for threat in run.threats} for run in ranked}
        drawing = Drawing(
            name=f"{name}-figure",
            panels=[(draw_sweep(ranked), f"Dot plot of accuracy: {'; '.join(best)}.")],
            caption="Best accuracy on held-out images over the epochs, and accuracy under each threat after training.",
            rows=[{"run": run.name, "best": best_accuracy(run), **accuracies[run.name]} for run in ranked],
        )
        blocks += [drawing, _sweep_table(ranked, notes, name)]
    waiting = notes.keys() - {run.folder.name for run in runs}
    texts = [f"Without a folder: {', '.join(run for run in notes if run in waiting)}."] if waiting else []
    statuses = {run: str(note.get("status", "")) for run, note in notes.items()}
    texts += [f"{run}: {status}" for run, status in statuses.items() if status.startswith("failed")]
    return [*blocks, *(Note(text=text) for text in [*texts, *remarks])]


def best_accuracy(run: Run) -> float | None:
    """The best accuracy on held-out images over the epochs, of weights or their average; None without one."""
    return max(run.logged("val_accuracy") + run.logged("ema_accuracy"), default=None)


def draw_sweep(runs: Sequence[Run]) -> Figure:
    """One line per run: its best accuracy on held-out images, and that under each threat."""
    labels = dict(list(label_threats(runs).items())[:MOST_THREATS])
    dots = [("best on held-out images", LIGHT["ink"], "|", [best_accuracy(run) for run in runs])]
    for place, (spec, label) in enumerate(labels.items()):
        accuracies = [_accuracy(run, spec) for run in runs]
        dots.append((label, series(place).colour, MARKERS[place % len(MARKERS)], accuracies))
    with figure_style():
        figure, axes = new_axes(6.2, 1.0 + 0.3 * len(runs))
        for label, colour, marker, values in dots:
            known = [(value, place) for place, value in enumerate(values) if value is not None]
            if known:
                look: dict[str, Any] = {"linestyle": "none", "color": colour, "marker": marker, "markersize": 7}
                axes.plot(*zip(*known, strict=True), label=label, **look)
        axes.set_yticks(range(len(runs)), [run.name for run in runs])
        axes.set(ylim=(len(runs) - 0.5, -0.5), xlim=(-0.02, 1.02), xlabel="accuracy")
        in_percent(axes.xaxis)
        legend_below(figure)
    return figure


def _sweep_table(runs: Sequence[Run], notes: Mapping[str, Any], name: str) -> Table:
    """One line per run: what differs, how it stands, how good it is."""
    keys = compare(runs)
    differing = {key: values for key, values in keys.items() if not key.startswith("attention")}
    if len(differing) < len(keys):  # all that differs in attention as one key, in words
        differing = {"attention": [run.attention for run in runs], **differing}
    labels = label_threats(runs)
    titles = ["run", *differing, "best", *labels.values(), "epochs", "training", "status"]
    cells = []
    for place, run in enumerate(runs):
        note = notes.get(run.folder.name) or {}
        settings = [values[place] for values in differing.values()]
        shares = [best_accuracy(run), *(_accuracy(run, spec) for spec in labels)]
        cells.append(
            [
                run_cell(run),
                *(Cell(text=text, value=_as_number(text)) for text in settings),
                *(number_cell(share, percent) for share in shares),
                number_cell(len(run.epochs), count),
                number_cell(sum(run.logged("seconds")), format_duration),
                Cell(text=str(note.get("status", "unfinished")).partition(":")[0]),
            ]
        )
    caption = "What differs between the runs, and what came of it; best: on held-out images over the epochs."
    return plain_table(f"{name}-table", titles, cells, caption)


def _accuracy(run: Run, spec: str) -> float | None:
    threat = run.under(spec)
    return None if threat is None else threat.accuracy


def study_blocks(folder: Path, name: str) -> list[Block]:
    """The settings, the figure and the table of a study; the downloads are called `name`."""
    remarks: list[str] = []
    facts = read_json(folder / STUDY, remarks, lost="the settings of the study")
    settings = ", ".join(f"{key} {value}" for key, value in (facts.get("settings") or {}).items())
    text = f"Study {facts.get('study', 'without a name')}; settings: {settings or 'none, all are the defaults'}."
    blocks: list[Block] = [Note(text=text)]
    picture = folder / "figure.png"
    if picture.is_file():
        alt = f"Figure of the study {facts.get('study', folder.name)}; its numbers are in the table."
        image = f'<img class="figure" src="{data_link("image/png", picture.read_bytes())}" alt="{escape(alt)}">'
        blocks.append(Html(markup=Markup(image)))
    table = folder / "table.csv"
    if table.is_file():
        with table.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        titles = list(rows[0]) if rows else []
        cells = [[_csv_cell(row[title]) for title in titles] for row in rows]
        blocks.append(Table(name=f"{name}-table", titles=titles, cells=cells, rows=rows))
    else:
        remarks.append(f"{folder.name} has no table.csv yet: the study has not ended.")
    return [*blocks, *(Note(text=remark) for remark in remarks)]


def _csv_cell(text: str) -> Cell:
    value = _as_number(text)
    whole = value is None or value.is_integer()
    return Cell(text=text or DASH if whole else f"{value:.4g}", value=value)


def _as_number(text: str) -> float | None:
    try:
        return number(float(text))
    except ValueError:
        return None


def _runs_of_sweep(folder: Path) -> list[Path]:
    runs = sorted((path.parent for path in folder.glob("*/config.yaml")), key=lambda run: natural_key(run.name))
    if not runs:
        raise RunError(f"{folder} is the folder of a sweep none of whose runs has started.")
    return runs
