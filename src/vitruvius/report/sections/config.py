"""Config and versions: what differs between the runs, then each resolved recipe in full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitruvius._yaml import dump_yaml
from vitruvius.report._blocks import Block, Cell, Column, Fold, Table
from vitruvius.report._numbers import DASH
from vitruvius.report._runs import Run
from vitruvius.report._section import section

MANY = 5  # runs that stand beside each other in a table; more stand below each other


@section("config", title="Recipe", order=80)
def config(runs: Sequence[Run]) -> Sequence[Block]:
    """The resolved recipe of each run, and where they differ. `runs` are those of the page."""
    differing = compare(runs)
    if differing:
        tables = [_table("differences", "What differs.", runs, differing)]
    else:
        tables = []
    versions = {key: values for key, values in _flat_runs(runs).items() if key.startswith("versions.")}
    tables += [_table("versions", "Versions.", runs, versions)] if versions else []
    recipes = [Fold(title=f"{run.name}: resolved recipe", text=dump_yaml(run.config)) for run in runs]
    return [*tables, *recipes]


def compare(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Dotted key → its value in each run, for keys that are not the same in all; versions and times aside.

    A run that lacks a whole section (a model that was never trained has no `train`) does not differ in every key of it.

    `runs` are those of the page.
    """
    skipped = ("versions.", "started", "out")
    return {
        key: values
        for key, values in _flat_runs(runs).items()
        if len(set(_owned(runs, key, values))) > 1 and not key.startswith(skipped)
    }


def _owned(runs: Sequence[Run], key: str, values: Sequence[str]) -> list[str]:
    return [value for run, value in zip(runs, values, strict=True) if key.partition(".")[0] in run.config]


def flatten(table: Any, prefix: str = "") -> dict[str, str]:
    """Nested tables and lists as dotted keys, values as text.

    `table` is a mapping, a list or a value; `prefix` is the dotted key it has itself (default: none).
    """
    items = _items(table)
    if items is None:
        return {prefix: str(table)}
    flat: dict[str, str] = {}
    for key, value in items:
        dotted = key
        if prefix:
            dotted = f"{prefix}.{key}"
        flat |= flatten(value, dotted)
    return flat


def _items(table: Any) -> list[tuple[str, Any]] | None:
    """Keys and values of a table, or of a list that is empty or holds tables; None of a plain value."""
    if isinstance(table, dict):
        return [(str(key), value) for key, value in table.items()]
    if isinstance(table, list) and _holds_tables(table):
        return [(str(place), value) for place, value in enumerate(table)]
    return None


def _holds_tables(values: list[Any]) -> bool:
    return not values or any(isinstance(item, dict | list) for item in values)


def _flat_runs(runs: Sequence[Run]) -> dict[str, list[str]]:
    flats = [flatten(run.config) for run in runs]
    keys = list(dict.fromkeys(key for flat in flats for key in flat))
    return {key: [flat.get(key, DASH) for flat in flats] for key in keys}


def _table(name: str, caption: str, runs: Sequence[Run], values: dict[str, list[str]]) -> Table:
    """A line per key and a column per run; of many runs a line each, so that the table stays narrow."""
    titles, lines = _key_lines(runs, values)
    if len(runs) > MANY:
        titles, lines = _run_lines(runs, values)
    return Table(
        name=name,
        columns=[Column(title=title) for title in titles],
        cells=[[Cell(text=text) for text in line] for line in lines],
        rows=[dict(zip(titles, line, strict=True)) for line in lines],
        caption=caption,
    )


def _key_lines(runs: Sequence[Run], values: dict[str, list[str]]) -> tuple[list[str], list[list[str]]]:
    return ["key", *(run.name for run in runs)], [[key, *row] for key, row in values.items()]


def _run_lines(runs: Sequence[Run], values: dict[str, list[str]]) -> tuple[list[str], list[list[str]]]:
    lines = [[run.name, *(row[place] for row in values.values())] for place, run in enumerate(runs)]
    return ["run", *values], lines
