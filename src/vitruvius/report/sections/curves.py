"""Training curves: loss, accuracy, learning rate and whatever else was logged, all runs in one panel each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitruvius._format import number
from vitruvius._style import LINES, figure_style, in_percent, in_whole_numbers, legend_below, new_axes
from vitruvius.report.blocks import Block, Drawing, Key, run_keys, section
from vitruvius.report.run import Run

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
    """Loss, accuracy, learning rate and other metrics over the epochs."""
    panels = group_metrics(runs)
    if not panels:
        return []
    lines = line_styles(panels)
    line_keys = [Key.of_line(WORDS.get(stem, stem), line) for stem, line in lines.items()]
    return [
        Drawing(
            name="training",
            panels=[
                (draw_metrics(runs, title, keys, lines), _alt(runs, title, keys)) for title, keys in panels.items()
            ],
            caption="Every epoch of training.",
            rows=[{"run": run.name, **row, "epoch": row["epoch"] + 1} for run in runs for row in run.epochs],
            legend=run_keys([run for run in runs if run.epochs]) + line_keys,
        )
    ]


def group_metrics(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Panel title → metrics: held-out before training, losses together, accuracies together."""
    logged = [each for run in runs for row in run.epochs for each in row.items() if number(each[1]) is not None]
    keys = {key for key, value in logged if key not in UNDRAWN and (value or key not in EVENTS)}
    panels: dict[str, list[str]] = {"loss": [], "accuracy": [], "accuracy under attack": [], "learning rate": []}
    for key in sorted(keys, key=lambda key: (not key.startswith("val"), not key.startswith("train"), key)):
        panels.setdefault(_panel(key), []).append(key)
    return {title: keys for title, keys in panels.items() if keys}


def _panel(key: str) -> str:
    if key in ("lr", "train_eps"):
        return {"lr": "learning rate", "train_eps": "ε of training"}[key]
    if key.endswith("accuracy") and any(word in key for word in ATTACKED):
        return "accuracy under attack"
    return next((kind for kind in ("loss", "accuracy") if key.endswith(kind)), key.replace("_", " "))


def line_styles(panels: dict[str, list[str]]) -> dict[str, Any]:
    """A line for each kind of metric (held-out, training, …), the same in all panels that show several."""
    stems = dict.fromkeys(_stem(key) for keys in panels.values() for key in keys if len(keys) > 1)
    return {stem: LINES[place % len(LINES)] for place, stem in enumerate(stems)}


def draw_metrics(
    runs: Sequence[Run], title: str, keys: Sequence[str], lines: dict[str, Any], *, legend: bool = False
) -> Figure:
    """One panel: colours are runs, line styles are metrics; a figure that stands alone wants its `legend`."""
    with figure_style():
        figure, axes = new_axes(4.5, 2.9)
        for run in runs:
            for key in keys:
                logged = [row for row in run.epochs if key in row]  # not every epoch is validated
                if logged:
                    values = [math.nan if (value := number(row[key])) is None else value for row in logged]
                    marker = run.look.marker if len(logged) <= 12 else ""
                    look = {"linestyle": lines.get(_stem(key), "-"), "marker": marker, "markersize": 3.5}
                    epochs = [row["epoch"] + 1 for row in logged]
                    axes.plot(epochs, values, label=f"{run.name}, {_words(key)}", color=run.look.colour, **look)
        axes.set(title=title, xlabel="epoch", ylabel=title)
        in_whole_numbers(axes.xaxis, 7)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        if title.startswith("accuracy"):
            in_percent(axes.yaxis)
        if legend:
            legend_below(figure, columns=2)
    return figure


def _stem(key: str) -> str:
    return key.removesuffix("_loss").removesuffix("_accuracy").replace("_", " ")


def _words(key: str) -> str:
    return WORDS.get(_stem(key), _stem(key))


def _alt(runs: Sequence[Run], title: str, keys: Sequence[str]) -> str:
    """The last value of every line, for those who do not see it."""
    lines = [(run, key, values) for run in runs for key in keys if (values := run.logged(key))]
    ends = [f"{run.name} {_words(key)} ends at {values[-1]:.4g}" for run, key, values in lines]
    return f"Line chart of {title} over epochs: {'; '.join(ends)}."
