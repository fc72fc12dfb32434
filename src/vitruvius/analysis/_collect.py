"""Collect: Heads come by, statistics are kept as running sums, of what was observed and of chance beside it.

Memory does not grow with the number of images. B images, H heads, K positions of a curve.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitruvius._errors import UnsuitableSite
from vitruvius.analysis._attended import Teller, in_float64
from vitruvius.analysis._items import Group, finite_rows, gather_rows, over_windows, real_groups, rows_of
from vitruvius.analysis._moments import Moments
from vitruvius.analysis._registry import ModelAnalysis, Question, Statistics
from vitruvius.analysis._threads import Threads
from vitruvius.attacks import Dice
from vitruvius.attention import Core
from vitruvius.heads import Heads, Site

MODEL = "model"  # the site of statistics that belong to no single one
OBSERVED = ""
Key = tuple[str, str, str, str]  # site, analysis, statistic, null
Answers = dict[tuple[str, str], Tensor]  # (analysis, statistic) → (B, H) or (B, H, K)


@dataclass
class Sums:
    """What is left of all images; two add up to what both have seen."""

    moments: dict[Key, Moments] = field(default_factory=dict)
    apart: dict[Key, float] = field(default_factory=dict)  # largest relative distance from a null to the observed
    refused: dict[tuple[str, str], str] = field(default_factory=dict)  # (analysis, site) → why

    def add(self, other: Sums) -> None:
        """Take in what another process has seen."""
        for key, moments in other.moments.items():
            if key in self.moments:
                self.moments[key] = self.moments[key] + moments
            else:
                self.moments[key] = moments
        for key, distance in other.apart.items():
            self.apart[key] = max(self.apart.get(key, 0.0), distance)
        self.refused |= other.refused


class Collector:
    """Asks every question of every Heads that comes by: `begin(ids)`, then `see` for each site, then `end()`."""

    def __init__(
        self,
        questions: Sequence[Question],
        sites: Mapping[str, Site],
        *,
        nulls: Sequence[str] = (),
        seed: int = 0,
        curves: bool | Collection[str] = True,
        threads: Threads | None = None,
    ) -> None:
        self.at_sites = [q for q in questions if not q.of_model]
        self.of_model = [q for q in questions if q.of_model]
        self.sites, self.nulls, self.seed, self.curves = sites, nulls, seed, curves
        self.threads = threads or Threads()
        self.sums = Sums()
        self.cores: dict[str, Core] = {}
        self.ids, self.few = torch.empty(0, dtype=torch.int64), 0
        self.whole: dict[tuple[str, str], ModelAnalysis] = {}
        self.broken = torch.empty(0, dtype=torch.bool)

    def begin(self, ids: Tensor, *, with_nulls: int) -> None:
        """A batch of images is about to run; chance is drawn for the first `with_nulls` of them."""
        self.ids, self.few, self.whole = ids, with_nulls, {}
        self.broken = torch.zeros(len(ids), dtype=torch.bool)

    def see(self, name: str, heads: Heads, core: Core | None = None) -> None:
        """One site of this batch: the Heads that enter it, and its core (None: plain softmax)."""
        site, windows = self.sites[name], len(heads.q) // len(self.ids)
        teller = Teller(core, self._precise_core(name, core), heads)
        heads = teller.received
        groups = real_groups(heads)
        observed = self._answer(site, groups, OBSERVED, windows, teller)
        self._see_whole(site, heads, OBSERVED, teller)
        if not self.few:
            return
        dice = Dice(self._row_ids(windows).to(heads.q.device), self.seed, f"analysis/{name}")
        limit = self.few * windows
        groups = [(rows[rows < limit], rows_of(part, rows < limit)) for rows, part in groups if (rows < limit).any()]
        for null in self.nulls:
            drawn = [(rows, self.threads.draw(null, part, dice[rows])) for rows, part in groups]
            self._compare(name, null, observed, self._answer(site, drawn, null, windows, teller))
            for rows, part in drawn:
                if len(rows) == limit:
                    self._see_whole(site, part, null, teller)

    def end(self) -> None:
        """The batch is over: model analyses answer."""
        observed: Answers = {}
        for (name, null), analysis in self.whole.items():
            found = {key: self._unbroken(values)[:, None] for key, values in analysis.result().items()}
            self._keep(MODEL, name, null, found)
            answers = {(name, key): values for key, values in found.items()}
            if null == OBSERVED:
                observed |= answers
            else:
                self._compare(MODEL, null, observed, answers)

    def _answer(self, site: Site, groups: list[Group], null: str, windows: int, teller: Teller) -> Answers:
        found: Answers = {}
        if null == OBSERVED:
            images = len(self.ids)
        else:
            images = self.few
        for q in self.at_sites:
            if not groups or (q.name, site.name) in self.sums.refused:
                continue
            try:
                answers = [(rows, self._ask(q, site, rows, part, null, teller)) for rows, part in groups]
            except UnsuitableSite as error:
                self.sums.refused[q.name, site.name] = str(error)
                continue
            whole = gather_rows(answers, images * windows)
            whole = {name: over_windows(values, images) for name, values in whole.items()}
            self._keep(site.name, q.name, null, whole)
            found |= {(q.name, name): values for name, values in whole.items()}
        return found

    def _ask(self, q: Question, site: Site, rows: Tensor, heads: Heads, null: str, teller: Teller) -> Statistics:
        """One question about some rows of this batch."""

        def answer(part: Heads, own: Tensor) -> Statistics:
            return q.ask(part, site, teller.about(part, rows[own], observed=null == OBSERVED))

        return self.threads.ask(answer, heads)

    def _precise_core(self, name: str, core: Core | None) -> Core | None:
        """The core of a site in float64, copied once; the parameters of a model do not change under analysis."""
        if core is None:
            return None
        if name not in self.cores:
            self.cores[name] = in_float64(core)
        return self.cores[name]

    def _see_whole(self, site: Site, heads: Heads, null: str, teller: Teller) -> None:
        """Show a site to the model analyses; rows that are not finite become zeros and their answers NaN."""
        if not self.of_model:
            return
        finite = finite_rows(heads)
        if null == OBSERVED and len(finite) == len(self.broken):
            self.broken |= ~finite.cpu()
        if not finite.all():
            heads = _with_zeros(heads)
        rows = torch.arange(len(heads.q), device=heads.q.device)
        attended = teller.about(heads, rows, observed=null == OBSERVED)
        for q in self.of_model:
            try:
                analysis = self.whole.get((q.name, null)) or q.begin()
                q.show(analysis, heads, site, attended)
                self.whole[q.name, null] = analysis
            except UnsuitableSite as error:
                self.sums.refused[q.name, site.name] = str(error)

    def _unbroken(self, values: Tensor) -> Tensor:
        rows = self.broken[: len(values)].to(values.device)
        return values.masked_fill(rows.view(-1, *[1] * (values.dim() - 1)), torch.nan)

    def _keep(self, site: str, analysis: str, null: str, answer: Statistics) -> None:
        for name, values in answer.items():
            if values.dim() == 2 or self._keeps(name):
                new = Moments.of(values)
                key = (site, analysis, name, null)
                if key in self.sums.moments:
                    self.sums.moments[key] = self.sums.moments[key] + new
                else:
                    self.sums.moments[key] = new

    def _keeps(self, curve: str) -> bool:
        """Whether a statistic with one more axis is wanted: all, none, or those named."""
        if isinstance(self.curves, bool):
            return self.curves
        return curve in self.curves

    def _compare(self, site: str, null: str, observed: Answers, drawn: Answers) -> None:
        for (analysis, name), values in drawn.items():
            if (analysis, name) not in observed:  # a curve whose length differs over all images, but not over these
                continue
            before = observed[analysis, name][: len(values)]
            gap = (values - before).abs() / (values.abs() + before.abs()).clamp(min=1e-300)
            key = (site, analysis, name, null)
            self.sums.apart[key] = max(self.sums.apart.get(key, 0.0), float(gap.nan_to_num(0.0).max()))

    def _row_ids(self, windows: int) -> Tensor:
        ids = self.ids[: self.few]
        if windows > 1:
            return (ids[:, None] * windows + torch.arange(windows)).flatten()
        return ids


def _with_zeros(heads: Heads) -> Heads:
    """The same, with zeros in place of numbers that are not finite."""
    return heads._replace(**{name: getattr(heads, name).nan_to_num(0.0, 0.0, 0.0) for name in ("q", "k", "v")})
