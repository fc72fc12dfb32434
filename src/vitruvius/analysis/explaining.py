"""Explanations over many images: maps of the first ones, clean and attacked, and scores of all of them beside chance.

B images
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._processes import Process
from vitruvius._random import Dice
from vitruvius.analysis._statistics import MODEL, OBSERVED, Sums, make_rows
from vitruvius.analysis.base import share_of
from vitruvius.analysis.explanations import explain, score
from vitruvius.analysis.table import Pictures, Table
from vitruvius.attacks.base import disturb
from vitruvius.evaluation.threats import Threat

CHANCE = "chance"  # a map of random numbers for each image
SHOWN = 8  # images whose maps are kept
STEPS = 10  # parts in which patches go and come for the scores
ATTACK = "pgd:eps=4/255"


class Explainer:
    """Sees batches, keeps sums of scores and the maps of the first images.

    model: in eval mode.
    names: explanations with their settings, `"integrated_gradients:steps=20"`.
    threat: leads away from what the model answers; None: clean images alone.
    process: of several processes, this one.
    seed: of chance.
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], threat: Threat | None, *, process: Process, seed: int
    ) -> None:
        self.model, self.names, self.threat, self.seed = model, names, threat, seed
        self.shown = share_of(SHOWN, process)
        self.sums = Sums()
        self.pictures: dict[str, list[Pictures]] = {}

    def see(self, x: Tensor, ids: Tensor) -> None:
        """One batch: images (B, 3, h, w) and their ids (B,)."""
        images = {"clean": x}
        if self.threat is not None:
            with torch.no_grad():
                answers = self.model(x).argmax(-1)
            images["attacked"] = disturb(self.threat, self.model, x, answers, ids.to(x.device)).detach()
        for name in self.names:
            maps = {f"{view}_map": self._explain(name, view, each, ids) for view, each in images.items()}
            self.keep(name, **images, **maps)

    def keep(self, name: str, **tensors: Tensor) -> None:
        """Images and maps under the names of `Pictures`, as long as fewer than `SHOWN` are there."""
        parts = self.pictures.setdefault(name, [])
        if (room := self.shown - sum(len(part.clean) for part in parts)) > 0:
            parts.append(Pictures(**{view: each[:room].float().cpu() for view, each in tensors.items()}))

    def _explain(self, name: str, view: str, images: Tensor, ids: Tensor) -> Tensor:
        """The maps of one explanation (B, rows, columns); their scores and those of chance go into the sums."""
        with torch.no_grad():
            classes = self.model(images).argmax(-1)
        maps = explain(self.model, images, name, classes=classes)
        chance = Dice(ids.to(maps.device), self.seed, "explanations").uniform(CHANCE, maps.shape[1:])
        suffix = "" if view == "clean" else f"_{view}"
        for null, each in ((OBSERVED, maps), (CHANCE, chance)):
            scores = score(self.model, images, each, classes=classes, steps=STEPS)._asdict()
            statistics = {f"{statistic}{suffix}": values[:, None] for statistic, values in scores.items()}
            self.sums.note(MODEL, name, null, statistics)
        return maps

    def table(self, facts: Mapping[str, Any], process: Process) -> Table:
        """What all processes have seen; `facts` say what was explained."""
        whole = Sums()
        for part in process.gather(self.sums):
            whole.add(part)
        parts: dict[str, list[Pictures]] = {}
        for pictures in process.gather(self.pictures):
            for name, some in pictures.items():
                parts[name] = [*parts.get(name, []), *some]
        pictures = {name: _concatenate(each) for name, each in parts.items() if each}
        rows = make_rows(whole, self.names, [], [CHANCE])
        return Table(rows=rows, facts={**facts, "images": max((row.n for row in rows), default=0)}, pictures=pictures)


def _concatenate(parts: Sequence[Pictures]) -> Pictures:
    """The pictures of several batches, one after the other."""
    fields = [name for name, tensor in parts[0]._asdict().items() if tensor is not None]
    return Pictures(**{name: torch.cat([getattr(part, name) for part in parts]) for name in fields})
