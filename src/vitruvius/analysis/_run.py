"""analyse: a model, images, some questions → a table with chance beside every number; memory does not grow with images.

B images, H heads, N queries, M keys
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import Progress, check_eval_mode, check_model, check_seed, device_of
from vitruvius._errors import ConfigError, DataError, UnsuitableSite
from vitruvius._processes import Process
from vitruvius._registry import Spec
from vitruvius._version import __version__
from vitruvius.analysis._batches import Count, batches_of, share_of
from vitruvius.analysis._collect import Collector, Sums
from vitruvius.analysis._nulls import NULLS
from vitruvius.analysis._registry import Question, analyses, question
from vitruvius.analysis._rows import make_curves, make_remarks, make_rows
from vitruvius.analysis._table import Table
from vitruvius.analysis._threads import threads
from vitruvius.heads import Heads, Site
from vitruvius.surgery import Where, inner, record, survey
from vitruvius.surgery.recording import core_of

ENTRIES = 2**20  # of the attention maps of one site that are looked at together, so that caches hold them
ENTRIES_ON_ACCELERATORS = 2**24
NULL_IMAGES = 12
Asked = Spec | Callable[..., Any] | Question


@torch.no_grad()
def analyse(
    model: nn.Module,
    loader: Iterable[Any],
    *asked: Asked,
    images: int | None = None,
    seed: int = 0,
    nulls: bool | Sequence[str] = True,
    null_images: int = NULL_IMAGES,
    where: Where = "*",
    process: Process | None = None,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Table:
    """Ask every question of every site, on what the softmax receives (after stages), and beside chance.

    model: in eval mode.
    loader: batches of images in [0, 1]: images, (images, labels) or (images, labels, ids).
    asked: analyses: `"gammas:variant=released"`, `{use: gammas, variant: released}`, or a function of Heads; default:
        all that are registered.
    images: use the first N of the loader; default all.
    seed: of chance, which is drawn from (seed, image, site), so that it does not depend on batches or processes.
    nulls: which models of chance to compare with, by name; True: all, False: none.
    null_images: how many images chance is drawn for.
    where: a pattern of site names, `blocks.*.attn`; default all sites.
    process: of several processes, this one; each brings its share of the images.
    progress: called after every part of a batch with the images done, how many there are, and a few words.
    facts: what else the table should say about itself.
    """
    check_model(model)
    check_eval_mode(model)
    check_seed(seed)
    process = process or Process(device=device_of(model))
    questions = ask_all(asked)
    chosen = choose_nulls(nulls)
    limit = None
    if images is not None:
        limit = share_of(images, process)
    size, batches = _first_look(batches_of(loader, process.device, limit), process)
    if size is None:
        raise DataError(f"the loader {getattr(loader, 'name', 'given')!r} yielded no images; nothing to analyse.")
    sites = survey(model, input_size=size)
    few = 0
    if chosen:
        few = share_of(null_images, process)
    with threads() as workers:
        collector = Collector(questions, sites, nulls=chosen, seed=seed, threads=workers)
        _look(model, collector, batches, where, size, few, Count(progress, _total(loader, limit, process)))
    return summarise(collector.sums, questions, list(sites), chosen, process, _facts(model, loader, seed, facts))


def _first_look(
    batches: Iterator[tuple[Tensor, Tensor]], process: Process
) -> tuple[tuple[int, int, int] | None, Iterable[tuple[Tensor, Tensor]]]:
    """The size (C, rows, columns) of an image, from whichever process has one, and all batches again."""
    first = next(batches, None)
    own: tuple[int, int, int] | None = None
    if first is not None:
        channels, rows, columns = first[0].shape[1:]
        own = (channels, rows, columns)
        batches = itertools.chain([first], batches)
    sizes = [size for size in process.gather(own) if size is not None]
    if not sizes:
        return None, batches
    return sizes[0], batches


def _total(loader: Any, limit: int | None, process: Process) -> int | None:
    """How many images this process will see, if anybody knows."""
    if limit is not None or not hasattr(loader, "num_images"):
        return limit
    return share_of(loader.num_images, process)


def ask_all(asked: Sequence[Asked]) -> list[Question]:
    """The questions, each once; all that are registered if none is named.

    `asked` are specs, functions or classes, in the order in which they are answered.
    """
    questions = [question(each) for each in asked or list(analyses)]
    names = [q.name for q in questions]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{doubled[0]!r} is asked twice; once is enough.")
    return questions


def choose_nulls(nulls: bool | Sequence[str]) -> list[str]:
    """All, none, or those named."""
    if nulls is True:
        chosen = list(NULLS)
    else:
        chosen = list(nulls or ())
    if unknown := [name for name in chosen if name not in NULLS]:
        raise ConfigError(f"no null named {unknown[0]!r}. Known: {', '.join(NULLS)}.")
    return chosen


def summarise(
    sums: Sums,
    questions: Sequence[Question],
    sites: Sequence[str],
    nulls: Sequence[str],
    process: Process,
    facts: dict[str, Any],
) -> Table:
    """What all processes have seen, as a table."""
    whole = Sums()
    for part in process.gather(sums):
        whole.add(part)
    rows, remarks = make_rows(whole, questions, sites, nulls), make_remarks(whole)
    if not rows:
        reason = "every image gave numbers that are not finite."
        if remarks:
            reason = remarks[0]
        raise UnsuitableSite(f"nothing could be analysed. {reason}")
    facts = {**facts, "images": max(row.n for row in rows)}
    return Table(rows=rows, curves=make_curves(whole), facts=facts, remarks=remarks)


def _look(
    model: nn.Module,
    collector: Collector,
    batches: Iterable[tuple[Tensor, Tensor]],
    where: Where,
    size: tuple[int, ...],
    with_nulls: int,
    count: Count,
) -> None:
    """Run the model over parts of batches small enough for the largest site."""
    entries = ENTRIES_ON_ACCELERATORS
    if device_of(model).type == "cpu":
        entries = ENTRIES
    part = max(1, entries // max(_entries(site) for site in collector.sites.values()))
    with record(model, where, on_heads=_with_core(model, collector), input_size=size):  # type: ignore[arg-type]
        for x, ids in batches:
            for some, own in zip(x.split(part), ids.split(part), strict=True):
                collector.begin(own, with_nulls=min(len(own), max(0, with_nulls - count.done)))
                model(some)
                collector.end()
                count.add(len(own))


def _with_core(model: nn.Module, collector: Collector) -> Callable[[str, Heads], None]:
    """Hand Heads to the collector together with the core they enter."""

    def look(name: str, heads: Heads) -> None:
        collector.see(name, heads, core_of(model, name))

    return look


def _entries(site: Site) -> int:
    """Entries of the attention maps of one image at a site, about; of windows there may be many."""
    windows = 1
    if site.attends == "windows":
        windows = 64
    return windows * site.num_heads * max(site.num_queries, site.num_keys) * site.num_keys


def _facts(model: nn.Module, loader: object, seed: int, facts: Mapping[str, Any] | None) -> dict[str, Any]:
    names = {"model": type(inner(model)).__name__, "data": str(getattr(loader, "name", "unnamed"))}
    return {**names, "seed": seed, **(facts or {}), "vitruvius": __version__}
