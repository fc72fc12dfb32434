"""What a section is made of: cards, drawings, tables, notes, folds, and whatever else a template can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from markupsafe import Markup

from vitruvius.report._markup import Rows, csv_link


@dataclass(frozen=True, kw_only=True)
class Block:
    """One piece of a section, shown by a template of the folder `blocks`."""

    template: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class Html(Block):
    """Markup made elsewhere, for sections that bring their own."""

    template: ClassVar[str] = "html"
    markup: Markup


@dataclass(frozen=True, kw_only=True)
class Note(Block):
    """A sentence for the reader."""

    template: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True, kw_only=True)
class Key:
    """An entry of a legend: a dot in a colour, or a line in a pattern of strokes."""

    text: str
    colour: str = "quiet"  # a name of the palette
    dashes: str | None = None  # as SVG's stroke-dasharray; empty is a full line, None a dot


@dataclass(frozen=True, kw_only=True)
class Drawing(Block):
    """One or several panels under one caption, with their data as CSV."""

    template: ClassVar[str] = "drawing"
    name: str  # of the CSV file
    panels: Sequence[Markup]
    caption: str
    rows: Rows
    legend: Sequence[Key] = ()

    @property
    def csv(self) -> str:
        return csv_link(self.rows)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A heading; numbers are aligned right."""

    title: str
    numeric: bool = False


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What stands in a table, what it sorts by, a quieter second text, and the colour of a dot before it."""

    text: str
    value: float | None = None
    detail: str = ""
    colour: str = ""


@dataclass(frozen=True, kw_only=True)
class Table(Block):
    """A table that sorts by a click on a heading, with its data as CSV."""

    template: ClassVar[str] = "table"
    name: str  # of the CSV file
    columns: Sequence[Column]
    cells: Sequence[Sequence[Cell]]
    rows: Rows
    caption: str = ""

    @property
    def csv(self) -> str:
        return csv_link(self.rows)


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

    template: ClassVar[str] = "cards"
    cards: Sequence[Card]


@dataclass(frozen=True, kw_only=True)
class Fold(Block):
    """A line to open: text in fixed width, or further blocks."""

    template: ClassVar[str] = "fold"
    title: str
    text: str = ""
    inside: Sequence[Block] = field(default_factory=tuple)
