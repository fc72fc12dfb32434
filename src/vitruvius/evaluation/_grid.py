"""Corruption × severity as a table of text: 15 lines instead of 75."""

from __future__ import annotations

from collections.abc import Mapping

Grid = Mapping[str, Mapping[int, float]]  # corruption → severity → share


def format_grid(title: str, grid: Grid, extra: Mapping[str, Mapping[str, float]] | None = None) -> list[str]:
    """Accuracies in per cent, a line a corruption, with its mean; `extra` adds columns of shares."""
    columns = sorted({severity for row in grid.values() for severity in row})
    more = extra or {}
    width = max(len(title), *(len(name) for name in grid))
    heads = [*(str(severity) for severity in columns), "mean", *more]
    lines = [f"{title:<{width}}" + "".join(f"{head:>8}" for head in heads)]
    lines.append("-" * (width + 8 * len(heads)))
    for name, row in grid.items():
        cells = [row.get(severity) for severity in columns]
        cells += [sum(row.values()) / len(row), *(column.get(name) for column in more.values())]
        lines.append(f"{name:<{width}}" + "".join(map(_cell, cells)))
    if len(grid) > 1:
        means: list[float | None] = [_mean([row[s] for row in grid.values() if s in row]) for s in columns]
        means.append(_mean([_mean(list(row.values())) for row in grid.values()]))
        means += [_mean(list(column.values())) if column else None for column in more.values()]
        lines.append(f"{'mean':<{width}}" + "".join(map(_cell, means)))
    return lines


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _cell(share: float | None) -> str:
    return f"{'–':>8}" if share is None else f"{100 * share:>8.2f}"
