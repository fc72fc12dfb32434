"""Explanations over many images: maps of the first ones, clean and attacked, and scores of all of them beside chance.

B images
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitruvius._checks import Progress, check_eval_mode, device_of
from vitruvius._errors import ConfigError, DataError
from vitruvius._processes import Process
from vitruvius._registry import Spec, read_spec
from vitruvius._version import __version__
from vitruvius.analysis._batches import Count, batches_of, share_of
from vitruvius.analysis._collect import MODEL, OBSERVED, Sums
from vitruvius.analysis._moments import Moments
from vitruvius.analysis._registry import Question
from vitruvius.analysis._rows import make_rows
from vitruvius.analysis._run import ask_all
from vitruvius.analysis._table import Pictures, Table
from vitruvius.analysis.explanations import Score, explain, explanations, score
from vitruvius.attacks import Dice, disturb
from vitruvius.evaluation.threats import Threat, describe, make_threat
from vitruvius.surgery import inner

CHANCE = "chance"
SHOWN = 8  # images whose maps are kept
ATTACK = "pgd:eps=4/255"


class _Side(NamedTuple):
    """The same images, as they are or attacked."""

    name: str  # clean, attacked
    images: Tensor


def is_explanation(spec: Spec) -> bool:
    """Whether `spec` names an explanation, not an analysis: `integrated_gradients:steps=20`."""
    return read_spec(spec, where="analysis")[0] in explanations


def read_questions(names: Sequence[str]) -> tuple[list[Question], list[str]]:
    """(analyses, explanations) that are meant by `names`, checked; all analyses if nothing is named."""
    explained = [name for name in names if is_explanation(name)]
    for name in explained:
        explanations.bind(name, where="explanation")
    asked = [name for name in names if name not in explained]
    return [] if explained and not asked else ask_all(asked), explained


def explain_images(
    model: nn.Module,
    loader: Iterable[Any],
    *names: str,
    attack: Spec | Threat | None = ATTACK,
    images: int | None = None,
    shown: int = SHOWN,
    steps: int = 10,
    seed: int = 0,
    process: Process | None = None,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Table:
    """Explain what the model answers, score the explanations beside chance, clean and attacked.

    model: in eval mode.
    loader: batches of images in [0, 1]: images, (images, labels) or (images, labels, ids).
    names: explanations, `"relevance"`, `"integrated_gradients:steps=20"`; default: those that need no extra.
    attack: away from what the model answers; `"pgd:eps=4/255"` by default, None: clean images alone.
    images: use the first N of the loader; default all.
    shown: of how many images the maps are kept, in `Table.pictures`.
    steps: parts in which patches go and come for the scores.
    seed: of chance, which is a map of random numbers for each image.
    process: of several processes, this one; each brings its share of the images.
    progress: called after every batch with the images done and how many there are.
    facts: what else the table should say about itself.
    """
    check_eval_mode(model)
    process = process or Process(device=device_of(model))
    asked = list(names) or ["relevance", "attention_gradient"]
    threat = None
    if attack is not None:
        threat = make_threat(attack, where="attack")
    explainer = _Explainer(model, asked, threat, shown=share_of(shown, process), steps=steps, seed=seed)
    limit = None
    if images is not None:
        limit = share_of(images, process)
    count = Count(progress, limit)
    for x, ids in batches_of(loader, process.device, limit):
        explainer.see(x, ids)
        count.add(len(x))
    about = {"model": type(inner(model)).__name__, "data": str(getattr(loader, "name", "unnamed")), "seed": seed}
    if threat is not None:
        about["attack"] = describe(threat)
    return explainer.table(process, {**about, **(facts or {}), "vitruvius": __version__})


class _Explainer:
    """Sees batches, keeps sums of scores and the maps of the first images."""

    def __init__(
        self, model: nn.Module, names: Sequence[str], threat: Threat | None, *, shown: int, steps: int, seed: int
    ) -> None:
        for name in names:
            explanations.bind(name, where="explanation")  # a wrong setting is found before any image is read
        self.model = model
        self.names = names
        self.threat = threat
        self.shown = shown
        self.steps = steps
        self.seed = seed
        self.sums = Sums()
        self.pictures: dict[str, list[Pictures]] = {name: [] for name in names}

    def see(self, x: Tensor, ids: Tensor) -> None:
        """One batch: images (B, 3, h, w) and their ids (B,)."""
        with torch.no_grad():
            answers = self.model(x).argmax(-1)
        sides = [_Side("clean", x)]
        if self.threat is not None:
            sides.append(_Side("attacked", disturb(self.threat, self.model, x, answers, ids.to(x.device)).detach()))
        for name in self.names:
            maps = [self._explain(name, side, ids) for side in sides]
            self._keep(name, sides, maps)
        self.shown = max(0, self.shown - len(x))

    def _explain(self, name: str, side: _Side, ids: Tensor) -> Tensor:
        """The maps of one explanation (B, rows, columns); their scores and those of chance go into the sums."""
        with torch.no_grad():
            classes = self.model(side.images).argmax(-1)
        maps = explain(self.model, side.images, name, classes=classes)
        dice = Dice(ids.to(maps.device), self.seed, "explanations")
        found = {
            OBSERVED: score(self.model, side.images, maps, classes=classes, steps=self.steps),
            CHANCE: score(
                self.model, side.images, dice.uniform(CHANCE, maps.shape[1:]), classes=classes, steps=self.steps
            ),
        }
        for null, scores in found.items():
            self._add(name, side.name, null, scores)
        return maps

    def _add(self, name: str, side: str, null: str, scores: Score) -> None:
        batch = Sums()
        for statistic, values in scores._asdict().items():
            if side != "clean":
                statistic = f"{statistic}_{side}"
            batch.moments[MODEL, name, statistic, null] = Moments.of(values[:, None])
        self.sums.add(batch)

    def _keep(self, name: str, sides: Sequence[_Side], maps: Sequence[Tensor]) -> None:
        if not self.shown:
            return
        kept = {}
        for side, found in zip(sides, maps, strict=True):
            kept[side.name] = side.images[: self.shown].cpu()
            kept[f"{side.name}_map"] = found[: self.shown].float().cpu()
        self.pictures[name].append(Pictures(**kept))

    def _all_pictures(self, process: Process) -> dict[str, Pictures]:
        """Of all processes, by explanation."""
        gathered = process.gather(self.pictures)
        found = {}
        for name in self.names:
            own = [some for part in gathered for some in part[name]]
            if own:
                found[name] = _joined(own)
        return found

    def table(self, process: Process, facts: dict[str, Any]) -> Table:
        """What all processes have seen."""
        whole = Sums()
        for part in process.gather(self.sums):
            whole.add(part)
        pictures = self._all_pictures(process)
        questions = [Question(name=name, make=explanations.bind(name, where="explanation")) for name in self.names]
        rows = make_rows(whole, questions, [], [CHANCE])
        if not rows:
            raise DataError("the loader yielded no images; nothing to explain.")
        return Table(rows=rows, facts={**facts, "images": max(row.n for row in rows)}, pictures=pictures)


def _joined(parts: Sequence[Pictures]) -> Pictures:
    """The same pictures of several batches, one after the other."""
    fields = {}
    for field in Pictures._fields:
        own = [getattr(part, field) for part in parts]
        if own[0] is not None:
            fields[field] = torch.cat(own)
    return Pictures(**fields)


def merge_tables(first: Table | None, second: Table | None) -> Table:
    """Both tables as one, the facts of `first` before those that only `second` knows."""
    if first is None or second is None:
        only = first or second
        if only is None:
            raise ConfigError("nothing was asked.")
        return only
    return Table(
        rows=[*first.rows, *second.rows],
        curves=[*first.curves, *second.curves],
        facts={**second.facts, **first.facts},
        remarks=[*first.remarks, *second.remarks],
        pictures={**first.pictures, **second.pictures},
    )
