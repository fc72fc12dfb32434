"""The page's motif: circle and square in the Vitruvian proportion, woven from patches that attend to the two lines.

Circle and square stand on one ground line; the radius is 0.608 of the square's side, as in Leonardo's drawing.
"""

from __future__ import annotations

import math

from markupsafe import Markup

SIDE, RADIUS = 100.0, 60.8
GROUND = 118.0
CENTRE = (70.0, GROUND - RADIUS)
STEP = 4.0


def motif() -> Markup:
    """Inline SVG, drawn in the page's colours; decoration only, so hidden from screen readers."""
    x, y = CENTRE
    square, circle = _patches()
    return Markup(
        '<svg class="motif" viewBox="2 -8 136 134" aria-hidden="true" focusable="false"><g class="lines">'
        f'<circle cx="{x:g}" cy="{y:g}" r="{RADIUS:g}"/>'
        f'<rect x="{x - SIDE / 2:g}" y="{GROUND - SIDE:g}" width="{SIDE:g}" height="{SIDE:g}"/></g>'
        f'<path class="square" d="{square}"/><path class="circle" d="{circle}"/></svg>'
    )


def _patches() -> tuple[str, str]:
    """Squares on a lattice, each given to the nearer line and the smaller the farther it is."""
    square: list[str] = []
    circle: list[str] = []
    for row in range(34):
        for column in range(34):
            x, y = 4 + STEP * column, -6 + STEP * row
            to_square, to_circle = _to_square(x, y), _to_circle(x, y)
            if to_square < to_circle:
                near = square
            else:
                near = circle
            side = STEP * _weight(min(to_square, to_circle))
            if side > 0.3:
                near.append(f"M{x - side / 2:.1f} {y - side / 2:.1f}h{side:.1f}v{side:.1f}h-{side:.1f}z")
    return "".join(square), "".join(circle)


def _weight(distance: float) -> float:
    """A peak on the line and a long tail, as attention has."""
    return float(0.62 * math.exp(-((distance / 2.2) ** 2)) + 0.32 * math.exp(-distance / 11))


def _to_circle(x: float, y: float) -> float:
    return abs(math.hypot(x - CENTRE[0], y - CENTRE[1]) - RADIUS)


def _to_square(x: float, y: float) -> float:
    """Distance to the outline of the square."""
    dx = abs(x - CENTRE[0]) - SIDE / 2
    dy = abs(y - (GROUND - SIDE / 2)) - SIDE / 2
    outside = math.hypot(max(dx, 0.0), max(dy, 0.0))
    return abs(outside + min(max(dx, dy), 0.0))
