"""Training curves: loss, accuracy, learning rate and whatever else was logged, all runs in one panel each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vitruvius.report._blocks import Block, Drawing, Key
from vitruvius.report._markup import inline_svg
from vitruvius.report._names import run_keys
from vitruvius.report._numbers import number
from vitruvius.report._runs import Run
from vitruvius.report._section import section
from vitruvius.report.style import LINES, figure_style, legend_below, new_axes

UNDRAWN = ("epoch", "seconds", "images_per_second")  # cost, shown elsewhere
EVENTS = ("alarms", "rollbacks", "skipped_updates")  # drawn if there are any
ATTACKED = ("robust", "adversarial", "single_step", "multi_step")
WORDS = {
    "val": "held-out",
    "train": "training",
    "ema": "averaged weights",
    "adversarial": "under attack",
    "val robust": "held-out, the attack that chooses",
    "ema robust": "averaged weights, the attack that chooses",
    "single step": "alarm: one step",
    "multi step": "alarm: many steps",
}


@section("curves", title="Training", order=20)
def curves(runs: Sequence[Run]) -> Sequence[Block]:
    """Loss, accuracy, learning rate and other metrics over the epochs. `runs` are those of the page."""
    panels = group_metrics(runs)
    if not panels:
        return []
    lines = line_styles(panels)
    drawn = [
        inline_svg(draw_metrics(runs, title, keys, lines), name=f"curves-{place}", alt=_alt(runs, title, keys))
        for place, (title, keys) in enumerate(panels.items())
    ]
    rows = [{"run": run.name, **row, "epoch": row["epoch"] + 1} for run in runs for row in run.epochs]
    legend = run_keys([run for run in runs if run.epochs]) + _line_keys(lines)
    return [Drawing(name="training", panels=drawn, caption="Every epoch of training.", rows=rows, legend=legend)]


def group_metrics(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Panel title → metrics: held-out before training, losses together, accuracies together.

    `runs` are those of the page.
    """
    keys = {key for run in runs for row in run.epochs for key in _drawn_keys(row)}
    panels: dict[str, list[str]] = {"loss": [], "accuracy": [], "accuracy under attack": [], "learning rate": []}
    for key in sorted(keys, key=_prominence):
        panels.setdefault(_panel(key), []).append(key)
    return {title: keys for title, keys in panels.items() if keys}


def _drawn_keys(row: dict[str, Any]) -> list[str]:
    return [key for key, value in row.items() if _is_drawn(key, value)]


def _is_drawn(key: str, value: Any) -> bool:
    """Whether a number belongs into a panel; events only where they have happened."""
    if key in UNDRAWN or number(value) is None:
        return False
    return bool(value) or key not in EVENTS


def line_styles(panels: dict[str, list[str]]) -> dict[str, Any]:
    """A line for each kind of metric (held-out, training, …), the same in all panels that show several.

    `panels` are the metrics of each panel, by its title.
    """
    stems = [_stem(key) for keys in panels.values() for key in keys if len(keys) > 1]
    return {stem: LINES[place % len(LINES)] for place, stem in enumerate(dict.fromkeys(stems))}


def draw_metrics(
    runs: Sequence[Run], title: str, keys: Sequence[str], lines: dict[str, Any], *, legend: bool = False
) -> Figure:
    """One panel: colours are runs, line styles are metrics; a figure that stands alone wants its `legend`.

    `runs` are those of the page; `title` is that of the panel; `keys` are its metrics; `lines` the line style of each.
    """
    with figure_style():
        figure, axes = new_axes(4.5, 2.9)
        for run in runs:
            for key in keys:
                _draw_line(axes, run, key, lines.get(_stem(key), "-"))
        axes.set_title(title)
        axes.set_xlabel("epoch")
        axes.set_ylabel(title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        if title.startswith("accuracy"):
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        if legend:
            legend_below(figure, columns=2)
    return figure


def _draw_line(axes: Axes, run: Run, key: str, line: Any) -> None:
    epochs = []
    values = []
    for row in run.epochs:
        if key in row:  # not every epoch is validated
            value = number(row[key])
            epochs.append(row["epoch"] + 1)
            values.append(math.nan if value is None else value)
    if not epochs:
        return
    marker = ""
    if len(epochs) <= 12:
        marker = run.look.marker
    look = {"color": run.look.colour, "linestyle": line, "marker": marker, "markersize": 3.5}
    axes.plot(epochs, values, label=f"{run.name}, {_words(key)}", **look)


def _line_keys(lines: dict[str, Any]) -> list[Key]:
    """Legend entries for the line styles; dashes are in multiples of the line's width, as matplotlib's are."""
    keys = []
    for stem, line in lines.items():
        if isinstance(line, tuple):
            strokes = line[1]
        else:
            strokes = ()
        keys.append(Key(text=WORDS.get(stem, stem), dashes=" ".join(f"{1.8 * stroke:g}" for stroke in strokes)))
    return keys


def _panel(key: str) -> str:
    if key in ("lr", "train_eps"):
        return {"lr": "learning rate", "train_eps": "ε of training"}[key]
    if key.endswith("accuracy") and any(word in key for word in ATTACKED):
        return "accuracy under attack"
    return next((kind for kind in ("loss", "accuracy") if key.endswith(kind)), key.replace("_", " "))


def _prominence(key: str) -> tuple[int, str]:
    first = [place for place, start in enumerate(("val", "train")) if key.startswith(start)]
    return (first[0] if first else 2, key)


def _stem(key: str) -> str:
    return key.removesuffix("_loss").removesuffix("_accuracy").replace("_", " ")


def _words(key: str) -> str:
    return WORDS.get(_stem(key), _stem(key))


def _alt(runs: Sequence[Run], title: str, keys: Sequence[str]) -> str:
    """The last value of every line, for those who do not see it."""
    ends = []
    for run in runs:
        for key in keys:
            values = [value for row in run.epochs if (value := number(row.get(key))) is not None]
            if values:
                ends.append(f"{run.name} {_words(key)} ends at {values[-1]:.4g}")
    return f"Line chart of {title} over epochs: " + "; ".join(ends) + "."
