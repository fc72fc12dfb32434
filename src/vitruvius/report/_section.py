"""Sections of the page: each a function `runs → blocks` in a file of its own, known by name, shown in order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from vitruvius._registry import Registry
from vitruvius.report._blocks import Block
from vitruvius.report._runs import Run

Draw = Callable[[Sequence[Run]], Sequence[Block]]


class Section:
    """A part of the page: its heading, its place, and what draws it. No blocks, no section."""

    def __init__(self, draw: Draw, *, name: str, title: str, order: float) -> None:
        self.name, self.title, self.order = name, title, order
        self._draw = draw
        functools.update_wrapper(self, draw)

    def __call__(self, runs: Sequence[Run]) -> Sequence[Block]:
        return self._draw(runs)


sections: Registry[Section] = Registry("section", homes=["vitruvius.report.sections"])


def section(name: str, *, title: str, order: float) -> Callable[[Draw], Section]:
    """Decorator: put a drawing function on the page.

    name: of the section, in its address. title: its heading. order: its place, from 0 (top) to 100 (bottom).
    """

    def add(draw: Draw) -> Section:
        return sections.register(name)(Section(draw, name=name, title=title, order=order))

    return add


def in_order() -> list[Section]:
    """All sections from top to bottom."""
    return sorted((sections[name] for name in sections), key=lambda section: (section.order, section.name))
