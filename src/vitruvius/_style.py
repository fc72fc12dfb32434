"""One look for pages, figures and notebooks: colours by name, matplotlib settings, axes; and how figures are saved."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vitruvius._errors import ConfigError
from vitruvius._files import atomic_write_bytes

LIGHT = {
    "paper": "#faf7f1",
    "surface": "#fffefb",
    "ink": "#231e19",
    "quiet": "#6d645a",
    "rule": "#e0d8cb",
    "accent": "#a1401d",
    "series-0": "#0067ad",
    "series-1": "#cd5700",
    "series-2": "#00965e",
    "series-3": "#b0628f",
    "series-4": "#8a3c18",
    "series-5": "#4a4948",
}
DARK = {
    "paper": "#171513",
    "surface": "#1f1c19",
    "ink": "#ece5da",
    "quiet": "#a2988b",
    "rule": "#3a352f",
    "accent": "#e8895c",
    "series-0": "#5fb3ef",
    "series-1": "#e97d42",
    "series-2": "#38a779",
    "series-3": "#ceb2ca",
    "series-4": "#e5dc4d",
    "series-5": "#c9e3be",
}


HEAT = ("#fbf6ea", "#f6dfb0", "#edb85f", "#dd8436", "#bd4f24", "#8a2a20", "#54141f", "#2a0a17")
FONT_SIZE = 11.0
LINES = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (6, 1.5, 1.2, 1.5, 1.2, 1.5)))
MARKERS = ("o", "s", "D", "^", "v", "P")
SETTINGS: dict[str, Any] = {  # of matplotlib
    "font.family": ["DejaVu Sans"],
    "font.size": FONT_SIZE,
    "text.usetex": False,
    "text.parse_math": False,
    **dict.fromkeys(("text.color", "axes.titlecolor"), LIGHT["ink"]),
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), LIGHT["quiet"]),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), LIGHT["rule"]),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    "axes.titlelocation": "left",
    "axes.titlesize": FONT_SIZE,
    "axes.titlepad": 10,
    "axes.titleweight": "bold",
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.8,
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": FONT_SIZE - 1,
    "legend.borderaxespad": 0.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "vitruvius",
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}


class Series(NamedTuple):
    """How the lines and dots of one run look; colour and marker say the same thing twice."""

    name: str  # a key of `LIGHT` and `DARK`
    colour: str
    marker: str


def series(index: int) -> Series:
    """The look of run number `index`; colours return after six runs, then with another marker."""
    name = f"series-{index % 6}"
    return Series(name, LIGHT[name], MARKERS[(index + index // 6) % len(MARKERS)])


def css_variables(palette: Mapping[str, str]) -> str:
    """A palette as variables of a style sheet."""
    return "".join(f"--{name}:{colour};" for name, colour in palette.items())


def heat() -> LinearSegmentedColormap:
    """The colours of attention, from paper to dark sanguine; lightness falls all the way."""
    return LinearSegmentedColormap.from_list("vitruvius.heat", list(HEAT))


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw and save under these settings, and leave matplotlib as it was."""
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # names in other scripts; browsers have them
        yield


def new_axes(width: float = 5.4, height: float = 3.1) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, without the global state of pyplot. Sizes are inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def in_percent(*axes: Axis) -> None:
    """Ticks of shares as `50 %`."""
    for axis in axes:
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))


def in_whole_numbers(axis: Axis, most: int) -> None:
    """At most so many ticks, all at whole numbers."""
    axis.set_major_locator(MaxNLocator(integer=True, nbins=most))


def legend_below(figure: Figure, *, columns: int = 3) -> None:
    """The legend of all axes of `figure` below them, `columns` entries in a row: it covers nothing."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        look = {"ncols": columns, "fontsize": 8.5, "handlelength": 1.8, "columnspacing": 1.2}
        figure.legend(list(entries.values()), list(entries), loc="outside lower center", **look)


def outlier_proof(values: np.ndarray) -> float:
    """The end of a scale of colours: the 98th percentile, so that outliers bleach nothing; of few, the maximum."""
    return float(np.quantile(values, 0.98, method="lower")) if values.size >= 50 else float(values.max())


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
