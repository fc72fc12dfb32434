"""Analyses: two small protocols, the registry, and questions, which are analyses with their settings bound.

An analysis looks at one site at a time, a model analysis at all sites in turn.

B images (for windows: windows), H heads, K positions of a curve
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from vitruvius._registry import Registry, Spec
from vitruvius.analysis._attended import Attended
from vitruvius.heads import Heads, Site

Statistics = dict[str, Tensor]  # each (B, H); with one more axis (B, H, K) it is a curve


class Analysis(Protocol):
    """`Heads → {statistic: (B, H)}`; what matters most comes first.

    May take the Site as a second argument and, as a third, what the core makes of the Heads (`Attended`: its true map,
    its output, the softmax it ends in).

    `heads` are what enters the site: q, k and v of B images, with bias and scale.
    """

    def __call__(self, heads: Heads, /) -> Statistics: ...


class ModelAnalysis(Protocol):
    """Sees the sites of a model one after the other, then answers once for each image.

    `see` may take a third argument as an `Analysis` does.

    `heads` enter `site`; sites come in the order in which they run.
    """

    def see(self, heads: Heads, site: Site) -> None: ...

    def result(self) -> dict[str, Tensor]:
        """Each (B,), or (B, K) for a curve."""
        ...


analyses: Registry[Callable[..., Any]] = Registry("analysis", "analyses", homes=["vitruvius.analysis"])


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
        """The answer at one site; a question takes Heads, and if it likes the Site and what its core makes of them.

        `heads` enter `site`; `attended` is what the core there makes of them.
        """
        found: Statistics = self.make(*(heads, site, attended)[: _takes(self.make)])
        return found

    def show(self, analysis: ModelAnalysis, heads: Heads, site: Site, attended: Attended) -> None:
        """One site more for a model analysis.

        `analysis` was begun by `begin`; `heads` enter `site`; `attended` is what the core there makes of them.
        """
        see: Any = analysis.see
        see(*(heads, site, attended)[: _takes(see)])

    def begin(self) -> ModelAnalysis:
        """A model analysis that has seen nothing yet."""
        made: ModelAnalysis = self.make()
        return made


def question(spec: Spec | Callable[..., Any] | Question, *, where: str = "analysis") -> Question:
    """One analysis, ready to be asked.

    spec: `"gammas:variant=released"`, `{use: gammas, variant: released}`, a function `Heads → {statistic: (B, H)}`, a
        class with `see` and `result`, or a Question.
    where: what was described, for an error.
    """
    if isinstance(spec, Question):
        return spec
    make = analyses.bind(spec, where=where)
    if isinstance(spec, str):
        return Question(name=spec, make=make)
    return Question(name=_name_of(make), make=make)


def _takes(piece: Callable[..., Any]) -> int:
    """How many of Heads, Site and Attended a piece asks for."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(3, sum(p.kind in kinds for p in inspect.signature(piece).parameters.values()))


def _name_of(piece: Callable[..., Any]) -> str:
    if isinstance(piece, functools.partial):
        settings = ",".join(f"{key}={value}" for key, value in piece.keywords.items())
        if settings:
            return f"{_name_of(piece.func)}:{settings}"
        return _name_of(piece.func)
    return next((name for name in analyses if analyses[name] is piece), getattr(piece, "__name__", repr(piece)))
