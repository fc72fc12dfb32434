"""The table of an analysis: a row for each site, head, statistic and null; curves beside it; kept as CSV and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vitruvius._errors import RunError, UnknownName
from vitruvius._files import StrPath, atomic_write_text, exists, join, load_tensors, read_text, save_tensors
from vitruvius._notebook import Records, Shown
from vitruvius.analysis.base import NULLS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAME_BY_CONSTRUCTION = "the same by construction"  # the claim of a null that cannot change the number
BEYOND = "beyond chance"
PRINTED = 4  # statistics of an analysis that are printed; the files hold all
LEGEND = "means over heads and images; in brackets the nearest chance; beyond chance: heads, where every null agrees"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number beside chance. `head` is None for a statistic of the whole model, `null` where no chance was drawn."""

    site: str
    head: int | None
    analysis: str
    statistic: str
    mean: float
    std: float | None  # unbiased, over images; None for a single image
    n: int  # images
    null: str | None = None
    null_mean: float | None = None
    null_std: float | None = None
    null_n: int = 0
    effect: float | None = None  # (mean − null_mean) / pooled standard deviation
    claim: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """A statistic with one more axis: mean and deviation over images, (H, K); `null` "" is what was observed."""

    site: str
    analysis: str
    statistic: str
    null: str
    mean: Tensor
    std: Tensor


class Pictures(NamedTuple):
    """Some images and what an explanation makes of them; attacked ones beside them, if there was an attack."""

    clean: Tensor  # (B, 3, h, w) in [0, 1]
    clean_map: Tensor  # (B, rows, columns)
    attacked: Tensor | None = None  # as clean
    attacked_map: Tensor | None = None


COLUMNS = [column.name for column in dataclasses.fields(Row)]
CURVE_KEY = ("site", "analysis", "statistic", "null")


@dataclass(frozen=True, kw_only=True, repr=False)
class Table(Shown):
    """What an analysis found. Prints as a summary by layer; `save(folder)` and `Table.load(folder)` round-trip."""

    rows: list[Row]
    curves: list[Curve] = field(default_factory=list, compare=False)
    facts: dict[str, Any] = field(default_factory=dict)  # model, data, images, seed, …
    remarks: list[str] = field(default_factory=list)
    pictures: dict[str, Pictures] = field(default_factory=dict, compare=False)  # by explanation

    def __str__(self) -> str:
        paragraphs = ["\n".join(filter(None, [self._about(), self._legend()]))]
        paragraphs += [_block(name, self.select(analysis=name)) for name in self.names("analysis")]
        paragraphs += [f"note: {remark}" for remark in self.remarks]
        return "\n\n".join(filter(None, paragraphs))

    def select(self, **wanted: Any) -> list[Row]:
        """Rows whose columns have the given values: `select(site="blocks.0.attn", statistic="max")`."""
        return [row for row in self.rows if all(getattr(row, key) == value for key, value in wanted.items())]

    def names(self, column: str) -> list[Any]:
        """The values of a column, each once, in order."""
        return list(dict.fromkeys(getattr(row, column) for row in self.rows))

    def save(self, folder: StrPath) -> None:
        """Write table.csv, table.json and, if there are any, curves.safetensors and explanations.safetensors."""
        atomic_write_text(join(folder, "table.csv"), self.to_csv())
        atomic_write_text(join(folder, "table.json"), self.to_json())
        if self.curves:
            curves = {
                "|".join(getattr(c, part) for part in CURVE_KEY): torch.stack([c.mean, c.std]) for c in self.curves
            }
            save_tensors(join(folder, "curves.safetensors"), {key: pair.float() for key, pair in curves.items()})
        if self.pictures:
            pictures: dict[str, Tensor] = {}
            for name, shown in self.pictures.items():
                tensors = {key: tensor for key, tensor in shown._asdict().items() if tensor is not None}
                pictures |= {f"{name}|{key}": tensor.contiguous() for key, tensor in tensors.items()}
            save_tensors(join(folder, "explanations.safetensors"), pictures)

    @classmethod
    def load(cls, folder: StrPath) -> Table:
        """What `save` wrote."""
        path = join(folder, "table.json")
        try:
            data = json.loads(read_text(path))
            rows = [Row(**dict(zip(data["columns"], row, strict=True))) for row in data["rows"]]
            curves = _curves_of(_tensors_of(folder, "curves.safetensors"), rows)
            kept: dict[str, dict[str, Tensor]] = {}
            for key, tensor in _tensors_of(folder, "explanations.safetensors").items():
                name, _, field_name = key.rpartition("|")
                kept.setdefault(name, {})[field_name] = tensor
            pictures = {name: Pictures(**tensors) for name, tensors in kept.items()}
            return cls(rows=rows, curves=curves, facts=data["facts"], remarks=data["remarks"], pictures=pictures)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{path} is not a table of an analysis ({error}). `vitruvius analyse` writes one."
            ) from error

    def _about(self) -> str:
        return " · ".join(
            f"{key} {self.facts[key]}" for key in ("model", "data", "images", "seed") if key in self.facts
        )

    def _legend(self) -> str:
        return LEGEND if any(row.null_mean is not None for row in self.rows) else ""

    def _title(self) -> str:
        return f"{self._about()}: {', '.join(self.names('analysis'))}"

    def _tables(self) -> Mapping[str, Records]:
        shown: dict[str, Records] = {self._legend(): []}
        shown |= {name: summary_rows(name, self.select(analysis=name)) for name in self.names("analysis")}
        return shown | {f"note: {remark}": [] for remark in self.remarks}

    def _records(self) -> Records:
        return [dataclasses.asdict(row) for row in self.rows]

    def _draw(self, axes: Axes, *, analysis: str | None = None, statistic: str | None = None) -> None:
        """One statistic over the sites, mean over heads, from the lowest to the highest head; chance is dashed.

        analysis, statistic: by name; default: the first.
        """
        from vitruvius._style import LINES

        analysis = analysis or self.rows[0].analysis
        rows = self.select(analysis=analysis)
        statistic = statistic or next((row.statistic for row in rows), "")
        rows = [row for row in rows if row.statistic == statistic]
        if not rows:
            known = ", ".join(dict.fromkeys(f"{row.analysis} {row.statistic}" for row in self.rows))
            raise UnknownName(f"no statistic {statistic!r} of {analysis!r} in this table. Known: {known}.")
        sites = list(dict.fromkeys(row.site for row in rows))
        heads, places = by_site(rows, rows[0].null, "mean"), range(len(sites))
        axes.fill_between(places, [min(each) for each in heads], [max(each) for each in heads], alpha=0.16, linewidth=0)
        axes.plot(places, [statistics.fmean(each) for each in heads], marker="o", label="observed")
        for null, line in zip(dict.fromkeys(row.null for row in rows if row.null), LINES[1:], strict=False):
            means = [statistics.fmean(each) if each else math.nan for each in by_site(rows, null, "null_mean")]
            axes.plot(places, means, linestyle=line, linewidth=1.3, color="0.5", label=null)
        axes.set_xticks(places, sites, rotation=30, ha="right")
        axes.set(title=analysis, ylabel=statistic.replace("_", " "))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    def to_json(self) -> str:
        """Columns and rows, with facts and remarks."""
        rows = ",\n".join(json.dumps(list(dataclasses.asdict(row).values()), allow_nan=False) for row in self.rows)
        head = {"facts": self.facts, "remarks": self.remarks, "columns": COLUMNS}
        return f'{json.dumps(head, indent=1, ensure_ascii=False)[:-2]},\n "rows": [\n{rows}\n]\n}}\n'


def by_site(rows: Sequence[Row], null: str | None, column: str) -> list[list[float]]:
    """What the rows of one null hold in a column, head by head, for every site in order."""
    sites: dict[str, list[float]] = {row.site: [] for row in rows}
    for row in rows:
        value = getattr(row, column)
        if row.null == null and value is not None:
            sites[row.site].append(value)
    return list(sites.values())


def _tensors_of(folder: StrPath, name: str) -> dict[str, Tensor]:
    """The tensors of a file that need not be there."""
    path = join(folder, name)
    return load_tensors(path)[0] if exists(path) else {}


def _curves_of(tensors: Mapping[str, Tensor], rows: Sequence[Row]) -> list[Curve]:
    """In the order of the rows' sites and of `NULLS`: the file knows none."""
    sites, nulls = [*dict.fromkeys(row.site for row in rows)], ["", *NULLS]
    curves = [
        Curve(mean=pair[0], std=pair[1], **dict(zip(CURVE_KEY, key.split("|"), strict=True)))
        for key, pair in tensors.items()
    ]
    place = {site: number for number, site in enumerate(sites)}
    return sorted(curves, key=lambda c: (place.get(c.site, len(sites)), c.analysis, c.statistic, nulls.index(c.null)))


class Layer(NamedTuple):
    """One statistic of one site, heads together: value, nearest chance, heads beyond every null, heads judged."""

    value: float
    chance: float | None
    beyond: int
    judged: int


def layers_of(rows: Sequence[Row]) -> dict[tuple[str, str], Layer]:
    """Every (site, statistic) of the rows of one analysis as one number, in order of appearance."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.site, row.statistic), []).append(row)
    return {key: _layer(group) for key, group in groups.items()}


def count_beyond(layers: Sequence[Layer]) -> str:
    """How many heads of all layers lie beyond every null, of those that could be judged."""
    judged = sum(layer.judged for layer in layers)
    return f"{sum(layer.beyond for layer in layers)} of {judged}" if judged else "no null tells"


def number(value: float | None) -> str:
    """Three significant digits; scientific where small or large, a dash where there is none."""
    if value is None:
        return "–"
    if 0.01 <= abs(value) < 100 or value == 0:
        return f"{value:.3f}"
    return f"{value:.3g}"


def _layer(rows: Sequence[Row]) -> Layer:
    heads: dict[int | None, list[Row]] = {}
    for row in rows:
        heads.setdefault(row.head, []).append(row)
    value = statistics.fmean(nulls[0].mean for nulls in heads.values())
    sides = [  # of each head: those it lies on of the nulls that could tell
        {row.claim.split()[0] for row in nulls if row.claim.startswith(("above", "below", "indist"))}
        for nulls in heads.values()
    ]
    beyond = sum(side in ({"above"}, {"below"}) for side in sides)
    return Layer(value, _nearest_chance(rows, value), beyond, sum(map(bool, sides)))


def _nearest_chance(rows: Sequence[Row], value: float) -> float | None:
    """The mean of the null that comes nearest, of those that can change the number; where none can, of any."""
    drawn = [row for row in rows if row.null_mean is not None]
    telling = [row for row in drawn if row.claim != SAME_BY_CONSTRUCTION] or drawn
    means = [
        statistics.fmean([row.null_mean or 0.0 for row in telling if row.null == null])
        for null in dict.fromkeys(row.null for row in telling)
    ]
    return min(means, key=lambda mean: abs(mean - value), default=None)


def summary_rows(analysis: str, rows: Sequence[Row]) -> list[dict[str, str]]:
    """One analysis in short: sites down, its first statistics across, the nearest chance in brackets."""
    shown = list(dict.fromkeys(row.statistic for row in rows))[:PRINTED]
    layers = layers_of(rows)
    with_chance = any(layer.chance is not None for key, layer in layers.items() if key[1] in shown)

    def cell(site: str, name: str) -> str:
        layer = layers.get((site, name))
        if layer is None:
            return "–"
        return f"{number(layer.value)} ({number(layer.chance)})" if with_chance else number(layer.value)

    lines = [
        {analysis: site, **{name: cell(site, name) for name in shown}}
        for site in dict.fromkeys(row.site for row in rows)
    ]
    if with_chance:
        counts = {n: count_beyond([layer for key, layer in layers.items() if key[1] == n]) for n in shown}
        lines.append({analysis: BEYOND, **counts})
    return lines


def _block(analysis: str, rows: Sequence[Row]) -> str:
    """The same as text."""
    summary = summary_rows(analysis, rows)
    lines = [list(summary[0]), *(list(line.values()) for line in summary)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    rule = "-" * len(text[0])
    text.insert(1, rule)
    if lines[-1][0] == BEYOND:
        text.insert(-1, rule)
    if more := list(dict.fromkeys(row.statistic for row in rows))[PRINTED:]:
        text.append(f"… and {', '.join(more)}")
    return "\n".join(text)
