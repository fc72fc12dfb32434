"""How figures are saved; the look that pages, figures and notebooks share."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

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


def encode_figure(figure: Figure, kind: str, **settings: Any) -> bytes:
    """The bytes of a figure as png, pdf or svg (`kind`); the same figure gives the same bytes."""
    unstamped = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with figure_style(), io.BytesIO() as buffer:
        figure.savefig(buffer, format=kind, metadata=unstamped[kind], **settings)
        return buffer.getvalue()
