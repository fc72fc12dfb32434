"""Matplotlib figures as SVG for inside a page: colours become the page's, so a figure follows light and dark."""

from __future__ import annotations

import re

from markupsafe import Markup, escape
from matplotlib.figure import Figure

from vitruvius.report.style import LIGHT, encode_figure


def inline_svg(figure: Figure, *, name: str, alt: str) -> Markup:
    """The figure as one `<svg>` element; `name` keeps its inner ids apart from those of other figures."""
    text = encode_figure(figure, "svg").decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    match = re.search(r'<svg [^>]*viewBox="([^"]*)"[^>]*>(.*)</svg>', text, flags=re.DOTALL)
    assert match is not None
    box, body = match.groups()
    body = _themed(_own_ids(body, name))
    width = box.split()[2]
    head = f'<svg viewBox="{box}" role="img" aria-label="{escape(alt)}" style="max-width: {1.36 * float(width):.0f}px">'
    return Markup(head + body.strip() + "</svg>")


def _own_ids(body: str, name: str) -> str:
    """Drop ids nobody refers to; put the figure's name before the others."""
    used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", body))
    body = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", body)
    return re.sub(r"(href=\"#|url\(#)", rf"\g<1>{name}-", body)


def _themed(body: str) -> str:
    """Replace the light palette by CSS variables and matplotlib's font by the page's."""
    colours = {colour: f"var(--{name})" for name, colour in LIGHT.items()}
    body = re.sub(r"#[0-9a-f]{6}\b", lambda m: colours.get(m[0], m[0]), body)
    return re.sub(r"font: (?:(bold|700) )?([\d.]+px)[^;\"]*", _font, body)


def _font(match: re.Match[str]) -> str:
    weight, size = match.groups()
    return f"font-size: {size}" + ("; font-weight: 600" if weight else "")
