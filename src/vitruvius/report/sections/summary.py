"""Summary: one card per run, with clean and worst-case accuracy and their 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence

from vitruvius.evaluation.shift_report import ShiftReport
from vitruvius.report._blocks import Block, Card, Cards, Note
from vitruvius.report._names import describe_attention
from vitruvius.report._numbers import duration, interval, number, percent
from vitruvius.report._runs import Run, Threat
from vitruvius.report._section import section


@section("summary", title="Summary", order=10)
def summary(runs: Sequence[Run]) -> Sequence[Block]:
    """Cards with clean and worst-case accuracy of each run. `runs` are those of the page."""
    cards = Cards(cards=[_card(run) for run in runs])
    known = any(threat.low is not None for run in runs for threat in run.threats)
    if known:
        return [cards, Note(text="Top-1 accuracy on test images; small numbers are 95 % intervals.")]
    return [cards]


def _card(run: Run) -> Card:
    model = run.config.get("model")
    name = None
    if isinstance(model, dict):
        name = model.get("name")
    return Card(
        title=run.name,
        subtitle=" · ".join([str(name or "model not named"), describe_attention(run)]),
        colour=run.look.name,
        figures=_figures(run),
        facts=_facts(run),
    )


def _figures(run: Run) -> list[tuple[str, str, str]]:
    """(label, number, interval): clean and worst case where evaluated, else the last on held-out images."""
    shown = []
    if (clean := run.threat("clean")) is not None:
        shown.append(("clean", percent(clean.accuracy), interval(clean.low, clean.high)))
    if (worst := _worst(run)) is not None:
        shown.append((worst.name, percent(worst.accuracy), worst.detail))
    shown += [_corrupted(name, report) for name, report in run.shifts.items() if report.corruption][:1]
    if not shown and (last := _last(run, "val_accuracy")) is not None:
        shown.append(("held-out", percent(last), ""))
    return shown


def _corrupted(name: str, report: ShiftReport) -> tuple[str, str, str]:
    """Accuracy averaged over corruptions and severities."""
    found = report.corruption
    low, high = (1 - end for end in reversed(found["mean_error_interval"]))
    return ("corrupted" if name == "corruptions" else name, percent(1 - found["mean_error"]), interval(low, high))


def _worst(run: Run) -> Threat | None:
    """The evaluation's worst case over all threats, else the threat that hurts most."""
    attacks = [threat for threat in run.threats if threat.name != "clean"]
    if not attacks:
        return None
    return run.worst_case or min(attacks, key=lambda threat: threat.accuracy)


def _facts(run: Run) -> list[tuple[str, str]]:
    seconds = [value for row in run.epochs if (value := number(row.get("seconds"))) is not None]
    if run.epochs:
        facts = [("epochs", str(len(run.epochs)))]
    else:
        facts = []
    if seconds:
        facts.append(("training", duration(sum(seconds))))
    if (images := number(run.evaluation.get("num_images"))) is not None:
        facts.append(("test images", f"{images:.0f}"))
    if (seed := run.config.get("seed")) is not None:
        facts.append(("seed", str(seed)))
    return facts


def _last(run: Run, key: str) -> float | None:
    values = [value for row in run.epochs if (value := number(row.get(key))) is not None]
    if values:
        return values[-1]
    return None


@section("remarks", title="Remarks", order=99)
def remarks(runs: Sequence[Run]) -> Sequence[Block]:
    """What was missing or damaged in the run folders. `runs` are those of the page."""
    return [Note(text=f"{run.name}: {remark}") for run in runs for remark in run.remarks]
