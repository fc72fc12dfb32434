"""Analyses during training: the same questions of the same images after every epoch, as curves in the run folder."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError, DataError
from vitruvius._files import StrPath, append_line, exists, join, read_text
from vitruvius.analysis._run import Asked, analyse, ask_all
from vitruvius.analysis._table import Row
from vitruvius.surgery import Where

FILE = "analysis.jsonl"
Line = dict[str, Any]  # epoch, batch, analysis, statistic, mean over sites, heads and images, by_site


class AnalysisCallback:
    """Asks `analyses` of fixed `batches` (name → images in [0, 1]) at the end of every `every`-th epoch.

    `epoch_end` returns its rows and, given a `folder`, appends them to analysis.jsonl there. The model's mode is
    left as it was.

    `where` is a glob over site names, or several, that says which sites are asked (default: all); `every` is in epochs,
    1 or more (default 1: after each).
    """

    def __init__(
        self,
        analyses: Sequence[Asked],
        batches: Mapping[str, Tensor],
        *,
        every: int = 1,
        folder: StrPath | None = None,
        where: Where = "*",
    ) -> None:
        if every < 1:
            raise ConfigError(f"analyse_every is {every}, expected 1 or more.")
        if empty := [name for name, images in batches.items() if not len(images)]:
            raise DataError(f"the fixed batch {empty[0]!r} holds no images.")
        self.questions = ask_all(analyses)
        self.batches, self.every, self.folder, self.where = batches, every, folder, where

    def epoch_end(self, epoch: int, model: nn.Module) -> list[Line]:
        """The rows of this epoch; none if it is not its turn.

        `epoch` counts from 0; `model` is any model that `analyse` takes, in train or eval mode.
        """
        if (epoch + 1) % self.every:
            return []
        training = model.training
        model.eval()
        try:
            lines = [line for name, x in self.batches.items() for line in self._ask(epoch, model, name, x)]
        finally:
            model.train(training)
        if self.folder is not None:
            for line in lines:
                append_line(join(self.folder, FILE), json.dumps(line))
        return lines

    def _ask(self, epoch: int, model: nn.Module, name: str, images: Tensor) -> list[Line]:
        table = analyse(model, [images], *self.questions, nulls=False, where=self.where)
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in table.rows:
            groups.setdefault((row.analysis, row.statistic), []).append(row)
        return [
            {"epoch": epoch, "batch": name, "analysis": analysis, "statistic": statistic, **_means(rows)}
            for (analysis, statistic), rows in groups.items()
        ]


@torch.no_grad()
def first_images(loader: Iterable[Any], count: int) -> Tensor:
    """The first `count` images of a loader (of epoch 0, if it knows epochs), to look at after every epoch.

    `loader` yields (images, …).
    """
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(0)
    found: list[Tensor] = []
    for images, *_ in loader:
        found.append(images[: count - sum(map(len, found))])
        if sum(map(len, found)) >= count:
            break
    if not found:
        raise DataError("the loader yielded no images to look at.")
    return torch.cat(found).clone()


def read_rows(folder: StrPath) -> list[Line]:
    """What analysis.jsonl of a run holds; of an epoch written twice the later rows count, a cut line is skipped.

    `folder` is the run's, local or on a remote file system; without the file there are no rows.
    """
    path = join(folder, FILE)
    if not exists(path):
        return []
    rows: dict[tuple[Any, ...], Line] = {}
    for text in read_text(path).splitlines():
        try:
            line = json.loads(text)
            rows[line["epoch"], line["batch"], line["analysis"], line["statistic"]] = line
        except (ValueError, KeyError, TypeError):
            continue
    return sorted(rows.values(), key=lambda line: float(line["epoch"]))


def rows_with_analyses(rows: Sequence[Mapping[str, Any]], folder: StrPath) -> list[dict[str, Any]]:
    """`rows` of metrics, one per epoch, with what analysis.jsonl in `folder` knows of their epochs, for trackers.

    The key of a number is `analysis/NAME/statistic/batch`, its value the mean over sites, heads and images.
    """
    found: dict[int, dict[str, float]] = {}
    for line in read_rows(folder):
        name = f"analysis/{line['analysis']}/{line['statistic']}/{line['batch']}"
        found.setdefault(line["epoch"], {})[name] = line["mean"]
    return [{**row, **found.get(row["epoch"], {})} for row in rows]


def _means(rows: Sequence[Row]) -> Line:
    sites: dict[str, list[float]] = {}
    for row in rows:
        sites.setdefault(row.site, []).append(row.mean)
    by_site = {site: statistics.fmean(values) for site, values in sites.items()}
    return {"mean": statistics.fmean(by_site.values()), "by_site": by_site}
