"""Summary: one card per run, with clean and worst-case accuracy and their intervals; and the remarks at the end."""

from __future__ import annotations

from collections.abc import Sequence

from vitruvius.report.blocks import Block, Card, Cards, Note, section
from vitruvius.report.run import Run, Threat
from vitruvius.report.words import duration, interval, number, percent


@section("summary", title="Summary", order=10)
def summary(runs: Sequence[Run]) -> Sequence[Block]:
    """Cards with clean and worst-case accuracy of each run."""
    cards = Cards(cards=[_card(run) for run in runs])
    if any(threat.low is not None for run in runs for threat in run.threats):
        return [cards, Note(text="Top-1 accuracy on test images; small numbers are 95 % intervals.")]
    return [cards]


def _card(run: Run) -> Card:
    model = run.config.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    facts = [("epochs", str(len(run.epochs)))] if run.epochs else []
    if seconds := run.logged("seconds"):
        facts.append(("training", duration(sum(seconds))))
    if (images := number(run.evaluation.get("num_images"))) is not None:
        facts.append(("test images", f"{images:.0f}"))
    if (seed := run.config.get("seed")) is not None:
        facts.append(("seed", str(seed)))
    subtitle = f"{name or 'model not named'} · {run.attention}"
    return Card(title=run.name, subtitle=subtitle, colour=run.look.name, figures=_figures(run), facts=facts)


def _figures(run: Run) -> list[tuple[str, str, str]]:
    """(label, number, interval): clean and worst case where evaluated, else the last on held-out images."""
    shown = []
    if run.clean is not None:
        shown.append(("clean", percent(run.clean.accuracy), interval(run.clean.low, run.clean.high)))
    if (worst := _worst(run)) is not None:
        shown.append((worst.name, percent(worst.accuracy), worst.detail))
    for name, report in run.shifts.items():
        if report.corruption:  # accuracy averaged over corruptions and severities, of the first set that has some
            low, high = (1 - end for end in reversed(report.corruption["mean_error_interval"]))
            label = "corrupted" if name == "corruptions" else name
            shown.append((label, percent(1 - report.corruption["mean_error"]), interval(low, high)))
            break
    held_out = run.logged("val_accuracy")
    return shown or [("held-out", percent(held_out[-1]), "") for _ in held_out[:1]]


def _worst(run: Run) -> Threat | None:
    """The evaluation's worst case over all threats, else the threat that hurts most."""
    attacks = [threat for threat in run.threats if threat.name != "clean"]
    if not attacks:
        return None
    return run.worst_case or min(attacks, key=lambda threat: threat.accuracy)


@section("remarks", title="Remarks", order=99)
def remarks(runs: Sequence[Run]) -> Sequence[Block]:
    """What was missing or damaged in the run folders."""
    return [Note(text=f"{run.name}: {remark}") for run in runs for remark in run.remarks]
