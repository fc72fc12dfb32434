"""The figures of docs/results, drawn from the runs and studies that experiments/results holds.

`python -m experiments tables` writes them to docs/figures/results_*.png; a campaign of which nothing was judged has
none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.tables import RESULTS, ROOT, SHOWN, Run, by_threat, find, is_judged, load
from vitruvius._style import figure_style, in_whole_numbers, legend_below, new_axes, save_figure, series
from vitruvius.studies.kpca import draw as draw_kpca

FIGURES = ROOT / "docs" / "figures"
MASKED = {"before fine-tuning": "start/", "after fine-tuning": "evaluation/clean"}
DRAWN = {  # what figures show otherwise than tables
    "attention_cifar_compact": SHOWN["attention_pgd"],
    "attention_cifar_compact_natural": {
        "clean": "evaluation/clean",
        "AutoAttack 0.5/255": "autoattack eps=0.5/255",
        "AutoAttack 1/255": "autoattack eps=1/255",
    },
    "vitcod": MASKED,
    "vitcod_pretrained": MASKED,
}
ATTACKED = {
    **{name: SHOWN[name] for name in ("attention_natural", "attention_pgd", "attention_digits")},
    **{name: SHOWN[name] for name in ("structured", "structured_p2", "structured_small")},
    **DRAWN,
}
LEFT_OUT = "PGD-20 0.5/255"  # of figures, beside a stronger one
WATCHED = {  # runs whose held-out accuracy is drawn, and how they were trained
    "light_digits": {"light": "one step", "pgd3": "three steps"},
    "light": {
        "no_eps_warmup": "one step",
        "light": "one step, eps growing",
        "n_fgsm": "N-FGSM",
        "pgd3": "three steps",
    },
    "light_compact": {
        "one_step": "one step",
        "no_random_start": "one step, no random start",
        "n_fgsm": "N-FGSM",
        "pgd3": "three steps",
    },
}
KPCA = {"kpca_pretrained": "ViT-S, pretrained", "kpca_random": "ViT-S, random weights", "kpca_digits": ""}


def write_figures(results: Path = RESULTS, figures: Path = FIGURES) -> list[Path]:
    """Every figure that there are runs for; the files written."""
    drawn = {name: draw_threats(name, results) for name in ATTACKED}
    drawn |= {"kpca": draw_studies(results), **{name: draw_alarm(name, results) for name in WATCHED}}
    written = []
    for name, figure in drawn.items():
        if figure is not None:
            written += save_figure(figure, figures / f"results_{name}.png")
    return written


def draw_threats(campaign: str, results: Path = RESULTS) -> Figure | None:
    """Accuracy of every judged run under each threat, with its 95 % interval; best under the last threat on top.

    The seeds of a variant are points in one row.
    """
    shown = {label: words.split() for label, words in ATTACKED[campaign].items() if label != LEFT_OUT}
    runs = [run for run in load(campaign, results) if is_judged(run)]
    if not runs:
        return None
    runs = by_threat(runs, *list(shown.values())[-1])
    variants = list(dict.fromkeys(run["name"].partition("_seed")[0] for run in runs))
    rows = [variants.index(run["name"].partition("_seed")[0]) + 0.2 * run["seed"] for run in runs]
    with figure_style():
        figure, axes = new_axes(7.2, 1.3 + 0.36 * len(variants))
        for index, (label, words) in enumerate(shown.items()):
            _draw_threat(axes, rows, [find(run, *words) for run in runs], series(index), label)
        axes.set_yticks(range(len(variants)), variants)
        axes.set_ylim(len(variants) - 0.4, -0.6)
        axes.set_xlabel("accuracy (%), with 95 % intervals")
        if len(shown) > 1:
            legend_below(figure, columns=len(shown))
    return figure


def _draw_threat(axes: Axes, rows: Sequence[float], threats: Sequence[Run], look: Any, label: str) -> None:
    values = [100 * threat["accuracy"] for threat in threats]
    low = [100 * (threat["accuracy"] - threat["low"]) for threat in threats]
    high = [100 * (threat["high"] - threat["accuracy"]) for threat in threats]
    style = {"color": look.colour, "marker": look.marker, "linestyle": "none", "elinewidth": 1.4}
    axes.errorbar(values, rows, xerr=[low, high], label=label, **style)


def draw_alarm(campaign: str, results: Path = RESULTS) -> Figure | None:
    """What the alarm read after every epoch of training with one step and with several."""
    runs = {run["name"]: run for run in load(campaign, results) if is_judged(run)}
    watched = {name: words for name, words in WATCHED[campaign].items() if name in runs}
    if not watched:
        return None
    with figure_style():
        figure, axes = new_axes(6.4, 3.4)
        for index, (name, words) in enumerate(watched.items()):
            _draw_readings(axes, runs[name]["epochs"], series(index).colour, f"trained with {words}")
        axes.set_xlabel("epoch")
        in_whole_numbers(axes.xaxis, 8)
        axes.set_ylabel("held-out accuracy (%)")
        legend_below(figure, columns=2)
    return figure


def _draw_readings(axes: Axes, epochs: Sequence[Run], colour: str, label: str) -> None:
    numbers = [row["epoch"] + 1 for row in epochs]
    for key, words, line in (("single_step", "FGSM", "--"), ("multi_step", "PGD-10", "-")):
        values = [100 * row[f"{key}_accuracy"] for row in epochs]
        axes.plot(numbers, values, color=colour, linestyle=line, label=f"{label}, under {words}")


def draw_studies(results: Path = RESULTS) -> Figure | None:
    """The headlines of all studies of kernel PCA, one line per model."""
    rows: list[Run] = []
    for campaign, name in KPCA.items():
        for study in load(campaign, results):
            rows += [{**row, "model": name or row["model"].replace("_", ", ")} for row in study["rows"]]
    if not rows:
        return None
    draw: Callable[[list[Run]], Figure] = draw_kpca
    return draw(rows)
