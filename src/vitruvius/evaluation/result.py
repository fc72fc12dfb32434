"""Report: what an evaluation found, a reduction of its ledger; prints as a table, saves as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitruvius._errors import UnknownName, suggest
from vitruvius._files import atomic_write_text
from vitruvius._format import DASH, format_table
from vitruvius._notebook import Records, Shown
from vitruvius.corruptions.base import DRAWN, is_drawn
from vitruvius.evaluation.again import AGAIN, CLEAN_AGAIN
from vitruvius.evaluation.base import Columns
from vitruvius.evaluation.ledger import AFTER, Ledger
from vitruvius.evaluation.masking import Finding, again_findings, draw_remarks, stage_findings
from vitruvius.evaluation.threats import Entry, family, name_entries

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABEL_WIDTH = 56  # characters of a threat's description in a table
Grid = Mapping[str, Mapping[int, float]]  # corruption → severity → share


@dataclass(frozen=True, kw_only=True)
class Score:
    """Accuracy under one threat, with a Wilson 95 % interval."""

    name: str
    spec: str
    correct: int
    n: int
    accuracy: float
    low: float
    high: float
    loss: float | None = None
    top5: float | None = None
    eps: float | None = None
    severity: int | None = None  # of a corruption
    family: str = ""  # a corruption without its severity
    drawn: bool = False  # stands in for published photographs: drawn frost
    seconds: float | None = None  # for all images together
    stages: dict[str, float] = field(default_factory=dict)  # of an ensemble: accuracy after each of its attacks
    doubts: list[str] = field(default_factory=list)  # names of open findings; the report's remarks say what they mean


class Saved:
    """A dataclass of figures with the ledger they come from; saved as JSON without it."""

    def to_dict(self) -> dict[str, Any]:
        """Everything but the ledger, as plain values."""
        plain = asdict(replace(self, ledger=Ledger()))  # type: ignore[call-overload, type-var]
        del plain["ledger"]
        return plain

    def save(self, path: str | Path) -> None:
        """Write the numbers as JSON."""
        atomic_write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Saved, Shown):
    """Scores by threat, the worst case over attacks, and the ledger they come from.

    Corruptions are judged by their mean and are not part of the worst case.
    """

    data: str
    num_images: int
    threats: list[Score]
    worst_case: Score
    remarks: list[str] = field(default_factory=list)
    ledger: Ledger = field(repr=False, compare=False, default_factory=Ledger)

    def __getitem__(self, name: str) -> Score:
        """The score of one threat, by its name or its description."""
        for score in self.threats:
            if name in (score.name, score.spec):
                return score
        names = [score.name for score in self.threats]
        raise UnknownName(f"no threat {name!r} in this report{suggest(name, names)} Known: {', '.join(names)}.")

    def _rows(self) -> list[Score]:
        """The lines of the printed table: corruptions have a grid of their own."""
        rows = [score for score in self.threats if score.severity is None]
        if len(rows) > 1:
            rows.append(self.worst_case)
        return rows

    def __str__(self) -> str:
        rows, cells, doubts = self._rows(), [], []
        for row, label in zip(rows, shorten_labels([row.spec for row in rows]), strict=True):
            more = ["", ""] if row.top5 is None or row.loss is None else [per_cent(row.top5), f"{row.loss:.3f}"]
            cells.append([label, per_cent(row.accuracy), format_interval(row.low, row.high), f"{row.n:,}", *more])
            cells += [[f"  after {name}", per_cent(share), "", "", "", ""] for name, share in row.stages.items()]
            doubts += [f"  doubtful: {', '.join(row.doubts)}" if row.doubts else "", *([""] * len(row.stages))]
        lines = format_table(["threat", "accuracy", "95 % interval", "n", "top-5", "loss"], cells)
        lines[2:] = [line + doubt for line, doubt in zip(lines[2:], doubts, strict=True)]
        if self.accuracies:
            lines += ["", *format_grid("corruption", self.labelled())]
        lines += [f"note: {remark}" for remark in self.remarks]
        return "\n".join(lines)

    def _title(self) -> str:
        rows = [f"{row.name} {row.accuracy:.1%}" for row in self._rows()[:6]]
        return f"{self.data}, {self.num_images} images: {', '.join(rows)}"

    def _tables(self) -> Mapping[str, Records]:
        shown = [
            {"threat": row.spec, "accuracy": f"{row.accuracy:.2%}", "95 % interval": f"{row.low:.1%} – {row.high:.1%}"}
            | {"images": row.n, **({"doubtful": ", ".join(row.doubts)} if row.doubts else {})}
            for row in self._rows()
        ]
        grid = [
            {"corruption": name, **{str(s): f"{a:.1%}" for s, a in row.items()}}
            for name, row in self.labelled().items()
        ]
        notes: dict[str, Records] = {f"note: {remark}": [] for remark in self.remarks}
        return {"": shown, **({"accuracy by severity": grid} if grid else {}), **notes}

    def _records(self) -> Records:
        return [{**asdict(score), "doubts": ", ".join(score.doubts)} for score in [*self.threats, self.worst_case]]

    def _draw(self, axes: Axes) -> None:
        """Accuracy under each threat with its interval; the mean over severities of a corruption without one."""
        from vitruvius._style import in_percent

        means = {name: sum(row.values()) / len(row) for name, row in self.labelled().items()}
        labels = [*shorten_labels([row.spec for row in self._rows()]), *means]
        for y, row in enumerate(self._rows()):
            axes.plot([row.low, row.high], [y, y], color="C0", linewidth=1.6)
            axes.plot([row.accuracy], [y], color="C0", marker="o")
        axes.plot(list(means.values()), range(len(labels) - len(means), len(labels)), "C0s", linestyle="none")
        axes.set_yticks(range(len(labels)), labels)
        axes.set(ylim=(len(labels) - 0.5, -0.5), xlim=(-0.02, 1.02), xlabel="accuracy")
        in_percent(axes.xaxis)

    @property
    def accuracies(self) -> dict[str, dict[int, float]]:
        """Of corruptions: name → severity → accuracy."""
        return tabulate((s.family, s.severity, s.accuracy) for s in self.threats if s.severity is not None)

    def labelled(self) -> dict[str, dict[int, float]]:
        """`accuracies` under the names of tables: `frost (drawn)`."""
        drawn = {score.family for score in self.threats if score.drawn}
        return {label_drawn(name, drawn): row for name, row in self.accuracies.items()}


def summarise(
    ledger: Ledger,
    entries: Sequence[Entry],
    data: str,
    *,
    broken: Sequence[str] = (),
    found: Mapping[str, Sequence[Finding]] | None = None,
    remarks: Sequence[str] = (),
) -> Report:
    """Reduce a ledger to scores: one per threat, and the worst case over all attacks that have seen every image.

    `broken`: images that could not be read. `found`: open findings by the descriptions of threats.

    `ledger` holds all rows; `entries` are its threats, clean images among them; `data` is the name of the data set.
    """
    number = ledger.number("clean")
    named = name_entries(entry for entry in entries if ledger.number(entry.spec))
    rows = {entry.spec: ledger.rows(entry.spec) for entry in named.values()}
    doubts = {  # open findings about each figure: those made on its model, and those in its rows
        spec: [*(found or {}).get(spec, ()), *again_findings([own], AGAIN, CLEAN_AGAIN), *stage_findings(own)]
        for spec, own in rows.items()
    }
    doubts["clean"] = again_findings(list(rows.values()), CLEAN_AGAIN)
    scores = [_score(name, entry, rows[entry.spec], doubts[entry.spec]) for name, entry in named.items()]
    attacks = [score.spec for score in scores if score.n == number and score.severity is None]
    robust = torch.stack([rows[spec]["correct"] for spec in attacks]).all(0)  # (n,): under the attack that breaks it
    worst = Score(
        name="worst case",
        spec="worst case of all",
        correct=int(robust.sum()),
        **proportion(robust),
        doubts=list(dict.fromkeys(finding.name for spec in attacks for finding in doubts[spec])),
    )
    unfinished = [score for score in scores if score.n != number]
    unreadable = ", ".join([*broken[:5], *(["…"] if len(broken) > 5 else [])])
    remarks = [
        *(
            f"{s.spec} has seen {s.n} of {number} images and is left out of the worst case; run it again."
            for s in unfinished
        ),
        *([f"{len(broken)} image(s) could not be read and were left out: {unreadable}."] if broken else []),
        *_doubtful(doubts),
        *(remark for spec, own in rows.items() for remark in draw_remarks(spec, own)),
        *remarks,
        *([DRAWN] if any(score.drawn for score in scores) else []),
    ]
    return Report(data=data, num_images=number, threats=scores, worst_case=worst, remarks=remarks, ledger=ledger)


def _doubtful(doubts: Mapping[str, Sequence[Finding]]) -> list[str]:
    """A remark for each open finding; one that is the same for several threats names them all."""
    specs: dict[str, list[str]] = {}
    for spec, findings in doubts.items():
        for finding in findings:
            specs.setdefault(finding.remark(), []).append(spec)
    return [f"doubtful figure of {', '.join(named)}: {remark}" for remark, named in specs.items()]


def _score(name: str, entry: Entry, rows: Columns, doubts: Sequence[Finding]) -> Score:
    return Score(
        name=name,
        spec=entry.spec,
        correct=int(rows["correct"].sum()),
        **proportion(rows["correct"]),
        loss=float(rows["loss"].double().mean()),
        top5=float(rows["top5"].double().mean()),
        eps=entry.eps,
        severity=entry.severity,
        family="" if entry.severity is None else family(entry),
        drawn=is_drawn(entry.spec),
        seconds=float(rows["seconds"].double().sum()),
        stages={
            column.removeprefix(AFTER): float(robust.double().mean())
            for column, robust in rows.items()
            if column.startswith(AFTER)
        },
        doubts=[finding.name for finding in doubts],
    )


def proportion(right: Tensor) -> dict[str, Any]:
    """The fields of a score that (n,) truth values give: n, accuracy and its interval."""
    correct, n = int(right.sum()), len(right)
    low, high = wilson(correct, n)
    return {"n": n, "accuracy": correct / max(n, 1), "low": low, "high": high}


def wilson(correct: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion `correct / n` (1927), which stays in [0, 1] and works at 0 and 1."""
    if n <= 0:
        return (0.0, 1.0)
    z = 1.959963984540054  # of the normal distribution
    p, z2 = correct / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return (max(0.0, centre - half), min(1.0, centre + half))


def tabulate(cells: Iterable[tuple[str, int, float]]) -> dict[str, dict[int, float]]:
    """(corruption, severity, share) → corruption → severity → share."""
    table: dict[str, dict[int, float]] = {}
    for name, severity, share in cells:
        table.setdefault(name, {})[severity] = share
    return table


def format_grid(title: str, grid: Grid, extra: Mapping[str, Mapping[str, float]] | None = None) -> list[str]:
    """Accuracies in per cent, one line per corruption, with its mean; `extra` adds columns of shares."""
    severities = sorted({severity for row in grid.values() for severity in row})
    rows = {
        name: [
            *map(row.get, severities),
            _mean(list(row.values())),
            *(more.get(name) for more in (extra or {}).values()),
        ]
        for name, row in grid.items()
    }
    if len(rows) > 1:
        rows["mean"] = [_mean(column) for column in zip(*rows.values(), strict=True)]
    cells = [[name, *(DASH if share is None else f"{100 * share:.2f}" for share in row)] for name, row in rows.items()]
    return format_table([title, *map(str, severities), "mean", *(extra or {})], cells)


def label_drawn(name: str, drawn: Container[str]) -> str:
    """The name of a corruption in tables: one that stands in for photographs says so, `frost (drawn)`."""
    return f"{name} (drawn)" if name in drawn else name


def shorten_labels(labels: Sequence[str], width: int = LABEL_WIDTH) -> list[str]:
    """Labels of a table's lines, wide ones without their middle; whole where two would look the same.

    The full description stands in report.json.
    """
    end = width // 4
    short = [text if len(text) <= width else f"{text[: width - end - 1]}…{text[-end:]}" for text in labels]
    return short if len(set(short)) == len(set(labels)) else list(labels)


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of what is known; nothing if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def per_cent(share: float) -> str:
    return f"{100 * share:.2f} %"


def format_interval(low: float, high: float) -> str:
    return f"{100 * low:.2f} – {100 * high:.2f}"
