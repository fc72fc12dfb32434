"""A table in words: for each analysis, sites down, its first statistics across, the nearest chance in brackets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vitruvius.analysis._table import Row

MOST = 4  # statistics of an analysis that are printed; the files hold all
KEPT = "the same by construction"
LEGEND = "means over heads and images; in brackets the nearest chance; beyond chance: heads, where every null agrees"


class Layer(NamedTuple):
    """One statistic of one site, heads together: value, nearest chance, and how many heads lie beyond every null."""

    value: float
    chance: float | None
    beyond: int
    judged: int
    heads: int


def table_text(rows: Sequence[Row], facts: dict[str, Any], remarks: Sequence[str]) -> str:
    """The whole summary.

    rows: of the table, observed and chance.
    facts: about model and data, for the first line: model, data, images, seed.
    remarks: sentences for the end.
    """
    paragraphs = []
    head = _head(rows, facts)
    if head:
        paragraphs.append("\n".join(head))
    by_analysis: dict[str, list[Row]] = {}
    for row in rows:
        by_analysis.setdefault(row.analysis, []).append(row)
    paragraphs += [_block(name, own) for name, own in by_analysis.items()]
    paragraphs += [f"note: {remark}" for remark in remarks]
    return "\n\n".join(paragraphs)


def _head(rows: Sequence[Row], facts: dict[str, Any]) -> list[str]:
    """What was analysed, and how to read the numbers."""
    lines = []
    told = [f"{key} {facts[key]}" for key in ("model", "data", "images", "seed") if key in facts]
    if told:
        lines.append(" · ".join(told))
    if any(row.null_mean is not None for row in rows):
        lines.append(LEGEND)
    return lines


def layer(rows: Sequence[Row]) -> Layer:
    """The `rows` of one site and statistic, all heads and nulls, as one number."""
    heads: dict[int | None, list[Row]] = {}
    for row in rows:
        heads.setdefault(row.head, []).append(row)
    value = statistics.fmean(own[0].mean for own in heads.values())
    verdicts = [v for own in heads.values() if (v := beyond_chance(own)) is not None]
    return Layer(value, nearest_chance(rows, value), sum(verdicts), len(verdicts), len(heads))


def nearest_chance(rows: Sequence[Row], value: float) -> float | None:
    """The mean of the null that comes nearest, of those that can tell; where none can, of the first.

    `rows` are the nulls of one number, `value` what was observed.
    """
    means: dict[str | None, list[float]] = {}
    for row in rows:
        if row.null_mean is not None and (row.claim != KEPT or all(r.claim == KEPT for r in rows)):
            means.setdefault(row.null, []).append(row.null_mean)
    return min((statistics.fmean(own) for own in means.values()), key=lambda mean: abs(mean - value), default=None)


def beyond_chance(rows: Sequence[Row]) -> bool | None:
    """Whether one head's number lies beyond every null that could tell, on the same side of all; None if none could.

    `rows` are those of the number and of its nulls.
    """
    claims = [row.claim for row in rows if row.claim.startswith(("above", "below", "indist"))]
    sides = {claim.split()[0] for claim in claims}
    if claims:
        return len(sides) == 1 and "indistinguishable" not in sides
    return None


def number(value: float | None) -> str:
    """Three significant digits; scientific where small or large.

    A `value` of None is a dash.
    """
    if value is None:
        return "–"
    if 0.01 <= abs(value) < 100 or value == 0:
        return f"{value:.3f}"
    return f"{value:.3g}"


def _by_name(layers: Mapping[tuple[str, str], Layer], names: Sequence[str]) -> dict[str, list[Layer]]:
    """The layers of each statistic that is shown."""
    found: dict[str, list[Layer]] = {name: [] for name in names}
    for (_, name), layer in layers.items():
        if name in found:
            found[name].append(layer)
    return found


def _block(analysis: str, rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(row.statistic for row in rows))
    sites = list(dict.fromkeys(row.site for row in rows))
    shown = names[:MOST]
    layers = layers_of(rows)
    by_name = _by_name(layers, shown)
    with_chance = any(map(_has_chance, by_name.values()))
    lines = [[analysis, *shown]]
    for site in sites:
        lines.append([site, *(_cell(layers.get((site, name)), with_chance) for name in shown)])
    if with_chance:
        lines.append(["beyond chance", *map(_count, by_name.values())])
    text = _aligned(lines)
    if names[MOST:]:
        text.append(f"… and {', '.join(names[MOST:])}")
    return "\n".join(text)


def _has_chance(layers: Sequence[Layer]) -> bool:
    return any(found.chance is not None for found in layers)


def layers_of(rows: Sequence[Row]) -> dict[tuple[str, str], Layer]:
    """Every (site, statistic) of these `rows` as one number, in order of appearance."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.site, row.statistic), []).append(row)
    return {place: layer(own) for place, own in groups.items()}


def _cell(found: Layer | None, with_chance: bool) -> str:
    if found is None:
        return "–"
    if with_chance:
        return f"{number(found.value)} ({number(found.chance)})"
    return number(found.value)


def _count(layers: Sequence[Layer]) -> str:
    judged = sum(found.judged for found in layers)
    if judged:
        return f"{sum(found.beyond for found in layers)} of {judged}"
    return "no null tells"


def _aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    rule = "-" * len(text[0])
    return [text[0], rule, *text[1:-1], *([rule] if lines[-1][0] == "beyond chance" else []), text[-1]]
