"""Runs at a glance: cards with accuracies, what each is made of and took, recipes and where they differ, remarks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from vitruvius._format import DASH, count, format_duration, interval, number, percent
from vitruvius._yaml import dump_yaml
from vitruvius.report.blocks import (
    Block,
    Card,
    Cards,
    Cell,
    Fold,
    Note,
    Table,
    number_cell,
    plain_table,
    run_cell,
    section,
)
from vitruvius.report.run import Run

SITE_COLUMNS = ("name", "family", "attends", "core", "num_heads", "num_queries", "num_keys", "key_dim", "value_dim")
MANY = 5  # runs that stand beside each other in a table; more stand below each other


@section("summary", title="Summary", order=10)
def summary(runs: Sequence[Run]) -> Sequence[Block]:
    """Cards with clean and worst-case accuracy of each run."""
    cards = Cards(cards=[_card(run) for run in runs])
    if any(threat.low is not None for run in runs for threat in run.threats):
        return [cards, Note(text="Top-1 accuracy on test images; small numbers are 95 % intervals.")]
    return [cards]


def _card(run: Run) -> Card:
    facts = [("epochs", str(len(run.epochs)))] if run.epochs else []
    if seconds := run.logged("seconds"):
        facts.append(("training", format_duration(sum(seconds))))
    if (images := number(run.evaluation.get("num_images"))) is not None:
        facts.append(("test images", f"{images:.0f}"))
    if (seed := run.config.get("seed")) is not None:
        facts.append(("seed", str(seed)))
    subtitle = f"{run.model_name or 'model not named'} · {run.attention}"
    return Card(title=run.name, subtitle=subtitle, colour=run.look.name, figures=_figures(run), facts=facts)


def _figures(run: Run) -> list[tuple[str, str, str]]:
    """(label, number, interval): clean and worst case where evaluated, else the last on held-out images."""
    shown = []
    if run.clean is not None:
        shown.append(("clean", percent(run.clean.accuracy), interval(run.clean.low, run.clean.high)))
    attacks = [threat for threat in run.threats if threat.name != "clean"]
    if attacks:
        worst = run.worst_case or min(attacks, key=lambda threat: threat.accuracy)
        shown.append((worst.name, percent(worst.accuracy), worst.detail))
    for name, report in run.shifts.items():
        if report.corruption:  # accuracy averaged over corruptions and severities, of the first set that has some
            low, high = (1 - end for end in reversed(report.corruption["mean_error_interval"]))
            label = "corrupted" if name == "corruptions" else name
            shown.append((label, percent(1 - report.corruption["mean_error"]), interval(low, high)))
            break
    held_out = run.logged("val_accuracy")
    return shown or [("held-out", percent(held_out[-1]), "") for _ in held_out[:1]]


@section("model", title="Model and cost", order=70)
def model(runs: Sequence[Run]) -> Sequence[Block]:
    """Parameters, attention cores, sites and training cost of each run."""
    rows = [_cost(run) for run in runs]
    cells = [
        [
            run_cell(run),
            Cell(text=row["model"]),
            Cell(text=row["attention"]),
            *(number_cell(row[key], count) for key in ("parameters", "core_parameters", "epochs")),
            number_cell(row["seconds"], format_duration),
            number_cell(row["images_per_second"], count),
        ]
        for run, row in zip(runs, rows, strict=True)
    ]
    titles = ["run", "model", "attention", "parameters", "in cores", "epochs", "training", "images/s"]
    blocks: list[Block] = [Table(name="cost", titles=titles, cells=cells, rows=rows)]
    for run in runs:
        if sites := run.model.get("sites"):
            keys = [key for key in SITE_COLUMNS if any(key in site for site in sites)]
            cells = [
                [Cell(text=str(site.get(key, DASH)), value=number(site.get(key))) for key in keys] for site in sites
            ]
            titles = [key.removeprefix("num_").replace("_", " ") for key in keys]
            table = Table(name=f"sites-{run.index}", titles=titles, cells=cells, rows=sites)
            blocks.append(Fold(title=f"{run.name}: {len(sites)} attention sites", inside=[table]))
    return blocks


def _cost(run: Run) -> dict[str, Any]:
    rules = [f"{where}: {chain}" for where, chain in run.attention_rules]
    stored = sum(run.weights.values()) if run.weights else None
    parameters = number(run.model.get("parameters"))
    seconds, rates = run.logged("seconds"), run.logged("images_per_second")
    return {
        "run": run.name,
        "model": run.model_name or DASH,
        "attention": "; ".join(rules) or "upstream",
        "parameters": stored if parameters is None else parameters,
        "core_parameters": None if stored is None else stored - run.weights.get("model", 0),
        "epochs": len(run.epochs) or None,
        "seconds": sum(seconds) if seconds else None,
        "images_per_second": statistics.median(rates) if rates else None,
    }


@section("config", title="Recipe", order=80)
def config(runs: Sequence[Run]) -> Sequence[Block]:
    """The resolved recipe of each run, and where they differ."""
    versions = {key: values for key, values in _flat_runs(runs).items() if key.startswith("versions.")}
    tables = [("differences", "What differs.", compare(runs)), ("versions", "Versions.", versions)]
    blocks: list[Block] = [_key_table(name, caption, runs, values) for name, caption, values in tables if values]
    return [*blocks, *(Fold(title=f"{run.name}: resolved recipe", text=dump_yaml(run.config)) for run in runs)]


def compare(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Dotted key → its value in each run, for keys that are not the same in all; versions and times aside.

    A run that lacks a whole section (a model that was never trained has no `train`) does not differ in every key of it.
    """
    differing = {}
    for key, values in _flat_runs(runs).items():
        of_section = {v for run, v in zip(runs, values, strict=True) if key.partition(".")[0] in run.config}
        if len(of_section) > 1 and not key.startswith(("versions.", "started", "out")):
            differing[key] = values
    return differing


def flatten(table: Any, prefix: str = "") -> dict[str, str]:
    """Nested tables, and lists that hold some, as dotted keys; values as text."""
    if isinstance(table, list) and (not table or any(isinstance(item, dict | list) for item in table)):
        table = dict(enumerate(table))
    if not isinstance(table, dict):
        return {prefix: str(table)}
    flat: dict[str, str] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _flat_runs(runs: Sequence[Run]) -> dict[str, list[str]]:
    flats = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    return {key: [flat.get(key, DASH) for flat in flats] for key in keys}


def _key_table(name: str, caption: str, runs: Sequence[Run], values: dict[str, list[str]]) -> Table:
    """A line per key and a column per run; of many runs a line each, so that the table stays narrow."""
    lines = [["key", *(run.name for run in runs)], *([key, *row] for key, row in values.items())]
    if len(runs) > MANY:
        lines = [list(column) for column in zip(*lines, strict=True)]
        lines[0][0] = "run"
    titles, *lines = lines
    return plain_table(name, titles, [[Cell(text=text) for text in line] for line in lines], caption)


@section("remarks", title="Remarks", order=99)
def remarks(runs: Sequence[Run]) -> Sequence[Block]:
    """What was missing or damaged in the run folders."""
    return [Note(text=f"{run.name}: {remark}") for run in runs for remark in run.remarks]
