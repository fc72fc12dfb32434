"""Reports as text: corruption × severity as a grid, the parts of a shift line by line, and their summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitruvius.evaluation._shift_numbers import BIN_NUMBER, BIN_SIZE

if TYPE_CHECKING:
    from vitruvius.evaluation.shift_report import PartScore, ShiftReport

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


def format_shift(report: ShiftReport) -> str:
    """Tables first, then sentences."""
    plain = [part for part in report.parts if part.severity is None]
    lines: list[str] = []
    if grid := report.accuracies:
        extra = {"CE": report.corruption["ce"]} if "ce" in report.corruption else None
        lines += format_grid(report.name, grid, extra)
    if plain:
        width = max(len(report.name), *(len(part.name) for part in plain))
        lines += [f"{report.name:<{width}}  accuracy   95 % interval       n     ECE   AURRA", "-" * (width + 55)]
        lines += [_line(part, width) for part in plain]
    lines += [*format_corruption(report.corruption), *_detection(report.detection)]
    if report.missing:
        lines.append(f"not there: {', '.join(report.missing)}.")
    return "\n".join([*lines, *(f"note: {remark}" for remark in report.remarks)])


def few_images(parts: Sequence[PartScore]) -> list[str]:
    """Which numbers are left out because bins would not be full."""
    few = sorted((part for part in parts if part.n < BIN_SIZE), key=lambda part: part.n)
    if not few:
        return []
    bins, numbers = f"bins of {BIN_SIZE}", "RMS error"
    if few[0].n < BIN_NUMBER:
        bins, numbers = f"{bins} and for {BIN_NUMBER} bins of equal mass", f"{numbers} and no adaptive ECE"
    others = f" Other parts with fewer than {BIN_SIZE}: {len(few) - 1}." if few[1:] else ""
    return [f"{few[0].name}: {few[0].n} images are too few for {bins}, so it has no {numbers}.{others}"]


def _line(part: PartScore, width: int) -> str:
    if part.accuracy is None or part.low is None or part.high is None or part.aurra is None:
        return f"{part.name:<{width}}  from outside, no right answers {part.n:>9,}"
    interval = f"{100 * part.low:6.2f} – {100 * part.high:6.2f}"
    ece = 100 * part.calibration["ece"]
    numbers = f"{100 * part.accuracy:6.2f} %   {interval}  {part.n:>7,}  {ece:6.2f}  {100 * part.aurra:6.2f}"
    return f"{part.name:<{width}}  {numbers}"


def format_corruption(found: dict[str, Any]) -> list[str]:
    """Mean accuracy and mCE in a sentence each."""
    if not found:
        return []
    low, high = (100 * (1 - end) for end in reversed(found["mean_error_interval"]))
    lines = [f"mean accuracy {100 * (1 - found['mean_error']):.2f} % ({low:.2f} – {high:.2f})"]
    if "mce" in found:
        low, high = (100 * end for end in found["mce_interval"])
        relative = found.get("relative_mce")
        also = "" if relative is None else f", relative mCE {100 * relative:.2f} %"
        lines.append(
            f"mCE {100 * found['mce']:.2f} % of {found['baseline']}'s ({low:.2f} – {high:.2f}), "
            f"over {len(found['ce'])} corruptions{also}"
        )
    return lines


def _detection(found: dict[str, dict[str, Any]]) -> list[str]:
    if not found:
        return []
    lines = ["detection by     AUROC   AUPR out   AUPR in   FPR95", "-" * 51]
    for score, numbers in found.items():
        auroc, out, known, fpr = (100 * numbers[key] for key in ("auroc", "aupr_out", "aupr_in", "fpr95"))
        lines.append(f"{score:<13} {auroc:8.2f} {out:10.2f} {known:9.2f} {fpr:7.2f}")
    return lines
