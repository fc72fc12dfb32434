"""What a cascade on a faster view must know again after a kill, beside which images each stage has decided about.

How far the view is off is measured on a pool's first images; claims and the short search's surprises are counted over
the whole pool; and the short search starts from the worst points of the first stage. A journal keeps it all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius.attacks._ensemble.journal import Journal

VIEW = "view"
CLAIMED = "claimed"
POINTS = "points"


class FastFacts:
    """Facts about the images of a pool by their ids (B,); without a journal nothing is kept and nothing is known."""

    def __init__(self, journal: Journal | None, ids: Tensor) -> None:
        self.journal = journal
        self.ids = ids.cpu()

    def known_view(self) -> tuple[float, bool] | None:
        """Error and trust as measured before; None: not yet. Of pools that were put together the worse."""
        kept = self._recall(VIEW)
        if not kept:
            return None
        return float(kept["error"].max()), bool(kept["trusted"].all())

    def keep_view(self, error: float, *, trusted: bool) -> None:
        if self.journal is not None:
            number = len(self.ids)
            facts = {"error": torch.full((number,), error, dtype=torch.float64)}
            self.journal.keep(VIEW, self.ids, {**facts, "trusted": torch.full((number,), trusted)})

    def known_points(self) -> tuple[Tensor, Tensor]:
        """Rows whose worst points are known, and the points, on the CPU."""
        kept = self._recall(POINTS)
        if not kept:
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        rows = self._rows_of(kept["id"])
        known = rows >= 0
        return rows[known], kept["point"][known]

    def keep_points(self, ids: Tensor, points: Tensor) -> None:
        """Of images that have survived the first stage."""
        if self.journal is not None and len(ids):
            self.journal.keep(POINTS, ids, {"point": points.cpu()})

    def known_claims(self) -> Tensor:
        """Rows of images that have fooled the view alone."""
        kept = self._recall(CLAIMED)
        if not kept:
            return torch.empty(0, dtype=torch.int64)
        rows = self._rows_of(kept["id"])
        return rows[rows >= 0]

    def keep_claims(self, ids: Tensor) -> None:
        if self.journal is not None and len(ids):
            self.journal.keep(CLAIMED, ids, {})

    def broken_before(self, stage: str) -> Tensor:
        """Of images that this stage had broken before a kill, and that are no longer here: whether each was claimed."""
        kept = self._recall(_broken_by(stage))
        if not kept:
            return torch.empty(0, dtype=torch.bool)
        return kept["claimed"][self._rows_of(kept["id"]) < 0]

    def keep_broken(self, stage: str, ids: Tensor, claimed: Tensor) -> None:
        if self.journal is not None and len(ids):
            self.journal.keep(_broken_by(stage), ids, {"claimed": claimed.cpu()})

    def _recall(self, kind: str) -> dict[str, Tensor]:
        if self.journal is None:
            return {}
        return self.journal.recall(kind)

    def _rows_of(self, ids: Tensor) -> Tensor:
        """Where these images stand in the pool; −1 where they do not."""
        place = {number: row for row, number in enumerate(self.ids.tolist())}
        return torch.tensor([place.get(number, -1) for number in ids.tolist()], dtype=torch.int64)


def _broken_by(stage: str) -> str:
    return f"broken by {stage}"
