"""Model and cost: what each run is made of, what its training took; and the recipes, where they differ and in full."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from vitruvius._yaml import dump_yaml
from vitruvius.report.blocks import (
    Block,
    Cell,
    Fold,
    Table,
    number_column,
    run_column,
    section,
    table_of,
    text_column,
)
from vitruvius.report.run import Run
from vitruvius.report.words import DASH, count, duration, number

SITE_COLUMNS = ("name", "family", "attends", "core", "num_heads", "num_queries", "num_keys", "key_dim", "value_dim")
MANY = 5  # runs that stand beside each other in a table; more stand below each other


@section("model", title="Model and cost", order=70)
def model(runs: Sequence[Run]) -> Sequence[Block]:
    """Parameters, attention cores, sites and training cost of each run."""
    columns = [
        run_column(runs),
        text_column("model"),
        text_column("attention"),
        number_column("parameters", "parameters", count),
        number_column("in cores", "core_parameters", count),
        number_column("epochs", "epochs", count),
        number_column("training", "seconds", duration),
        number_column("images/s", "images_per_second", count),
    ]
    blocks: list[Block] = [table_of("cost", columns, [_cost(run) for run in runs])]
    for run in runs:
        sites = run.model.get("sites")
        sites = [site for site in sites if isinstance(site, dict)] if isinstance(sites, list) else []
        if sites:
            table = _site_table(f"sites-{run.index}", sites)
            blocks.append(Fold(title=f"{run.name}: {len(sites)} attention sites", inside=[table]))
    return blocks


def _cost(run: Run) -> dict[str, object]:
    section = run.config.get("model")
    rules = [f"{where}: {chain}" for where, chain in run.attention_rules]
    stored = sum(run.weights.values()) if run.weights else None
    parameters = number(run.model.get("parameters"))
    seconds, rates = run.logged("seconds"), run.logged("images_per_second")
    return {
        "run": run.name,
        "model": str(section.get("name", DASH)) if isinstance(section, dict) else DASH,
        "attention": "; ".join(rules) or "upstream",
        "parameters": stored if parameters is None else parameters,
        "core_parameters": None if stored is None else stored - run.weights.get("model", 0),
        "epochs": len(run.epochs) or None,
        "seconds": sum(seconds) if seconds else None,
        "images_per_second": statistics.median(rates) if rates else None,
    }


def _site_table(name: str, sites: list[dict[str, Any]]) -> Table:
    shown = [key for key in SITE_COLUMNS if any(key in site for site in sites)]
    titles = {key: key.removeprefix("num_").replace("_", " ") for key in shown}
    return Table(
        name=name,
        titles=list(titles.values()),
        numeric=[title for key, title in titles.items() if key.startswith("num_") or key.endswith("_dim")],
        cells=[[Cell(text=str(site.get(key, DASH)), value=number(site.get(key))) for key in shown] for site in sites],
        rows=sites,
    )


@section("config", title="Recipe", order=80)
def config(runs: Sequence[Run]) -> Sequence[Block]:
    """The resolved recipe of each run, and where they differ."""
    differing = compare(runs)
    versions = {key: values for key, values in _flat_runs(runs).items() if key.startswith("versions.")}
    blocks: list[Block] = []
    if differing:
        blocks.append(_key_table("differences", "What differs.", runs, differing))
    if versions:
        blocks.append(_key_table("versions", "Versions.", runs, versions))
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
    cells = [[Cell(text=text) for text in line] for line in lines]
    return Table(
        name=name,
        titles=titles,
        cells=cells,
        rows=[dict(zip(titles, line, strict=True)) for line in lines],
        caption=caption,
    )
