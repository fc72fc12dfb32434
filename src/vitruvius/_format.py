"""Numbers as people of this field write them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

DASH = "–"  # stands where there is no number


def format_number(value: Any) -> str:
    """A number as one would write it: 4/255 if it is exactly that, 0.5, else with as many digits as it needs."""
    if isinstance(value, float) and (pixels := round(value * 255, 2)) / 255 == value:
        return min(f"{pixels:g}/255", str(value), key=len)
    return str(value)


def format_duration(seconds: float | None) -> str:
    """45 → `45 s`, 130 → `2 min 10 s`, 5000 → `1 h 23 min`."""
    if seconds is None:
        return DASH
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_rate(rate: float) -> str:
    """0.0234 → `0.023`, 2.13 → `2.1`, 1234.5 → `1,234`."""
    return f"{rate:.2g}" if rate < 10 else f"{rate:,.0f}"


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: heads, a rule, rows; the first column begins at the left, the others end at the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (heads, *rows)]
    return [lines[0].rstrip(), "-" * len(lines[0]), *(line.rstrip() for line in lines[1:])]


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts names so that numbers in them count as numbers: 2 before 10."""
    pieces = re.split(r"(\d+)", name)
    return [(int(piece), "") if piece.isdecimal() else (-1, piece.lower()) for piece in pieces]


def number(value: Any) -> float | None:
    """A finite float, or None for anything else (missing, text, bool, NaN, infinity)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def percent(value: float | None) -> str:
    """0.973 → `97.3 %`."""
    return DASH if value is None else f"{100 * value:.1f} %"


def interval(low: float | None, high: float | None) -> str:
    """The two ends of an interval in per cent, or nothing."""
    return "" if low is None or high is None else f"{100 * low:.1f} to {100 * high:.1f}"


def count(value: float | None) -> str:
    """1234567 → `1 234 567`, with thin spaces."""
    return DASH if value is None else f"{value:,.0f}".replace(",", "\u202f")
