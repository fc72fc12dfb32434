"""How figures are saved; the look that pages, figures and notebooks share."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from vitruvius._errors import ConfigError
from vitruvius._files import atomic_write_bytes
from vitruvius._style import DARK as DARK
from vitruvius._style import HEAT as HEAT
from vitruvius._style import LIGHT as LIGHT
from vitruvius._style import LINES as LINES
from vitruvius._style import MARKERS as MARKERS
from vitruvius._style import Series as Series
from vitruvius._style import figure_style as figure_style
from vitruvius._style import heat as heat
from vitruvius._style import in_percent as in_percent
from vitruvius._style import in_whole_numbers as in_whole_numbers
from vitruvius._style import legend_below as legend_below
from vitruvius._style import new_axes as new_axes
from vitruvius._style import outlier_proof as outlier_proof
from vitruvius._style import series as series


def save_figure(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure as `.png`, `.pdf` or `.svg` by its suffix; without a suffix as PNG and PDF. Returns the files."""
    path = Path(path)
    if path.suffix not in ("", ".png", ".pdf", ".svg"):
        raise ConfigError(f"figures are saved as .png, .pdf or .svg, not {path.suffix!r} ({path}).")
    paths = [path] if path.suffix else [path.with_name(path.name + suffix) for suffix in (".png", ".pdf")]
    for target in paths:
        atomic_write_bytes(target, encode_figure(figure, target.suffix[1:], facecolor=LIGHT["surface"]))
    return paths


def fit_text(figure: Figure) -> None:
    """Break titles and labels into lines that fit into the figure: nothing is cut off at its edges."""
    width, height = figure.get_size_inches()
    for axes in figure.axes:
        spec = axes.get_subplotspec()
        columns, rows = (1, 1) if spec is None else (spec.get_gridspec().ncols, spec.get_gridspec().nrows)
        beside = any(each is not axes and each.get_subplotspec() is None for each in figure.axes)  # a colour bar
        room: dict[Any, float] = {axes.xaxis.label: 0.75 * width / columns, axes.yaxis.label: 0.75 * height / rows}
        titles = [each for each in axes.get_children() if isinstance(each, Text) and each.get_text()]
        room |= dict.fromkeys(titles, (0.7 if beside else 0.85) * width / columns) if axes.axison else {}
        for text, inches in room.items():
            letters = max(8, int(inches * 72 / (0.62 * float(text.get_fontsize()))))  # of DejaVu Sans, on average
            text.set_text(textwrap.fill(" ".join(text.get_text().split()), letters, break_long_words=False))


def encode_figure(figure: Figure, kind: str, **settings: Any) -> bytes:
    """The bytes of a figure as png, pdf or svg (`kind`); the same figure gives the same bytes."""
    fit_text(figure)
    unstamped = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with figure_style(), io.BytesIO() as buffer:
        figure.savefig(buffer, format=kind, metadata=unstamped[kind], **settings)
        return buffer.getvalue()
