"""analyse: a model, images, some questions → a table with chance beside every number.

Explanations: maps of the first images, clean and attacked, and scores of all of them.

B images, N queries, M keys
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import check_eval_mode, check_head, check_model, check_pixels, check_seed, device_of
from vitruvius._errors import ConfigError, DataError
from vitruvius._processes import Process
from vitruvius._progress import Progress, no_progress
from vitruvius._random import Dice, image_ids
from vitruvius._registry import Spec, read_spec
from vitruvius._version import __version__
from vitruvius.analysis.base import NULLS, Question, analyses, question
from vitruvius.analysis.collecting import CHANCE, MODEL, OBSERVED, Collector, Sums, threads
from vitruvius.analysis.explanations import explain, explanations, score
from vitruvius.analysis.table import Pictures, Table
from vitruvius.attacks.base import disturb
from vitruvius.evaluation.threats import Threat, describe, make_threat
from vitruvius.heads import Heads, Site
from vitruvius.surgery import record, survey
from vitruvius.surgery.base import inner
from vitruvius.surgery.recording import core_of
from vitruvius.surgery.sites import Where

ENTRIES = 2**20  # of the attention maps of one site that are looked at together, so that caches hold them
ENTRIES_ON_ACCELERATORS = 2**24
NULL_IMAGES = 12
SHOWN = 8  # images whose maps are kept
STEPS = 10  # parts in which patches go and come for the scores
ATTACK = "pgd:eps=4/255"
Asked = Spec | Callable[..., Any] | Question


def analyse(
    model: nn.Module,
    loader: Iterable[Any],
    *asked: Asked,
    images: int | None = None,
    seed: int = 0,
    nulls: bool | Sequence[str] = True,
    null_images: int = NULL_IMAGES,
    where: Where = "*",
    attack: Spec | Threat | None = ATTACK,
    process: Process | None = None,
    progress: Progress = no_progress,
    facts: Mapping[str, Any] | None = None,
) -> Table:
    """Ask every question of every site, on what the softmax receives (after stages), and beside chance.

    model: in eval mode.
    loader: batches of images in [0, 1]: images, (images, labels) or (images, labels, ids).
    asked: analyses: `"gammas:variant=released"`, `{use: gammas, variant: released}`, or a function of Heads; and
        explanations: `"relevance"`, `"integrated_gradients:steps=20"`. Default: all analyses that are registered.
    images: use the first N of the loader; default all.
    seed: of chance, which is drawn from (seed, image, site), so that it does not depend on batches or processes.
    nulls: which models of chance to compare with, by name; True: all, False: none.
    null_images: how many images chance is drawn for.
    where: a pattern of site names, `blocks.*.attn`; default all sites.
    attack: explanations are also of the images after this attack away from the model's answers; None: clean alone.
    process: of several processes, this one; each brings its share of the images.
    progress: called after every part of a batch with the images done and how many there are.
    facts: what else the table should say about itself.
    """
    check_model(model)
    check_eval_mode(model)
    check_seed(seed)
    process = process or Process(device=device_of(model))
    questions, explained = split_asked(asked)
    if explained:
        check_head(model)
    chosen_nulls = list(NULLS) if nulls is True else list(nulls or ())
    if unknown := [name for name in chosen_nulls if name not in NULLS]:
        raise ConfigError(f"no null named {unknown[0]!r}. Known: {', '.join(NULLS)}.")
    threat = make_threat(attack, where="attack") if explained and attack is not None else None
    limit = None if images is None else process.share_of(images)
    total = process.share_of(loader.num_images) if limit is None and hasattr(loader, "num_images") else limit
    size, batches = _first_look(_batches_of(loader, process.device, limit), process)
    if size is None:
        raise DataError(f"the loader {getattr(loader, 'name', 'given')!r} yielded no images; nothing to analyse.")
    collector = Collector(questions, survey(model, input_size=size) if questions else {}, nulls=chosen_nulls, seed=seed)
    explainer = Explainer(model, explained, threat, collector.sums, process=process, seed=seed)
    nulls_left = process.share_of(null_images) if chosen_nulls else 0
    done = 0
    for x, ids in batches:
        before = 0
        for looked in _look(model, collector, x, ids, where, nulls_left - done) if questions else ():
            for name, maps in collector.maps.items():
                explainer.keep(name, clean=x[before:looked], clean_map=maps)
            progress(done + looked, total)
            before = looked
        if explained:
            explainer.see(x, ids)
        done += len(x)
        progress(done, total)
    about = {"model": type(inner(model)).__name__, "data": str(getattr(loader, "name", "unnamed")), "seed": seed}
    about |= {"attack": describe(threat)} if threat is not None else {}
    about |= {**(facts or {}), "vitruvius": __version__}
    return replace(collector.table(about, process, explained), pictures=explainer.gather(process))


def split_asked(asked: Sequence[Asked]) -> tuple[list[Question], list[str]]:
    """Analyses ready to be asked, and explanations by name, checked; all analyses if nothing is asked."""
    explained = [
        spec for spec in asked if isinstance(spec, str) and read_spec(spec, where="analysis")[0] in explanations
    ]
    for name in explained:
        explanations.bind(name, where="explanation")
    others = [spec for spec in asked if spec not in explained]
    return ask_all(others) if others or not explained else [], explained


def ask_all(asked: Sequence[Asked]) -> list[Question]:
    """The analyses of `asked`, each once; all that are registered if none is named."""
    questions = [question(each) for each in asked or list(analyses)]
    names = [q.name for q in questions]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{repeated[0]!r} is asked twice; once is enough.")
    return questions


@torch.no_grad()
def _look(
    model: nn.Module, collector: Collector, x: Tensor, ids: Tensor, where: Where, with_nulls: int
) -> Iterator[int]:
    """Run the model over parts of a batch small enough for the largest site; how many images were looked at so far.

    Chance is drawn for the first `with_nulls` images of the batch.
    """
    entries = ENTRIES if x.device.type == "cpu" else ENTRIES_ON_ACCELERATORS
    size = max(1, entries // max(_entries(site) for site in collector.sites.values()))

    def see(name: str, heads: Heads) -> None:
        collector.see(name, heads, core_of(model, name))

    with threads() as collector.threads, record(model, where, on_heads=see, sites=collector.sites):
        for start in range(0, len(x), size):
            part = ids[start : start + size]
            collector.begin(part, with_nulls=min(len(part), max(0, with_nulls - start)))
            model(x[start : start + size])
            collector.end()
            yield start + len(part)


def _entries(site: Site) -> int:
    """Entries of the attention maps of one image at a site, about; of windows there may be many."""
    windows = 64 if site.attends == "windows" else 1
    return windows * site.num_heads * max(site.num_queries, site.num_keys) * site.num_keys


def _first_look(
    batches: Iterator[tuple[Tensor, Tensor]], process: Process
) -> tuple[tuple[int, int, int] | None, Iterable[tuple[Tensor, Tensor]]]:
    """The size (C, rows, columns) of an image, from whichever process has one, and all batches again."""
    first = next(batches, None)
    sizes = process.gather(None if first is None else tuple(first[0].shape[1:]))
    size = next((size for size in sizes if size is not None), None)
    return size, batches if first is None else chain([first], batches)


def _batches_of(loader: Iterable[Any], device: torch.device, limit: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """(images, ids) until `limit` images have come; a loader may yield images, (images, labels) or also ids.

    Where there are no ids, a hash of the pixels stands for them.
    """
    left = math.inf if limit is None else limit
    batches = iter(loader.with_ids() if hasattr(loader, "with_ids") else loader)
    while left > 0 and (batch := next(batches, None)) is not None:
        x, *more = [batch] if isinstance(batch, Tensor) else batch if isinstance(batch, list | tuple) else [None]
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(batch).__name__
            raise DataError(
                f"a batch of the loader is {got}; expected images (B, channels, rows, columns), alone, with labels, or "
                "with labels and ids."
            )
        if count := int(min(left, len(x))):
            ids: Any = more[1] if len(more) > 1 else image_ids(x)
            x = x[:count].to(device)
            check_pixels(x)
            left -= count
            yield x, ids[:count].cpu()


class Explainer:
    """Sees batches, scores explanations, and keeps the maps of the first images.

    names: explanations with their settings, `"integrated_gradients:steps=20"`.
    threat: leads away from what the model answers; None: clean images alone.
    sums: get the scores, and those of chance.
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], threat: Threat | None, sums: Sums, *, process: Process, seed: int
    ) -> None:
        self.model, self.names, self.threat, self.seed = model, names, threat, seed
        self.shown = process.share_of(SHOWN)
        self.sums = sums
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

    def gather(self, process: Process) -> dict[str, Pictures]:
        """The maps that all processes have kept, by explanation."""
        gathered = process.gather(self.pictures)
        parts = {name: [part for each in gathered for part in each.get(name, [])] for name in chain(*gathered)}
        pictures = {}
        for name in filter(parts.get, parts):
            columns: Any = zip(*parts[name], strict=True)  # of tensors, or of None where there was no attack
            joined: list[Any] = [None if each[0] is None else torch.cat(each) for each in columns]
            pictures[name] = Pictures(*joined)
        return pictures
