"""What a page embeds: tables as CSV links, arrays as small PNG pictures, matplotlib figures as SVG.

Pictures are addresses (`data:…`), so a page stays one file. Grey pictures and figures take the page's colours, so they
follow light and dark.
"""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from PIL import Image

from vitruvius.report.style import LIGHT, encode_figure

Rows = Sequence[Mapping[str, object]]


def write_csv(rows: Rows) -> str:
    """`rows` as CSV text under the names of all columns, in order of first appearance; None is an empty cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def csv_link(rows: Rows) -> str:
    """The same as a `data:` address."""
    return data_link("text/csv;charset=utf-8", write_csv(rows).encode())


def data_link(kind: str, content: bytes) -> str:
    """Bytes as a `data:` address."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def grey_png(values: np.ndarray) -> str:
    """(rows, columns) in [0, 1] → an 8-bit grey PNG."""
    return _png(Image.fromarray((values * 255).round().clip(0, 255).astype(np.uint8)))


def colour_png(image: np.ndarray) -> str:
    """(3, rows, columns) uint8 → a PNG."""
    return _png(Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))))


def _png(image: Image.Image) -> str:
    with io.BytesIO() as buffer:
        image.save(buffer, "png", optimize=True)
        return data_link("image/png", buffer.getvalue())


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
