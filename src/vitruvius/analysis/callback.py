"""Analyses during training: the same questions of the same images after every epoch, as curves in the run folder."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import in_eval_mode
from vitruvius._errors import ConfigError, DataError
from vitruvius._files import StrPath, append_line, atomic_write_text, exists, join, read_text
from vitruvius.analysis.analysing import Asked, analyse, ask_all

FILE = "analysis.jsonl"
Line = dict[str, Any]  # epoch, batch, analysis, statistic, mean over sites, heads and images, by_site


class AnalysisCallback:
    """Asks analyses of fixed images after epochs.

    analyses: as for `analyse`.
    batches: name → images in [0, 1].
    every: in epochs.
    folder: of the run; its analysis.jsonl gets the rows, each epoch's once. Default: they are only returned.
    """

    def __init__(
        self, analyses: Sequence[Asked], batches: Mapping[str, Tensor], *, every: int = 1, folder: StrPath | None = None
    ) -> None:
        if every < 1:
            raise ConfigError(f"analyse_every is {every}, expected 1 or more.")
        if empty := [name for name, images in batches.items() if not len(images)]:
            raise DataError(f"the fixed batch {empty[0]!r} holds no images.")
        self.questions = ask_all(analyses)
        self.batches, self.every = batches, every
        self.file = None if folder is None else Path(folder) / FILE

    def epoch_end(self, epoch: int, model: nn.Module) -> list[Line]:
        """The rows of this epoch, counted from 0; none if it is not its turn. The model's mode is left as it was."""
        self.forget(epoch)
        if (epoch + 1) % self.every:
            return []
        with in_eval_mode(model):
            lines = [line for name, x in self.batches.items() for line in self._ask(epoch, model, name, x)]
        if self.file is not None:
            for line in lines:
                append_line(self.file, json.dumps(line))
        return lines

    def forget(self, epoch: int) -> None:
        """Remove the rows of this epoch and of later ones, from an attempt that was stopped; and a line cut off."""
        if self.file is None or not self.file.exists():
            return
        text = self.file.read_text(encoding="utf-8")
        earlier = [line for line in text.split("\n")[:-1] if json.loads(line)["epoch"] < epoch]
        if (wanted := "".join(f"{line}\n" for line in earlier)) != text:
            atomic_write_text(self.file, wanted)

    def _ask(self, epoch: int, model: nn.Module, name: str, images: Tensor) -> list[Line]:
        table = analyse(model, [images], *self.questions, nulls=False)
        groups: dict[tuple[str, str], dict[str, list[float]]] = {}  # (analysis, statistic) → site → means of heads
        for row in table.rows:
            groups.setdefault((row.analysis, row.statistic), {}).setdefault(row.site, []).append(row.mean)
        lines = []
        for (analysis, statistic), sites in groups.items():
            by_site = {site: statistics.fmean(values) for site, values in sites.items()}
            line = {"epoch": epoch, "batch": name, "analysis": analysis, "statistic": statistic}
            lines.append({**line, "mean": statistics.fmean(by_site.values()), "by_site": by_site})
        return lines


@torch.no_grad()
def first_images(loader: Iterable[Any], count: int) -> Tensor:
    """The first `count` images of a loader of (images, …), of epoch 0 if it knows epochs."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(0)
    parts: list[Tensor] = []
    for images, *_ in loader:
        parts.append(images[: count - sum(map(len, parts))])
        if sum(map(len, parts)) >= count:
            break
    if not parts:
        raise DataError("the loader yielded no images to look at.")
    return torch.cat(parts).clone()


def read_rows(folder: StrPath) -> list[Line]:
    """What analysis.jsonl of a run holds; of an epoch written twice the later rows count, a cut line is skipped."""
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
    by_epoch: dict[int, dict[str, float]] = {}
    for line in read_rows(folder):
        name = f"analysis/{line['analysis']}/{line['statistic']}/{line['batch']}"
        by_epoch.setdefault(line["epoch"], {})[name] = line["mean"]
    return [{**row, **by_epoch.get(row["epoch"], {})} for row in rows]
