"""What an analysis is, and what it is asked about: Heads, what a core makes of them, and Heads drawn by chance.

An analysis looks at one site at a time, a model analysis at all sites in turn.

B images (for windows: windows), H heads, N queries, M keys, D key width, E value width, K positions of a curve
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from vitruvius._errors import DataError, UnsuitableSite
from vitruvius._random import Dice
from vitruvius._registry import Registry, Spec
from vitruvius.attention.base import Core, attention_map
from vitruvius.heads import Heads, Site

Variant = Literal["exact", "released"]  # the formula, or what the published script computes
Statistics = dict[str, Tensor]  # each (B, H); with one more axis (B, H, K) it is a curve


class ModelAnalysis(Protocol):
    """Sees the sites of a model in the order in which they run, then answers once for each image.

    `see` may take a third argument, `Attended`.
    """

    def see(self, heads: Heads, site: Site) -> None: ...

    def result(self) -> dict[str, Tensor]:
        """Each (B,), or (B, K) for a curve."""
        ...


# An analysis is a function Heads → {statistic: (B, H)}, what matters most first, which may take the Site as a second
# argument and `Attended` as a third; or the class of a model analysis.
analyses: Registry[Callable[..., Any]] = Registry("analysis", "analyses", homes=["vitruvius.analysis"])


@dataclass(frozen=True, eq=False)
class Attended:
    """What a core makes of some Heads: its weights, its output, and the softmax it ends in."""

    heads: Heads  # those that reach the kernel
    core: Core | None = None  # plain softmax where there is none
    mixing: Tensor | None = None  # (…, M', M): the kernel's values are mixing @ the entering ones; None: they are those
    unmapped: str = ""  # the name of a stage that changes the values and does not say how

    def map(self) -> Tensor:
        """The weights given to the values that enter the core, (B, H, N, M); an UnsuitableSite where there are none."""
        weights = attention_map(self.heads) if self.core is None else self.core.kernel.map(self.heads)
        if weights is None or self.unmapped:
            assert self.core is not None
            part = self.unmapped or list(self.core.parts)[-1]
            raise UnsuitableSite(f"{part!r} does not say which weights it gives to the values; it has no map.")
        if self.mixing is None:
            return weights
        if self.mixing.shape[-2] != weights.shape[-1]:
            raise UnsuitableSite(f"{self._described()!r} mixes values by their number, and some are hidden here.")
        return weights @ self.mixing.to(weights.dtype)

    def shares(self) -> Tensor:
        """|weight| / Σ |weights| of each query, (B, H, N, M): the map itself where it is a distribution."""
        return normalised(self.map())

    def output(self) -> Tensor:
        """What the kernel puts out, (B, H, N, E)."""
        if self.core is None:
            return attention_map(self.heads) @ self.heads.v
        if self.core.kernel.takes_context:
            raise UnsuitableSite(f"the output of {self._described()!r} depends on more than the Heads analysed here.")
        return self.core.kernel(self.heads._replace(dropout=0.0))

    def softmax(self) -> Heads:
        """The Heads of the softmax whose output is the core's; an UnsuitableSite where there is no such softmax."""
        if self.core is None:
            return self.heads
        last = self.core.kernel.last_softmax(self.heads)
        if last is None:
            raise UnsuitableSite(f"this is a question about a softmax, and {self._described()!r} does not end in one.")
        return last

    def _described(self) -> str:
        return "softmax" if self.core is None else self.core.describe()


def normalised(weights: Tensor) -> Tensor:
    """|weight| / Σ |weights| of each query, (…, N, M)."""
    weights = weights.abs()
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


class Question(NamedTuple):
    """One analysis with its settings bound: `gammas:variant=released`."""

    name: str
    make: Callable[..., Any]  # a function of Heads, or the class of a model analysis

    @property
    def of_model(self) -> bool:
        """Whether it looks at all sites together."""
        return isinstance(self.make.func if isinstance(self.make, functools.partial) else self.make, type)


def question(spec: Spec | Callable[..., Any] | Question) -> Question:
    """One analysis, ready to be asked.

    spec: `"gammas:variant=released"`, `{use: gammas, variant: released}`, a function `Heads → {statistic: (B, H)}`, a
        class with `see` and `result`, or a Question.
    """
    if isinstance(spec, Question):
        return spec
    make = analyses.bind(spec, where="analysis")
    return Question(spec if isinstance(spec, str) else _name_of(make), make)


def call(piece: Callable[..., Any], *arguments: Any) -> Any:
    """`piece` with as many of (heads, site, attended) as it takes."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(parameter.kind in kinds for parameter in inspect.signature(piece).parameters.values())
    return piece(*arguments[:count])


def _name_of(piece: Callable[..., Any]) -> str:
    if isinstance(piece, functools.partial):
        settings = ",".join(f"{key}={value}" for key, value in piece.keywords.items())
        return f"{_name_of(piece.func)}:{settings}" if settings else _name_of(piece.func)
    return next((name for name in analyses if analyses[name] is piece), getattr(piece, "__name__", repr(piece)))


def precise(heads: Heads) -> Heads:
    """The same in float64; values that are not finite are a DataError."""
    for name in ("q", "k", "v"):
        if not getattr(heads, name).isfinite().all():
            raise DataError(f"{name} holds values that are not finite: the model overflowed before the analysis.")
    bias = None if heads.bias is None else heads.bias.double()
    return heads._replace(q=heads.q.double(), k=heads.k.double(), v=heads.v.double(), bias=bias)


def gaussian(heads: Heads, dice: Dice) -> Heads:
    """Independent normal numbers of the same shape and root mean square, head by head."""

    def draw(name: str, x: Tensor) -> Tensor:
        size = x.square().mean((-2, -1), keepdim=True).sqrt()
        return dice.normal(name, x.shape[1:]).to(x) * size

    return _draw_each(heads, draw)


def spectrum(heads: Heads, dice: Dice) -> Heads:
    """The same singular values and the same directions in the width, turned at random over the tokens."""

    def draw(name: str, x: Tensor) -> Tensor:
        squares, right = torch.linalg.eigh(x.mT @ x)  # of the D × D matrix: cheaper than singular values of x
        rank = min(x.shape[-2:])
        sigma, right = squares[..., -rank:].clamp(min=0).sqrt(), right[..., -rank:]
        q, r = torch.linalg.qr(dice.normal(name, (*x.shape[1:-1], rank)).to(x))
        turned = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # uniform over orthonormal columns
        return (turned * sigma[..., None, :]) @ right.mT

    return _draw_each(heads, draw)


def permuted(heads: Heads, dice: Dice) -> Heads:
    """The same vectors in another order: q, k and v shuffled over the tokens, each by itself, head by head."""

    def draw(name: str, x: Tensor) -> Tensor:
        order = dice.uniform(name, x.shape[1:-1]).argsort(-1)
        return x.gather(-2, order[..., None].expand_as(x))

    return _draw_each(heads, draw)


Null = Callable[[Heads, Dice], Heads]  # Heads that share something with those observed and nothing else
NULLS: dict[str, Null] = {"gaussian": gaussian, "spectrum": spectrum, "permuted": permuted}


def _draw_each(heads: Heads, draw: Callable[[str, Tensor], Tensor]) -> Heads:
    """`draw` applied to q, k and v in float64; bias and scale stay."""
    q, k, v = (draw(name, getattr(heads, name).double()) for name in ("q", "k", "v"))
    return heads._replace(q=q, k=k, v=v)
