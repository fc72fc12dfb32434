"""Reports as text: corruption × severity as a grid, the parts of a shift line by line, and their summary."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitruvius.evaluation._shift_numbers import BIN_NUMBER, BIN_SIZE

if TYPE_CHECKING:
    from vitruvius.evaluation.shift_report import PartScore, ShiftReport

LABEL_WIDTH = 56  # characters of a threat's description in a table
Grid = Mapping[str, Mapping[int, float]]  # corruption → severity → share


def format_grid(title: str, grid: Grid, extra: Mapping[str, Mapping[str, float]] | None = None) -> list[str]:
    """Accuracies in per cent, one line per corruption, with its mean; `extra` adds columns of shares."""
    severities = sorted({severity for row in grid.values() for severity in row})
    more = extra or {}
    width = max(len(title), *(len(name) for name in grid))
    heads = [*map(str, severities), "mean", *more]
    lines = [f"{title:<{width}}" + "".join(f"{head:>8}" for head in heads)]
    lines.append("-" * (width + 8 * len(heads)))
    for name, row in grid.items():
        shares = [row.get(severity) for severity in severities]
        shares.append(_mean(list(row.values())))
        shares += [column.get(name) for column in more.values()]
        lines.append(_line_of(name, shares, width))
    if len(grid) > 1:
        lines.append(_line_of("mean", _means(grid, severities, more), width))
    return lines


def label_drawn(name: str, drawn: Container[str]) -> str:
    """The name of a corruption in tables: one that stands in for photographs says so, `frost (drawn)`."""
    if name in drawn:
        return f"{name} (drawn)"
    return name


def shorten_labels(labels: Sequence[str], width: int = LABEL_WIDTH) -> list[str]:
    """Labels of a table's lines, wide ones without their middle; whole where two would look the same.

    The full description stands in report.json.
    """
    short = [_without_middle(label, width) for label in labels]
    if len(set(short)) < len(set(labels)):
        return list(labels)
    return short


def _without_middle(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    end = width // 4
    return f"{text[: width - end - 1]}…{text[-end:]}"


def _means(grid: Grid, severities: Sequence[int], more: Mapping[str, Mapping[str, float]]) -> list[float | None]:
    """The last line of a grid: the mean of every column."""
    means = []
    for severity in severities:
        means.append(_mean([row[severity] for row in grid.values() if severity in row]))
    means.append(_mean([_mean(list(row.values())) for row in grid.values()]))
    for column in more.values():
        means.append(_mean(list(column.values())))
    return means


def _line_of(name: str, shares: Sequence[float | None], width: int) -> str:
    return f"{name:<{width}}" + "".join(map(_cell, shares))


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of what is known; nothing if nothing is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return sum(known) / len(known)


def _cell(share: float | None) -> str:
    if share is None:
        return f"{'–':>8}"
    return f"{100 * share:>8.2f}"


def format_shift(report: ShiftReport) -> str:
    """Tables first, then sentences."""
    lines = [*_corruption_lines(report), *_plain_lines(report)]
    lines += [*format_corruption(report.corruption, _say_averaged(report)), *_detection(report.detection)]
    if report.missing:
        lines.append(f"missing: {', '.join(report.missing)}.")
    lines += [f"note: {remark}" for remark in report.remarks]
    return "\n".join(lines)


def _corruption_lines(report: ShiftReport) -> list[str]:
    """The grid of corruptions and severities, where there is one."""
    grid = report.accuracies
    if not grid:
        return []
    extra = None
    if "ce" in report.corruption:
        extra = {"CE": {report.label(name): error for name, error in report.corruption["ce"].items()}}
    return format_grid(report.name, {report.label(name): row for name, row in grid.items()}, extra)


def _plain_lines(report: ShiftReport) -> list[str]:
    """One line per part that is not a corruption."""
    plain = [part for part in report.parts if part.severity is None]
    if not plain:
        return []
    width = max(len(report.name), *(len(part.name) for part in plain))
    heads = [f"{report.name:<{width}}  accuracy   95 % interval       n     ECE   AURRA", "-" * (width + 55)]
    return heads + [_line(part, width) for part in plain]


def few_images(parts: Sequence[PartScore]) -> list[str]:
    """Which numbers are left out because bins would not be full."""
    few = sorted((part for part in parts if part.n < BIN_SIZE), key=lambda part: part.n)
    if not few:
        return []
    bins, numbers = f"bins of {BIN_SIZE}", "RMS error"
    if few[0].n < BIN_NUMBER:
        bins, numbers = f"{bins} and for {BIN_NUMBER} bins of equal mass", f"{numbers} and no adaptive ECE"
    others = ""
    if few[1:]:
        others = f" Other parts with fewer than {BIN_SIZE}: {len(few) - 1}."
    return [f"{few[0].name}: {few[0].n} images are too few for {bins}, so it has no {numbers}.{others}"]


def _line(part: PartScore, width: int) -> str:
    if part.accuracy is None or part.low is None or part.high is None or part.aurra is None:
        return f"{part.name:<{width}}  from outside, no right answers {part.n:>9,}"
    interval = f"{100 * part.low:6.2f} – {100 * part.high:6.2f}"
    ece = 100 * part.calibration["ece"]
    numbers = f"{100 * part.accuracy:6.2f} %   {interval}  {part.n:>7,}  {ece:6.2f}  {100 * part.aurra:6.2f}"
    return f"{part.name:<{width}}  {numbers}"


def _say_averaged(report: ShiftReport) -> str:
    """Which corruptions the mean is over, where the grid above it has others too."""
    if len(report.averaged) == len(report.accuracies):
        return ""
    return f", over the {len(report.averaged)} of the benchmark"


def format_corruption(found: dict[str, Any], averaged: str = "") -> list[str]:
    """Mean accuracy and mCE in a sentence each; `averaged` says what the mean is over where it is not plain."""
    if not found:
        return []
    low, high = (100 * (1 - end) for end in reversed(found["mean_error_interval"]))
    lines = [f"mean accuracy {100 * (1 - found['mean_error']):.2f} % ({low:.2f} – {high:.2f}){averaged}"]
    if "mce" in found:
        low, high = (100 * end for end in found["mce_interval"])
        relative = found.get("relative_mce")
        also = ""
        if relative is not None:
            also = f", relative mCE {100 * relative:.2f} %"
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
