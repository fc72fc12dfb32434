"""Model and cost: what each run is made of, what its attention is, and what its training took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from vitruvius.report._blocks import Block, Cell, Column, Fold, Table
from vitruvius.report._names import attention_rules
from vitruvius.report._numbers import DASH, count, duration, number
from vitruvius.report._runs import Run
from vitruvius.report._section import section

SITE_COLUMNS = ("name", "family", "attends", "core", "num_heads", "num_queries", "num_keys", "key_dim", "value_dim")


@section("model", title="Model and cost", order=70)
def model(runs: Sequence[Run]) -> Sequence[Block]:
    """Parameters, attention cores, sites and training cost of each run. `runs` are those of the page."""
    sites = [(run, found) for run in runs if (found := _sites(run))]
    return [
        _table(runs),
        *(Fold(title=f"{run.name}: {len(s)} attention sites", inside=[_site_table(run, s)]) for run, s in sites),
    ]


def _table(runs: Sequence[Run]) -> Table:
    titles = ("run", "model", "attention", "parameters", "in cores", "epochs", "training", "images/s")
    columns = [Column(title=title, numeric=place > 2) for place, title in enumerate(titles)]
    facts = [_facts(run) for run in runs]
    cells = [_cells(run, row) for run, row in zip(runs, facts, strict=True)]
    return Table(name="cost", columns=columns, cells=cells, rows=facts)


def _facts(run: Run) -> dict[str, object]:
    section = run.config.get("model")
    name = DASH
    if isinstance(section, dict):
        name = str(section.get("name", DASH))
    rules = [f"{where}: {chain}" for where, chain in attention_rules(run)]
    stored = in_cores = None
    if run.weights:
        stored = sum(run.weights.values())
        in_cores = stored - run.weights.get("model", 0)
    parameters = number(run.model.get("parameters"))
    if parameters is None:
        parameters = stored
    seconds = _values(run, "seconds")
    total = None
    if seconds:
        total = sum(seconds)
    rates = _values(run, "images_per_second")
    return {
        "run": run.name,
        "model": name,
        "attention": "; ".join(rules) or "upstream",
        "parameters": parameters,
        "core_parameters": in_cores,
        "epochs": len(run.epochs) or None,
        "seconds": total,
        "images_per_second": _median(rates),
    }


def _median(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return statistics.median(values)


def _cells(run: Run, facts: dict[str, Any]) -> list[Cell]:
    def numbers(key: str, text: str) -> Cell:
        return Cell(text=text, value=facts[key])

    return [
        Cell(text=run.name, colour=run.look.name),
        Cell(text=facts["model"]),
        Cell(text=facts["attention"]),
        numbers("parameters", count(facts["parameters"])),
        numbers("core_parameters", count(facts["core_parameters"])),
        numbers("epochs", count(facts["epochs"])),
        numbers("seconds", duration(facts["seconds"])),
        numbers("images_per_second", count(facts["images_per_second"])),
    ]


def _sites(run: Run) -> list[dict[str, Any]]:
    sites = run.model.get("sites")
    if isinstance(sites, list):
        return [site for site in sites if isinstance(site, dict)]
    return []


def _site_table(run: Run, sites: list[dict[str, Any]]) -> Table:
    names = [name for name in SITE_COLUMNS if any(name in site for site in sites)]
    columns = []
    for name in names:
        numeric = name.startswith("num_") or name.endswith("_dim")
        columns.append(Column(title=name.removeprefix("num_").replace("_", " "), numeric=numeric))
    cells = [_site_cells(site, names) for site in sites]
    return Table(name=f"sites-{run.index}", columns=columns, cells=cells, rows=sites)


def _site_cells(site: dict[str, Any], names: list[str]) -> list[Cell]:
    return [Cell(text=str(site.get(name, DASH)), value=number(site.get(name))) for name in names]


def _values(run: Run, key: str) -> list[float]:
    return [value for row in run.epochs if (value := number(row.get(key))) is not None]
