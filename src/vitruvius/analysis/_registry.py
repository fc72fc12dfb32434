"""Two small protocols: an analysis looks at one site at a time, a model analysis at all sites in turn.

B images (for windows: windows), H heads, K positions of a curve
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from vitruvius._registry import Registry
from vitruvius.heads import Heads, Site

Statistics = dict[str, Tensor]  # each (B, H); with one more axis (B, H, K) it is a curve


class Analysis(Protocol):
    """`Heads → {statistic: (B, H)}`; what matters most comes first.

    May take the Site as a second argument and, as a third, what the core makes of the Heads (`Attended`: its true map,
    its output, the softmax it ends in).
    """

    def __call__(self, heads: Heads, /) -> Statistics: ...


class ModelAnalysis(Protocol):
    """Sees the sites of a model one after the other, then answers once for each image.

    `see` may take a third argument as an `Analysis` does.
    """

    def see(self, heads: Heads, site: Site) -> None: ...

    def result(self) -> dict[str, Tensor]:
        """Each (B,), or (B, K) for a curve."""
        ...


analyses: Registry[Callable[..., Any]] = Registry("analysis", "analyses")
