"""Questions: a registered analysis, or a function of one's own, with its settings bound and the name it is asked by."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vitruvius._config import bind, parse_spec
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

    def about(self, site: Site) -> Callable[[Heads], Statistics]:
        """The question as a function of this site's Heads."""
        return (lambda heads: self.make(heads, site)) if _takes_site(self.make) else self.make

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


def _takes_site(piece: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds for p in inspect.signature(piece).parameters.values()) > 1


def _name_of(piece: Callable[..., Any]) -> str:
    if isinstance(piece, functools.partial):
        settings = ",".join(f"{key}={value}" for key, value in piece.keywords.items())
        return f"{_name_of(piece.func)}:{settings}" if settings else _name_of(piece.func)
    return next((name for name in analyses if analyses[name] is piece), getattr(piece, "__name__", repr(piece)))
