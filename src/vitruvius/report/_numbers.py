"""Numbers as a reader wants them: aligned, rounded to what is known, a dash where there is none."""

from __future__ import annotations

import math
from typing import Any

DASH = "–"


def number(value: Any) -> float | None:
    """A finite float, or None for anything else (missing, text, bool, NaN, infinity)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if math.isfinite(value):
        return float(value)
    return None


def percent(value: float | None, digits: int = 1) -> str:
    """0.973 → `97.3 %`."""
    if value is None:
        return DASH
    return f"{100 * value:.{digits}f} %"


def interval(low: float | None, high: float | None, digits: int = 1) -> str:
    """The two ends of an interval in per cent, or nothing."""
    if low is None or high is None:
        return ""
    return f"{100 * low:.{digits}f} to {100 * high:.{digits}f}"


def count(value: float | None) -> str:
    """1234567 → `1 234 567`, with thin spaces."""
    if value is None:
        return DASH
    return f"{value:,.0f}".replace(",", "\u202f")


def duration(seconds: float | None) -> str:
    """75 → `1 min 15 s`."""
    if seconds is None:
        return DASH
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {rest:02d} s"
    return f"{seconds:.1f} s"


def short(value: float | None) -> str:
    """Four significant digits; scientific where the number is tiny or huge."""
    if value is None:
        return DASH
    return f"{value:.4g}"


def pixels(eps: float) -> str:
    """An ε in pixels of [0, 1] as one writes it: 4/255 where it is such a fraction, else decimal."""
    halves = 2 * eps * 255
    whole = abs(halves - round(halves)) < 1e-3 and (round(halves) % 2 == 0 or eps < 4 / 255)
    if whole and 0 < eps < 1:
        return f"{round(halves) / 2:g}/255"
    return f"{eps:.3g}"
