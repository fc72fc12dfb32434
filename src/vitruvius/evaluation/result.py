"""Report: what an evaluation found, a reduction of its ledger; prints as a table, saves as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vitruvius._files import atomic_write_text
from vitruvius.evaluation.intervals import wilson
from vitruvius.evaluation.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Score:
    """Accuracy under one threat, with a Wilson 95 % interval."""

    name: str
    spec: str
    correct: int
    n: int
    accuracy: float
    low: float
    high: float
    loss: float | None = None
    top5: float | None = None
    eps: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Scores by threat, the worst case over all of them, and the ledger they come from."""

    data: str
    num_images: int
    threats: list[Score]
    worst_case: Score
    remarks: list[str] = field(default_factory=list)
    ledger: Ledger = field(repr=False, compare=False, default_factory=Ledger)

    def __getitem__(self, name: str) -> Score:
        return next(score for score in self.threats if name in (score.name, score.spec))

    def __str__(self) -> str:
        rows = [*self.threats, self.worst_case] if len(self.threats) > 1 else list(self.threats)
        width = max(len("threat"), *(len(row.spec) for row in rows))
        lines = [f"{'threat':<{width}}  accuracy   95 % interval       n", "-" * (width + 39)]
        lines += [
            f"{r.spec:<{width}}  {100 * r.accuracy:6.2f} %   {100 * r.low:6.2f} – {100 * r.high:6.2f}  {r.n:>7,}"
            for r in rows
        ]
        return "\n".join([*lines, *(f"note: {remark}" for remark in self.remarks)])

    def to_dict(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "num_images": self.num_images,
            "threats": [asdict(score) for score in self.threats],
            "worst_case": asdict(self.worst_case),
            "remarks": self.remarks,
        }

    def save(self, path: str | Path) -> None:
        """Write the numbers as JSON."""
        atomic_write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")


def summarise(
    ledger: Ledger, specs: dict[str, str], eps: dict[str, float | None], data: str, remarks: list[str]
) -> Report:
    """Reduce a ledger to scores: one a threat, and the worst case an image meets over all."""
    scores = [_score(ledger, name, specs[name], eps.get(name)) for name in specs]
    survivors, n = _worst_case(ledger, list(specs))
    low, high = wilson(survivors, n)
    worst = Score(
        name="worst case",
        spec="worst case of all",
        correct=survivors,
        n=n,
        accuracy=survivors / max(n, 1),
        low=low,
        high=high,
    )
    return Report(
        data=data,
        num_images=scores[0].n,
        threats=scores,
        worst_case=worst,
        remarks=remarks,
        ledger=ledger,
    )


def _score(ledger: Ledger, name: str, spec: str, eps: float | None) -> Score:
    rows = ledger.rows(name)
    n, correct = len(rows["id"]), int(rows["correct"].sum())
    low, high = wilson(correct, n)
    return Score(
        name=name,
        spec=spec,
        correct=correct,
        n=n,
        accuracy=correct / max(n, 1),
        low=low,
        high=high,
        loss=float(rows["loss"].double().mean()),
        top5=float(rows["top5"].double().mean()) if "top5" in rows else None,
        eps=eps,
    )


def _worst_case(ledger: Ledger, names: list[str]) -> tuple[int, int]:
    """Images that every threat left correct, among those every threat has seen."""
    ids = ledger.rows(names[0])["id"]
    for name in names[1:]:
        ids = ids[torch.isin(ids, ledger.rows(name)["id"])]
    standing = torch.ones(len(ids), dtype=torch.bool)
    for name in names:
        rows = ledger.rows(name)
        standing &= rows["correct"][torch.isin(rows["id"], ids)]
    return int(standing.sum()), len(ids)
