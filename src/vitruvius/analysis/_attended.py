"""What a core really makes of the Heads under analysis: its weights, its output, the softmax it ends in.

Heads here are those that the kernel receives, in float64. B batch, H heads, N queries, M keys, E value width.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from vitruvius._errors import UnsuitableSite
from vitruvius.analysis._kernel import precise
from vitruvius.attention.base import Core, Received, attention_map
from vitruvius.heads import Heads


class Attended:
    """The answers of a core about some Heads; without a core, those of plain softmax.

    heads: those that reach the kernel.
    core: whose answers they are; default: plain softmax.
    mixing: (…, M', M), by which the stages made the kernel's values of those that entered; None where they kept them.
    unsaid: the name of a stage that changes the values without saying how; empty where there is none.
    """

    def __init__(self, heads: Heads, core: Core | None = None, mixing: Tensor | None = None, unsaid: str = "") -> None:
        self.heads, self.core, self.mixing, self.unsaid = heads, core, mixing, unsaid

    def map(self) -> Tensor:
        """The weights given to the values that enter the core, (B, H, N, M); refused by name where there are none."""
        found: Tensor | None = None
        if self.core is None:
            found = attention_map(self.heads)
        else:
            found = self.core.kernel.map(self.heads)
        if found is None or self.unsaid:
            raise UnsuitableSite(f"{self._blamed()} does not say which weights it gives to the values; it has no map.")
        if self.mixing is None:
            return found
        if self.mixing.shape[-2] != found.shape[-1]:
            raise UnsuitableSite(f"{self._described()!r} mixes values by their number, and some are hidden here.")
        return found @ self.mixing.to(found.dtype)

    def shares(self) -> Tensor:
        """|weight| / Σ |weights| of each query, (B, H, N, M): the map itself where it is a distribution."""
        weights = self.map().abs()
        return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)

    def output(self) -> Tensor:
        """What the kernel puts out, (B, H, N, E)."""
        if self.core is None:
            return attention_map(self.heads) @ self.heads.v
        if self.core.kernel.takes_context:
            raise UnsuitableSite(f"the output of {self._described()!r} depends on more than the Heads analysed here.")
        out: Tensor = self.core.kernel(self.heads._replace(dropout=0.0))
        return out

    def softmax(self) -> Heads:
        """The Heads of the softmax whose output is the core's; refused by name where there is no such softmax."""
        if self.core is None:
            return self.heads
        found = self.core.kernel.last_softmax(self.heads)
        if found is None:
            raise UnsuitableSite(f"this is a question about a softmax, and {self._described()!r} does not end in one.")
        return found

    def _described(self) -> str:
        if self.core is None:
            return "softmax"
        return self.core.describe()

    def _blamed(self) -> str:
        assert self.core is not None
        return repr(self.unsaid or list(self.core.parts)[-1])


class Teller:
    """What one core can tell about a batch: of the Heads observed, and of Heads drawn by chance in their place."""

    def __init__(self, core: Core | None, precise_core: Core | None, entering: Heads) -> None:
        self.core = precise_core
        if core is None:
            self.received, self.mixing, self.unsaid = Received(entering, None, "")
        else:
            self.received, self.mixing, self.unsaid = core.run_stages(entering)

    def about(self, heads: Heads, rows: Tensor, *, observed: bool) -> Attended:
        """Of `heads`, which are these rows of the batch or drawn in their place."""
        heads = precise(heads)
        if observed:
            mixing = self._rows_of_mixing(rows)
        else:
            mixing = self._mixing_at(heads)
        return Attended(heads, self.core, mixing, self.unsaid)

    def _rows_of_mixing(self, rows: Tensor) -> Tensor | None:
        if self.mixing is None or self.mixing.dim() < 4 or len(self.mixing) == 1:
            return self.mixing
        return self.mixing[rows]

    def _mixing_at(self, heads: Heads) -> Tensor | None:
        """How the stages would mix the values of Heads that were drawn where the kernel receives them."""
        found: Tensor | None = None
        if self.mixing is None or self.core is None:
            return None
        for stage in self.core.stages.values():
            own = stage.value_mixing(heads)
            if own is not None:
                if found is None:
                    found = own
                else:
                    found = own @ found
        return found


def in_float64(core: Core) -> Core:
    """A copy whose numbers are as precise as the Heads of an analysis."""
    return copy.deepcopy(core).double().eval()
