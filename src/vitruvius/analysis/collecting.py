"""From Heads to a table: statistics are kept as running sums, of what was observed and of chance beside it.

Heads may come from anywhere: `analyse` takes them from timm's models, `docs/examples/language.py` from transformers.
Memory does not grow with the number of images. A claim says how a number stands against chance: Welch's test at 99.9 %
decides, Cohen's d tells how much.

B rows of Heads (images or their windows), H heads, M keys, K positions of a curve.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from scipy.special import stdtrit
from torch import Tensor

from vitruvius._errors import UnsuitableSite
from vitruvius._processes import Process
from vitruvius._random import Dice
from vitruvius.analysis.base import NULLS, Attended, ModelAnalysis, Question, Statistics, call, precise
from vitruvius.analysis.table import SAME_BY_CONSTRUCTION, Curve, Row, Table
from vitruvius.attention.base import Core, Received
from vitruvius.heads import Heads, Site
from vitruvius.surgery.sites import abridge

MODEL = "model"  # the site of statistics that belong to no single one
OBSERVED = ""
CHANCE = "chance"  # the null of explanations: a map of random numbers for each image
SAME = 1e-6  # a null that changes nothing up to rounding says nothing
CONFIDENCE = 0.999
NEGLIGIBLE = 0.2  # standard deviations, Cohen's "small"
Key = tuple[str, str, str, str]  # site, analysis, statistic, null
MASKED = -1e4  # a bias below this hides a key
Group = tuple[Tensor, Heads]  # rows of a batch, and their Heads
Answers = dict[tuple[str, str], Tensor]  # (analysis, statistic) → (B, H) or (B, H, K)
T = TypeVar("T")


@dataclass(frozen=True)
class Threads:
    """Many small eigenvalue problems on a CPU: rows of a batch shared out to threads, one core each.

    On an accelerator, or with one thread, everything stays here.
    """

    pool: ThreadPoolExecutor | None = None
    workers: int = 1

    def share(self, work: Callable[[Heads, Tensor], T], heads: Heads) -> list[tuple[Tensor, T]]:
        """Some rows, and what `work` makes of their Heads; it is told which rows it gets."""
        rows = torch.arange(len(heads.q), device=heads.q.device)
        if self.pool is None or heads.q.device.type != "cpu" or len(rows) < 2:
            return [(rows, work(heads, rows))]
        without_grad = torch.no_grad()(work)  # whether gradients are kept is a matter of each thread
        chunks = rows.chunk(self.workers)
        done = self.pool.map(lambda chunk: without_grad(rows_of(heads, chunk), chunk), chunks)
        return list(zip(chunks, done, strict=True))

    def draw(self, null: str, heads: Heads, dice: Dice) -> Heads:
        """Chance for all rows."""
        drawn = [part for _, part in self.share(lambda part, rows: NULLS[null](part, dice[rows]), heads)]
        q, k, v = (torch.cat(tensors) for tensors in zip(*(part[:3] for part in drawn), strict=True))
        return heads._replace(q=q, k=k, v=v)


@contextmanager
def threads() -> Iterator[Threads]:
    """Workers for a while, each with one thread as PyTorch itself meanwhile; afterwards it has its threads again."""
    workers = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield Threads(pool if workers > 1 else None, workers)
    finally:
        torch.set_num_threads(workers)


class CoreView:
    """What one core makes of a batch: of the Heads observed, and of Heads drawn by chance in their place."""

    def __init__(self, core: Core | None, precise_core: Core | None, entering: Heads) -> None:
        self.core = precise_core
        way = Received(entering, None, "") if core is None else core.run_stages(entering)
        self.received, self.mixing, self.unmapped = way

    def attended(self, heads: Heads, rows: Tensor, *, observed: bool) -> Attended:
        """Of `heads`, which are these rows of the batch or drawn in their place."""
        heads, mixing = precise(heads), self.mixing
        if mixing is not None and not observed:  # how the stages would mix values drawn where the kernel gets them
            assert self.core is not None
            by_stage = [stage.value_mixing(heads) for stage in self.core.stages.values()]
            steps = [step for step in by_stage if step is not None]
            mixing = functools.reduce(lambda mixed, step: step @ mixed, steps) if steps else None
        elif mixing is not None and mixing.dim() >= 4 and len(mixing) > 1:
            mixing = mixing[rows]
        return Attended(heads, self.core, mixing, self.unmapped)


class Collector:
    """Asks every question of every Heads that comes by: `begin(ids)`, then `see` for each site, then `end()`.

    questions: as `ask_all` makes them.
    sites: by name, in the order of the table.
    nulls: the models of chance, names of `NULLS`.
    seed: chance is drawn from (seed, image, site).
    curves: the statistics with one more axis that are kept; None: all.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        sites: Mapping[str, Site],
        *,
        nulls: Sequence[str] = (),
        seed: int = 0,
        curves: Collection[str] | None = None,
        threads: Threads | None = None,
    ) -> None:
        self.questions = list(questions)
        self.at_sites = [q for q in questions if not q.of_model]
        self.of_model = [q for q in questions if q.of_model]
        self.sites, self.nulls, self.seed, self.curves = sites, nulls, seed, curves
        self.threads = threads or Threads()
        self.sums = Sums()
        self.cores: dict[str, Core] = {}  # in float64
        self.ids, self.with_nulls = torch.empty(0, dtype=torch.int64), 0
        self.model_analyses: dict[tuple[str, str], ModelAnalysis] = {}  # by name and null
        self.broken = torch.empty(0, dtype=torch.bool)
        self.maps: dict[str, Tensor] = {}  # of the last batch: the maps (B, rows, columns) that model analyses made

    def begin(self, ids: Tensor, *, with_nulls: int) -> None:
        """A batch of images is about to run; chance is drawn for the first `with_nulls` of them."""
        self.ids, self.with_nulls, self.model_analyses = ids, with_nulls, {}
        self.broken = torch.zeros(len(ids), dtype=torch.bool)

    def see(self, name: str, heads: Heads, core: Core | None = None) -> None:
        """One site of this batch: the Heads that enter it, and its core (None: plain softmax)."""
        site, windows = self.sites[name], len(heads.q) // len(self.ids)
        view = CoreView(core, self._precise_core(name, core), heads)
        groups = real_groups(view.received)
        observed = self._answer(site, groups, OBSERVED, windows, view)
        self._show(site, view.received, OBSERVED, view)
        if not self.with_nulls:
            return
        ids = self.ids[: self.with_nulls]
        if windows > 1:
            ids = (ids[:, None] * windows + torch.arange(windows)).flatten()
        dice = Dice(ids.to(heads.q.device), self.seed, f"analysis/{name}")
        limit = self.with_nulls * windows
        groups = [(rows[rows < limit], rows_of(part, rows < limit)) for rows, part in groups if (rows < limit).any()]
        for null in self.nulls:
            drawn = [(rows, self.threads.draw(null, part, dice[rows])) for rows, part in groups]
            self._compare(name, null, observed, self._answer(site, drawn, null, windows, view))
            for rows, part in drawn:
                if len(rows) == limit:
                    self._show(site, part, null, view)

    def end(self) -> None:
        """The batch is over: model analyses answer."""
        observed: Answers = {}
        for (name, null), analysis in self.model_analyses.items():
            answer = {}
            for key, values in analysis.result().items():  # NaN where the image is not finite at some site
                rows = self.broken[: len(values)].to(values.device).view(-1, *[1] * (values.dim() - 1))
                answer[key] = values.masked_fill(rows, torch.nan)[:, None]
            self._keep(MODEL, name, null, answer)
            answers = {(name, key): values for key, values in answer.items()}
            if null == OBSERVED:
                observed |= answers
                self.maps |= {name: on_grid(answer["map"][:, 0], self.sites)} if "map" in answer else {}
            else:
                self._compare(MODEL, null, observed, answers)

    def table(self, facts: Mapping[str, Any], process: Process | None = None, explained: Sequence[str] = ()) -> Table:
        """What all processes have seen (default: this one alone), with the scores of explanations that were noted.

        `facts` say what was analysed.
        """
        whole = add_up([self.sums] if process is None else process.gather(self.sums))
        names = [*(q.name for q in self.questions), *explained]
        rows = make_rows(whole, names, list(self.sites), [*self.nulls, CHANCE])
        remarks = make_remarks(whole)
        if not rows:
            reason = remarks[0] if remarks else "every image gave numbers that are not finite."
            raise UnsuitableSite(f"nothing could be analysed. {reason}")
        facts = {**facts, "images": max(row.n for row in rows)}
        curves = [
            Curve(site=site, analysis=analysis, statistic=statistic, null=null, mean=found.mean, std=found.std)
            for (site, analysis, statistic, null), found in whole.moments.items()
            if found.mean.dim() == 2
        ]
        return Table(rows=rows, curves=curves, facts=facts, remarks=remarks)

    def _answer(self, site: Site, groups: list[Group], null: str, windows: int, view: CoreView) -> Answers:
        answers: Answers = {}
        images = len(self.ids) if null == OBSERVED else self.with_nulls

        def ask(q: Question, rows: Tensor) -> Callable[[Heads, Tensor], Statistics]:
            seen = functools.partial(view.attended, observed=null == OBSERVED)
            return lambda part, chunk: call(q.make, part, site, seen(part, rows[chunk]))

        for q in self.at_sites:
            if not groups or (q.name, site.name) in self.sums.refused:
                continue
            try:
                shared = [(rows, self.threads.share(ask(q, rows), heads)) for rows, heads in groups]
            except UnsuitableSite as error:
                self.sums.refused[q.name, site.name] = str(error)
                continue
            parts = [(rows[chunk], answer) for rows, answers in shared for chunk, answer in answers]
            whole = gather_rows(parts, images * windows)
            whole = {name: over_windows(values, images) for name, values in whole.items()}
            self._keep(site.name, q.name, null, whole)
            answers |= {(q.name, name): values for name, values in whole.items()}
        return answers

    def _precise_core(self, name: str, core: Core | None) -> Core | None:
        """The core of a site in float64, copied once; the parameters of a model do not change under analysis."""
        if core is None:
            return None
        if name not in self.cores:
            hooks = [getattr(m, f"_{kind}_hooks") for m in core.modules() for kind in ("forward", "forward_pre")]
            without: dict[int, Any] = {id(each): type(each)() for each in hooks}  # they may hold tensors of a loss
            self.cores[name] = copy.deepcopy(core, without).double().eval()
        return self.cores[name]

    def _show(self, site: Site, heads: Heads, null: str, view: CoreView) -> None:
        """Show a site to the model analyses; rows that are not finite become zeros and their answers NaN."""
        if not self.of_model:
            return
        finite = finite_rows(heads)
        if null == OBSERVED and len(finite) == len(self.broken):
            self.broken |= ~finite.cpu()
        if not finite.all():
            zeroed = {name: getattr(heads, name).nan_to_num(0.0, 0.0, 0.0) for name in ("q", "k", "v")}
            heads = heads._replace(**zeroed)
        rows = torch.arange(len(heads.q), device=heads.q.device)
        attended = view.attended(heads, rows, observed=null == OBSERVED)
        for q in self.of_model:
            try:
                analysis = self.model_analyses.get((q.name, null)) or q.make()
                call(analysis.see, heads, site, attended)
                self.model_analyses[q.name, null] = analysis
            except UnsuitableSite as error:
                self.sums.refused[q.name, site.name] = str(error)

    def _keep(self, site: str, analysis: str, null: str, answer: Statistics) -> None:
        wanted = answer if self.curves is None else self.curves
        self.sums.note(site, analysis, null, {n: v for n, v in answer.items() if v.dim() == 2 or n in wanted})

    def _compare(self, site: str, null: str, observed: Answers, drawn: Answers) -> None:
        for (analysis, name), values in drawn.items():
            if (analysis, name) not in observed:  # a curve whose length differs over all images, but not over these
                continue
            before = observed[analysis, name][: len(values)]
            gap = (values - before).abs() / (values.abs() + before.abs()).clamp(min=1e-300)
            key = (site, analysis, name, null)
            self.sums.apart[key] = max(self.sums.apart.get(key, 0.0), float(gap.nan_to_num(0.0).max()))


def real_groups(heads: Heads) -> list[Group]:
    """The rows whose q, k and v are finite, without the tokens that padding hides; rows of one pattern together."""
    rows = finite_rows(heads).nonzero().squeeze(1)
    if not len(rows):
        return []
    part = rows_of(heads, rows) if len(rows) < len(heads.q) else heads
    return [(rows[own], real) for own, real in without_padding(part)]


def finite_rows(heads: Heads) -> Tensor:
    """(B,) bool."""
    return torch.stack([x.flatten(1).isfinite().all(1) for x in heads[:3]]).all(0)


def without_padding(heads: Heads) -> list[Group]:
    """Heads cropped to the keys that some query sees; where queries and keys are the same items, both are cropped."""
    batch, queries, keys = heads.k.shape[0], heads.q.shape[-2], heads.k.shape[-2]
    hidden = None if heads.bias is None else _with_four_axes(heads.bias).amax((1, 2)) < MASKED  # (B or 1, M or 1)
    if heads.bias is None or hidden is None or not hidden.any():
        return [(torch.arange(batch, device=heads.q.device), heads)]
    bias = _with_four_axes(heads.bias).expand(batch, -1, -1, keys)
    patterns, owner = (~hidden).expand(batch, keys).unique(dim=0, return_inverse=True)  # (patterns, M)
    groups = []
    for place, real_keys in enumerate(patterns):
        rows = (owner == place).nonzero().squeeze(1)
        real_queries = real_keys if queries == keys else real_keys.new_ones(queries)
        part = rows_of(heads, rows)
        cropped = bias[rows][..., real_keys]
        if cropped.shape[-2] > 1:
            cropped = cropped[..., real_queries, :]
        q, k, v = part.q[..., real_queries, :], part.k[..., real_keys, :], part.v[..., real_keys, :]
        groups.append((rows, part._replace(q=q, k=k, v=v, bias=cropped)))
    return groups


def rows_of(heads: Heads, rows: Tensor) -> Heads:
    """Some rows of the batch."""
    bias = heads.bias
    if bias is not None and bias.dim() == 4 and bias.shape[0] > 1:
        bias = bias[rows]
    return heads._replace(q=heads.q[rows], k=heads.k[rows], v=heads.v[rows], bias=bias)


def gather_rows(answers: list[tuple[Tensor, Statistics]], batch: int) -> Statistics:
    """The answers for groups of rows as those of one batch, NaN in rows nobody answered for.

    Curves whose length differs from group to group are left out.
    """
    if len(answers) == 1 and len(answers[0][0]) == batch:
        return answers[0][1]
    gathered: Statistics = {}
    for name in answers[0][1]:
        shapes = {tuple(answer[name].shape[1:]) for _, answer in answers}
        if len(shapes) == 1:
            whole = answers[0][1][name].new_full((batch, *shapes.pop()), torch.nan)
            for rows, answer in answers:
                whole[rows] = answer[name]
            gathered[name] = whole
    return gathered


def on_grid(values: Tensor, sites: Mapping[str, Site]) -> Tensor:
    """(B, P) → (B, rows, columns) of the patches of a site; one row where none has that many."""
    grids = [site.grid for site in sites.values() if site.grid is not None]
    grid = next((grid for grid in grids if math.prod(grid) == values.shape[-1]), (1, values.shape[-1]))
    return values.unflatten(-1, grid)


def over_windows(values: Tensor, images: int) -> Tensor:
    """(B · windows, H, …) → (B, H, …): the mean over the windows of each image."""
    return values if len(values) == images else values.unflatten(0, (images, -1)).mean(1)


def _with_four_axes(bias: Tensor) -> Tensor:
    """A bias as (B or 1, H or 1, N or 1, M or 1)."""
    return bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Elementwise: how many values, their mean, the sum of squared deviations (Chan, Golub & LeVeque 1983), and how
    many were left out because they are not finite.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    dropped: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Over the first axis of (B, …)."""
        values = values.detach().double().cpu()
        finite = values.isfinite()
        count = finite.sum(0)
        zeroed = values.where(finite, 0.0)
        mean = zeroed.sum(0) / count.clamp(min=1)
        m2 = (zeroed - mean).square().where(finite, 0.0).sum(0)
        return cls(count=count, mean=mean, m2=m2, dropped=len(values) - count)

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        gap, share = other.mean - self.mean, other.count / count.clamp(min=1)
        return Moments(
            count=count,
            mean=self.mean + gap * share,
            m2=self.m2 + other.m2 + gap.square() * self.count * share,
            dropped=self.dropped + other.dropped,
        )

    @property
    def std(self) -> Tensor:
        """Unbiased; NaN where fewer than two values came."""
        return (self.m2 / torch.where(self.count > 1, self.count - 1, torch.nan)).sqrt()


@dataclass
class Sums:
    """What is left of all images; two add up to what both have seen."""

    moments: dict[Key, Moments] = field(default_factory=dict)
    apart: dict[Key, float] = field(default_factory=dict)  # largest relative distance from a null to the observed
    refused: dict[tuple[str, str], str] = field(default_factory=dict)  # (analysis, site) → why

    def note(self, site: str, analysis: str, null: str, statistics: Statistics) -> None:
        """Take in the answers for a batch, each (B, …)."""
        for name, values in statistics.items():
            self._add_moments((site, analysis, name, null), Moments.of(values))

    def _add_moments(self, key: Key, moments: Moments) -> None:
        self.moments[key] = self.moments[key] + moments if key in self.moments else moments

    def observed(self) -> dict[Key, Moments]:
        """Those with one number per head, chance left out."""
        return {key: found for key, found in self.moments.items() if key[3] == OBSERVED and found.mean.dim() == 1}


def add_up(parts: Iterable[Sums]) -> Sums:
    """What several processes have seen."""
    whole = Sums()
    for part in parts:
        for key, moments in part.moments.items():
            whole._add_moments(key, moments)
        for key, distance in part.apart.items():
            whole.apart[key] = max(whole.apart.get(key, 0.0), distance)
        whole.refused |= part.refused
    return whole


def make_rows(sums: Sums, analyses: Sequence[str], sites: Sequence[str], nulls: Sequence[str]) -> list[Row]:
    """Analysis by analysis, site by site, head by head, null by null, in the given orders."""
    order = {pair: place for place, pair in enumerate(itertools.product(analyses, (*sites, MODEL)))}
    keys = sorted(sums.observed(), key=lambda key: order[key[1], key[0]])
    return [row for key in keys for row in _rows_of(sums, key, nulls)]


def make_remarks(sums: Sums) -> list[str]:
    """Why something is missing."""
    refused: dict[tuple[str, str], list[str]] = {}
    for (analysis, site), reason in sums.refused.items():
        refused.setdefault((analysis, reason.replace(repr(site), "it")), []).append(site)
    remarks = [f"{analysis} left out {abridge(sites)}: {reason}" for (analysis, reason), sites in refused.items()]
    lost: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
    for (site, analysis, statistic, _), found in sums.observed().items():
        if found.dropped.any():
            dropped = int(found.dropped.max())
            lost.setdefault((analysis, statistic), []).append((site, dropped, dropped + int(found.count.min())))
    for (analysis, statistic), sites_lost in lost.items():
        site, dropped, images = max(sites_lost, key=lambda each: each[1])
        remarks.append(
            f"{analysis}: {statistic} is not a finite number for some images at {abridge(s for s, _, _ in sites_lost)} "
            f"(at most {dropped} of {images}, at {site}); those images are left out of its mean."
        )
    return remarks


class Sample(NamedTuple):
    """Mean, unbiased deviation (NaN when unknown) and number of images."""

    mean: float
    std: float
    n: int


def judge(observed: Sample, null: Sample, *, apart: float) -> tuple[float | None, str]:
    """(effect size, claim); no effect size where the spread is unknown or nil."""
    if apart <= SAME:
        return None, SAME_BY_CONSTRUCTION
    if min(observed.n, null.n) < 2:
        return None, "too few images for a claim"
    gap = observed.mean - null.mean
    pooled = math.sqrt((observed.std**2 + null.std**2) / 2)
    effect = gap / pooled if pooled > 0 and math.isfinite(gap / pooled) else None
    parts = observed.std**2 / observed.n, null.std**2 / null.n
    allowance = 0.0  # Welch's: how far the means of two samples may differ by chance
    if sum(parts) > 0:
        freedom = 1 / ((parts[0] / sum(parts)) ** 2 / (observed.n - 1) + (parts[1] / sum(parts)) ** 2 / (null.n - 1))
        allowance = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * math.sqrt(sum(parts))
    if abs(gap) <= allowance:
        return effect, "indistinguishable from chance"
    side = "above" if gap > 0 else "below"
    negligible = ", negligibly" if effect is not None and abs(effect) < NEGLIGIBLE else ""
    return effect, f"{side} chance by {abs(gap):.3g}{negligible}"


def _rows_of(sums: Sums, key: Key, nulls: Sequence[str]) -> list[Row]:
    """Of one statistic at one site: for each head one row per null that was drawn, or one without chance."""
    rows = []
    site, analysis, statistic, _ = key
    for head in range(len(sums.moments[key].mean)):
        observed = _sample(sums, key, head)
        if observed is None:
            continue
        row = Row(
            site=site,
            head=None if site == MODEL else head,
            analysis=analysis,
            statistic=statistic,
            mean=observed.mean,
            std=_finite(observed.std),
            n=observed.n,
        )
        beside = []
        for null in nulls:
            place = (site, analysis, statistic, null)
            if (drawn := _sample(sums, place, head)) is not None:
                effect, claim = judge(observed, drawn, apart=sums.apart.get(place, math.inf))
                numbers: dict[str, Any] = {"null_mean": drawn.mean, "null_std": _finite(drawn.std), "null_n": drawn.n}
                beside.append(replace(row, null=null, effect=effect, claim=claim, **numbers))
        rows += beside or [row]
    return rows


def _sample(sums: Sums, key: Key, head: int) -> Sample | None:
    found = sums.moments.get(key)
    if found is None or not found.count[head]:
        return None
    return Sample(float(found.mean[head]), float(found.std[head]), int(found.count[head]))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
