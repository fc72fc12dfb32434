"""Intervals for proportions: Wilson's score interval (Wilson 1927), which stays in [0, 1] and works at 0 and 1."""

from __future__ import annotations

import math


def wilson(correct: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """95 % interval of a proportion `correct / n`."""
    if n <= 0:
        return (0.0, 1.0)
    p, z2 = correct / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return (max(0.0, centre - half), min(1.0, centre + half))
