"""What a notebook shows of a result: a line of text, a table in the page's colours, a picture, a frame, a CSV file.

A class says what it is (`_title`), its numbers row by row (`_records`) and how it is drawn (`_draw`).
"""

from __future__ import annotations

import csv
import html
import io
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitruvius._files import StrPath, atomic_write_text
from vitruvius._registry import require

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from torch import nn

Records = Sequence[Mapping[str, Any]]
MOST_ROWS = 24  # shown of a table; frames and files have all
CSS = """
.vitruvius{color:var(--ink);background:var(--surface);border:1px solid var(--rule);border-radius:6px;padding:.6em .9em;
display:inline-block;max-width:100%;overflow-x:auto;font-size:13px;line-height:1.45}
.vitruvius table{border-collapse:collapse;margin:.3em 0;color:inherit;background:none}
.vitruvius :is(th,td){text-align:right;padding:.15em .8em .15em 0;border:0;background:none;color:inherit;
border-bottom:1px solid var(--rule)}
.vitruvius :is(th,td):first-child{text-align:left}.vitruvius thead th{color:var(--quiet);font-weight:600}
.vitruvius p{margin:.2em 0}.vitruvius .quiet{color:var(--quiet)}
"""


class Shown:
    """A result that shows itself."""

    __slots__ = ()

    def _title(self) -> str:
        raise NotImplementedError

    def _records(self) -> Records:
        raise NotImplementedError

    def _draw(self, axes: Axes, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def _tables(self) -> Mapping[str, Records]:
        """What is shown as tables, by caption."""
        return {"": self._records()}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._title()}>"

    def _repr_html_(self) -> str:
        return as_html(self._title(), self._tables())

    def plot(self, axes: Axes | None = None, **choice: Any) -> Axes:
        """Draw it on `axes` (default: new ones of pyplot), and return those; `choice`: what of it."""
        return plot(self._draw, axes, **choice)

    def to_frame(self) -> Any:
        """All numbers as a pandas DataFrame, a line per row."""
        return to_frame(self._records())

    def to_csv(self, path: StrPath | None = None) -> str:
        """All numbers as CSV text, written to the file `path` if there is one."""
        return to_csv(self._records(), path)


def plot(draw: Callable[..., None], axes: Axes | None, **choice: Any) -> Axes:
    """`draw` on `axes` (default: new ones of pyplot) in the look of the page; returns those."""
    from vitruvius._style import LIGHT, figure_style

    with figure_style():
        if axes is None:
            from matplotlib import pyplot

            _, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained", facecolor=LIGHT["surface"])
        draw(axes, **choice)
    return axes


def to_frame(rows: Records) -> Any:
    """`rows` as a pandas DataFrame."""
    pandas: Any = require("pandas", "notebook")
    return pandas.DataFrame.from_records([dict(row) for row in rows])


def to_csv(rows: Records, path: StrPath | None = None) -> str:
    """`rows` as CSV text under the names of all columns, in order of first appearance; None is an empty cell.

    It is written to the file `path` if there is one.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    if path is not None:
        atomic_write_text(path, buffer.getvalue())
    return buffer.getvalue()


def as_html(title: str, tables: Mapping[str, Records], more: str = "") -> str:
    """A heading, tables (by caption) and `more` markup, light or dark as the notebook is."""
    from vitruvius._style import DARK, LIGHT, css_variables

    light, dark = css_variables(LIGHT), css_variables(DARK)
    style = (
        f".vitruvius{{{light}}}@media (prefers-color-scheme:dark){{.vitruvius{{{dark}}}}}"
        f"[data-jp-theme-light=true] .vitruvius{{{light}}}"
        f":is([data-jp-theme-light=false],.vscode-dark,[data-md-color-scheme=slate]) .vitruvius{{{dark}}}"
    )
    body = ""
    for caption, rows in tables.items():
        names = list(dict.fromkeys(name for row in rows for name in row))
        body += f"<p class=quiet>{html.escape(caption)}</p>" if caption else ""
        if rows:
            head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
            cells = [
                "".join(f"<td>{html.escape(cell_text(row.get(n)))}</td>" for n in names) for row in rows[:MOST_ROWS]
            ]
            lines = "".join(f"<tr>{line}</tr>" for line in cells)
            body += f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
        body += f"<p class=quiet>and {len(rows) - MOST_ROWS} more rows</p>" if len(rows) > MOST_ROWS else ""
    return f"<style>{style}{CSS}</style><div class=vitruvius><p><b>{html.escape(title)}</b></p>{body}{more}</div>"


def show_briefly(kind: type[nn.Module]) -> None:
    """In a notebook, show modules of this class as `module_html` does; anywhere else nothing happens."""
    ipython: Any = sys.modules.get("IPython")
    if ipython is not None and (shell := ipython.get_ipython()) is not None:
        shell.display_formatter.formatters["text/html"].for_type(kind, module_html)


def module_html(model: nn.Module) -> str:
    """What a model is, in a line; its own text folded away."""
    cores = Counter(core.describe() for m in model.modules() if (core := getattr(m, "core", None)) is not None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    attention = "".join(f"; {count} × {core}" for core, count in cores.items())
    text = f"<details><summary>modules</summary><pre>{html.escape(repr(model))}</pre></details>"
    return as_html(f"{type(model).__name__}, {parameters:,} parameters{attention}", {}, text)


def cell_text(value: object) -> str:
    """A number with four digits, a dash for nothing, anything else as it is."""
    if value is None or value == "":
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw_tiles(axes: Axes, tiles: Sequence[np.ndarray], labels: Sequence[str], *, across: int = 6) -> None:
    """Maps (N, M) of one size beside each other, `across` in a row, a label above each; dark where they are large.

    Each has its own scale, from 0 to what two in a hundred values exceed: a single outlier bleaches nothing.
    """
    import numpy as np

    from vitruvius._style import heat, outlier_proof

    height, width = (max(tile.shape[axis] for tile in tiles) for axis in (0, 1))
    across = min(across, len(tiles))
    gap_x, gap_y = max(1, width // 12), max(2, height // 5)
    rows = -(-len(tiles) // across)
    canvas = np.full((rows * (height + gap_y), across * (width + gap_x) - gap_x), np.nan)
    for place, (tile, label) in enumerate(zip(tiles, labels, strict=True)):
        y, x = (place // across) * (height + gap_y) + gap_y, (place % across) * (width + gap_x)
        canvas[y : y + tile.shape[0], x : x + tile.shape[1]] = tile / max(outlier_proof(tile), 1e-12)
        axes.text(x - 0.5, y - 0.8, label, fontsize=7.5, va="bottom")
    axes.imshow(canvas, cmap=heat(), vmin=0, vmax=1, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
