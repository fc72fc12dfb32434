"""What a section of the page is made of: cards, drawings, tables, notes, folds, maps; and how each is embedded.

A page stays one file: tables travel as CSV links, arrays as small PNG pictures, matplotlib figures as SVG in the page's
colours, so that they follow light and dark.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from PIL import Image

from vitruvius._format import interval, number, percent
from vitruvius._notebook import to_csv
from vitruvius._registry import Registry
from vitruvius._style import LIGHT, encode_figure
from vitruvius.report.run import Run

Row = Mapping[str, object]
Rows = Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class Block:
    """One piece of a section, shown by the template of its name: `Note` by templates/note.html.j2."""

    @property
    def template(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True, kw_only=True)
class Data(Block):
    """A block whose numbers can be downloaded."""

    name: str  # of the CSV file
    rows: Rows

    @property
    def csv(self) -> str:
        return data_link("text/csv;charset=utf-8", to_csv(self.rows).encode())


@dataclass(frozen=True, kw_only=True)
class Html(Block):
    """Markup made elsewhere, for sections that bring their own."""

    markup: Markup


@dataclass(frozen=True, kw_only=True)
class Note(Block):
    """A sentence for the reader."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Key:
    """An entry of a legend: a dot in a colour, or a line in a pattern of strokes."""

    text: str
    colour: str = "quiet"  # a name of the palette
    dashes: str | None = None  # as SVG's stroke-dasharray; empty is a full line, None a dot

    @classmethod
    def of_line(cls, text: str, line: str | tuple[int, tuple[float, ...]], colour: str = "quiet") -> Key:
        """For a line style of matplotlib, whose dashes are in multiples of the line's width."""
        strokes = line[1] if isinstance(line, tuple) else ()
        return cls(text=text, colour=colour, dashes=" ".join(f"{1.8 * stroke:g}" for stroke in strokes))


def run_keys(runs: Sequence[Run]) -> list[Key]:
    """A dot for each run; a single run needs no legend."""
    return [Key(text=run.name, colour=run.look.name) for run in runs] if len(runs) > 1 else []


@dataclass(frozen=True, kw_only=True)
class Drawing(Data):
    """One or several figures under one caption, with their data as CSV."""

    panels: Sequence[tuple[Figure, str]]  # each with what it says to those who do not see it
    caption: str
    legend: Sequence[Key] = ()

    @property
    def svgs(self) -> list[Markup]:
        return [inline_svg(figure, name=f"{self.name}-{i}", alt=alt) for i, (figure, alt) in enumerate(self.panels)]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What stands in a table, what it sorts by, a quieter second text, and the colour of a dot before it."""

    text: str
    value: float | None = None
    detail: str = ""
    colour: str = ""


def run_cell(run: Run) -> Cell:
    """The name of a run, with a dot in its colour."""
    return Cell(text=run.name, colour=run.look.name)


def number_cell(value: float | None, write: Callable[[float | None], str]) -> Cell:
    """A number, written by `write`."""
    return Cell(text=write(value), value=value)


def share_cell(row: Row, key: str, low: str = "", high: str = "", of: str = "") -> Cell:
    """The share `key` of a row in per cent; below it its interval from `low` to `high`, and `of` what."""
    value = number(row.get(key))
    ends = number(row.get(low or f"{key}_low")), number(row.get(high or f"{key}_high"))
    return Cell(text=percent(value), value=value, detail="" if value is None else f"{interval(*ends)} {of}".strip())


@dataclass(frozen=True, kw_only=True)
class Table(Data):
    """A table that sorts by a click on a heading, with its data as CSV."""

    titles: Sequence[str]
    cells: Sequence[Sequence[Cell]]
    caption: str = ""

    @property
    def numeric(self) -> list[str]:
        """The titles of columns that are aligned right: those that hold numbers."""
        columns = zip(self.titles, zip(*self.cells, strict=True), strict=False)
        return [title for title, cells in columns if any(cell.value is not None for cell in cells)]


def plain_table(name: str, titles: Sequence[str], cells: Sequence[Sequence[Cell]], caption: str) -> Table:
    """A table whose CSV holds what it shows: numbers where there are some, else texts."""
    values = [[cell.text if cell.value is None else cell.value for cell in line] for line in cells]
    rows = [dict(zip(titles, line, strict=True)) for line in values]
    return Table(name=name, titles=titles, cells=cells, rows=rows, caption=caption)


@dataclass(frozen=True, kw_only=True)
class Card:
    """A run at a glance: its name, a few large numbers and a few small facts."""

    title: str
    subtitle: str
    colour: str
    figures: Sequence[tuple[str, str, str]]  # (label, number, interval)
    facts: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, kw_only=True)
class Cards(Block):
    """Cards side by side."""

    cards: Sequence[Card]


@dataclass(frozen=True, kw_only=True)
class Fold(Block):
    """A line to open: text in fixed width, or further blocks."""

    title: str
    text: str = ""
    inside: Sequence[Block] = ()


@dataclass(frozen=True, kw_only=True)
class Maps(Data):
    """A row of pictures for each site, one per head, with their data as CSV."""

    title: str
    colour: str
    sites: Sequence[tuple[str, Sequence[tuple[str, str]]]]  # (site, (picture, what is written below it) by head)
    low: str  # what stands before the scale of colours, and behind it
    high: str

    @property
    def narrow(self) -> bool:
        """Whether two grids have room side by side."""
        return max(len(heads) for _, heads in self.sites) <= 4


Draw = Callable[[Sequence[Run]], Sequence[Block]]


sections: Registry[Any] = Registry("section", homes=["vitruvius.report.sections"])


def section(name: str, *, title: str, order: float) -> Callable[[Draw], Draw]:
    """Decorator: put a drawing function on the page, as long as it has blocks to show.

    name: of the section, in its address.
    title: its heading.
    order: its place, from 0 (top) to 100 (bottom).
    """

    def add(draw: Draw) -> Draw:
        vars(draw).update(title=title, order=order)
        return cast(Draw, sections.register(name)(draw))

    return add


def data_link(kind: str, content: bytes) -> str:
    """Bytes as a `data:` address."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def png_link(image: np.ndarray) -> str:
    """A picture uint8, (rows, columns) grey or (3, rows, columns), as a PNG."""
    with io.BytesIO() as buffer:
        turned = image if image.ndim == 2 else np.ascontiguousarray(image.transpose(1, 2, 0))
        Image.fromarray(turned).save(buffer, "png", optimize=True)
        return data_link("image/png", buffer.getvalue())


def grey_png(values: np.ndarray) -> str:
    """(rows, columns) in [0, 1] → an 8-bit grey PNG, which takes the page's colours."""
    return png_link((values * 255).round().clip(0, 255).astype(np.uint8))


def inline_svg(figure: Figure, *, name: str, alt: str) -> Markup:
    """The figure as one `<svg>` element; `name` keeps its inner ids apart from those of other figures."""
    text = encode_figure(figure, "svg").decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    match = re.search(r'<svg [^>]*viewBox="([^"]*)"[^>]*>(.*)</svg>', text, flags=re.DOTALL)
    assert match is not None
    box, body = match.groups()
    used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", body))  # ids nobody refers to are dropped
    body = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", body)
    body = re.sub(r"(href=\"#|url\(#)", rf"\g<1>{name}-", body)
    colours = {colour: f"var(--{colour_name})" for colour_name, colour in LIGHT.items()}
    body = re.sub(r"#[0-9a-f]{6}\b", lambda m: colours.get(m[0], m[0]), body)
    fonts = r"font: (?:(bold|700) )?([\d.]+px)[^;\"]*"  # matplotlib's as the page's, of the same size and weight
    body = re.sub(fonts, lambda m: f"font-size: {m[2]}" + ("; font-weight: 600" if m[1] else ""), body)
    width = 1.36 * float(box.split()[2])
    head = f'<svg viewBox="{box}" role="img" aria-label="{escape(alt)}" style="max-width: {width:.0f}px">'
    return Markup(head + body.strip() + "</svg>")
