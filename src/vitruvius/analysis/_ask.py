"""Questions: a registered analysis, or a function of one's own, with its settings bound and the name it is asked by."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vitruvius._config import bind, parse_spec
from vitruvius.analysis._attended import Attended
from vitruvius.analysis._registry import ModelAnalysis, Statistics, analyses
from vitruvius.heads import Heads, Site


@dataclass(frozen=True, kw_only=True)
class Question:
    """One analysis as asked: `gammas:variant=released`."""

    name: str
    make: Callable[..., Any]  # a function of Heads, or the class of a model analysis; settings bound

    @property
    def of_model(self) -> bool:
        """Whether it looks at all sites together."""
        return isinstance(self.make.func if isinstance(self.make, functools.partial) else self.make, type)

    def ask(self, heads: Heads, site: Site, attended: Attended) -> Statistics:
        """The answer at one site; a question takes Heads, and if it likes the Site and what its core makes of them."""
        found: Statistics = self.make(*(heads, site, attended)[: _takes(self.make)])
        return found

    def show(self, analysis: ModelAnalysis, heads: Heads, site: Site, attended: Attended) -> None:
        """One site more for a model analysis."""
        see: Any = analysis.see
        see(*(heads, site, attended)[: _takes(see)])

    def begin(self) -> ModelAnalysis:
        """A model analysis that has seen nothing yet."""
        made: ModelAnalysis = self.make()
        return made


def question(spec: str | Callable[..., Any] | Question) -> Question:
    """`"gammas:variant=released"`, a function `Heads → {statistic: (B, H)}`, or a class with `see` and `result`."""
    if isinstance(spec, Question):
        return spec
    if not isinstance(spec, str):
        return Question(name=_name_of(spec), make=spec)
    name, settings = parse_spec(spec)
    piece = analyses[name]
    return Question(name=spec, make=functools.partial(piece, **bind(name, piece, settings)))


def _takes(piece: Callable[..., Any]) -> int:
    """How many of Heads, Site and Attended a piece asks for."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(3, sum(p.kind in kinds for p in inspect.signature(piece).parameters.values()))


def _name_of(piece: Callable[..., Any]) -> str:
    if isinstance(piece, functools.partial):
        settings = ",".join(f"{key}={value}" for key, value in piece.keywords.items())
        return f"{_name_of(piece.func)}:{settings}" if settings else _name_of(piece.func)
    return next((name for name in analyses if analyses[name] is piece), getattr(piece, "__name__", repr(piece)))
