"""Shift: accuracy under every corruption and severity, on natural shifts, calibration, and images from outside."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vitruvius._errors import DataError
from vitruvius._format import count, number, percent
from vitruvius._style import LIGHT, figure_style, heat, in_percent, new_axes
from vitruvius.evaluation.metrics.corruption import CorruptionErrors, corruption_errors
from vitruvius.evaluation.shift_report import PartScore, ShiftReport
from vitruvius.report.blocks import Block, Cell, Drawing, Table, number_cell, run_cell, run_keys, section, share_cell
from vitruvius.report.run import Run, shift_names

DARK_INK, LIGHT_INK = "#1b1512", "#fffdf7"  # on the colours of the map, the same by day and by night
SEVERAL = "each its own baseline"  # runs that were evaluated against different models
DETECTION = {"auroc": "AUROC", "aupr_out": "AUPR, outside", "aupr_in": "AUPR, known", "fpr95": "FPR95"}
Bins = list[dict[str, float]]
Diagram = tuple[Run, Bins]


@section("shift", title="Shift", order=45)
def shift(runs: Sequence[Run]) -> Sequence[Block]:
    """Heat maps of corruption and severity, accuracy over severity, mCE, and natural shifts."""
    blocks: list[Block] = []
    for name in shift_names(runs):
        graded = [run for run in runs if name in run.shifts and run.shifts[name].accuracies]
        if graded:
            blocks += [_heat(graded, name), _severities(graded, name), corruption_table(graded, name)]
    return [*blocks, *natural_table(runs)]


def _heat(runs: Sequence[Run], name: str) -> Drawing:
    reports = {run.name: run.shifts[name] for run in runs}
    rows = [
        {
            "run": run,
            "corruption": report.label(part.group),
            **{key: getattr(part, key) for key in ("severity", "accuracy", "low", "high", "n")},
            "ece": part.calibration.get("ece"),
            "aurra": part.aurra,
        }
        for run, report in reports.items()
        for part in report.parts
        if part.severity is not None
    ]
    caption = f"{name}: accuracy in per cent, corruptions down and severities across; the darker, the more errors."
    if any(report.drawn for report in reports.values()):
        caption += " Drawn: in place of the photographs of the published sets, and harder."
    panels = []
    for run, report in reports.items():
        means = {report.label(one): percent(sum(row.values()) / len(row)) for one, row in report.accuracies.items()}
        told = ", ".join(f"{one} {mean}" for one, mean in means.items())
        panels.append(
            (draw_heat(report, run), f"Heat map of accuracy by corruption and severity, {run}. Means: {told}.")
        )
    return Drawing(name=f"{name}-accuracy", panels=panels, caption=caption, rows=rows)


def draw_heat(report: ShiftReport, title: str) -> Figure:
    """Corruptions down, severities across, accuracy in per cent in every cell; darker is worse."""
    grid = report.accuracies
    columns = sorted({severity for row in grid.values() for severity in row})
    with figure_style():
        figure, axes = new_axes(1.9 + 0.62 * len(columns), 0.75 + 0.29 * len(grid))
        for y, row in enumerate(grid.values()):
            for severity, accuracy in row.items():
                x = columns.index(severity)
                colour = heat()(1 - accuracy)  # errors from 0 to 1 take the whole range of colours
                axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour, linewidth=0))
                red, green, blue, _ = colour
                ink = DARK_INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else LIGHT_INK
                axes.text(x, y, f"{100 * accuracy:.0f}", ha="center", va="center", color=ink, fontsize=9.5)
        axes.set_xticks(range(len(columns)), [str(severity) for severity in columns])
        axes.set_yticks(range(len(grid)), [report.label(name).replace("_", " ") for name in grid])
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(grid) - 0.5, -0.5), title=title, xlabel="severity")
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)
    return figure


def _severities(runs: Sequence[Run], name: str) -> Drawing:
    curves = {run.name: mean_by_severity(run.shifts[name]) for run in runs}
    rows = [{"run": run, "severity": s, "accuracy": a} for run, curve in curves.items() for s, a in curve.items()]
    ends = [
        f"{run}: " + ", ".join(f"{percent(accuracy)} at severity {s}" for s, accuracy in curve.items())
        for run, curve in curves.items()
    ]
    some = any(len(run.shifts[name].averaged) < len(run.shifts[name].accuracies) for run in runs)
    over = "the corruptions of the benchmark" if some else "corruptions"
    return Drawing(
        name=f"{name}-severity",
        panels=[(draw_severities(runs, name), f"Accuracy over severity. {'; '.join(ends)}.")],
        caption=f"{name}: accuracy averaged over {over}; severity 0 is clean where it was evaluated.",
        rows=rows,
        legend=run_keys(runs),
    )


def draw_severities(runs: Sequence[Run], name: str) -> Figure:
    """One line per run: mean accuracy over corruptions, from clean onwards."""
    with figure_style():
        figure, axes = new_axes()
        for run in runs:
            curve, look = mean_by_severity(run.shifts[name]), run.look
            axes.plot(list(curve), list(curve.values()), color=look.colour, marker=look.marker, label=run.name)
        axes.set_xticks(sorted({severity for run in runs for severity in mean_by_severity(run.shifts[name])}))
        axes.set(ylim=(-0.02, 1.02), xlabel="severity", ylabel="accuracy", title="mean over corruptions")
        in_percent(axes.yaxis)
    return figure


def mean_by_severity(report: ShiftReport) -> dict[int, float]:
    """Severity → accuracy averaged over the corruptions of the benchmark that have it; 0 is clean."""
    columns: dict[int, list[float]] = {}
    if report.clean_error is not None:
        columns[0] = [1 - report.clean_error]
    for row in report.averaged.values():
        for severity, accuracy in row.items():
            columns.setdefault(severity, []).append(accuracy)
    return {severity: sum(columns[severity]) / len(columns[severity]) for severity in sorted(columns)}


def corruption_table(runs: Sequence[Run], name: str) -> Table:
    """Mean accuracy, mCE and relative mCE against the evaluation's baseline, and CE against the first run."""
    rows = [_corruption_row(run, name, runs[0]) for run in runs]
    baselines = list(dict.fromkeys(str(row["baseline"]) for row in rows if row["baseline"] is not None))
    baseline = SEVERAL if len(baselines) > 1 else "".join(baselines)
    titles = {
        "mean_accuracy": "mean accuracy",
        "mce": f"mCE, {baseline}",
        "relative_mce": f"relative mCE, {baseline}",
        "mce_to_first": f"mCE, {runs[0].name}",
        "ece": "mean ECE",
    }
    if len(runs) == 1:
        del titles["mce_to_first"]
    shown = {key: title for key, title in titles.items() if any(row.get(key) is not None for row in rows)}
    cells = []
    for run, row in zip(runs, rows, strict=True):
        whose = f"of {row['baseline']}'s"  # the model that errors are divided by
        own = (share_cell(row, key, of=whose if SEVERAL in title else "") for key, title in shown.items())
        cells.append([run_cell(run), *own])
    caption = (
        f"{name}: errors summed over severities, as a share of those of the model named; small numbers are 95 % "
        "bootstrap intervals."
    )
    return Table(name=f"{name}-mce", titles=["run", *shown.values()], cells=cells, rows=rows, caption=caption)


def _corruption_row(run: Run, name: str, first: Run) -> dict[str, object]:
    report = run.shifts[name]
    found = report.corruption
    low, high = (1 - end for end in reversed(found["mean_error_interval"]))
    mce_low, mce_high = found.get("mce_interval") or (None, None)
    against_first = compare_to(run, first, name)
    graded = [part for part in report.parts if part.group in report.averaged]
    eces = [part.calibration["ece"] for part in graded if "ece" in part.calibration]
    return {
        "run": run.name,
        "mean_accuracy": 1 - found["mean_error"],
        "mean_accuracy_low": low,
        "mean_accuracy_high": high,
        "baseline": found.get("baseline"),
        "mce": number(found.get("mce")),
        "mce_low": mce_low,
        "mce_high": mce_high,
        "relative_mce": number(found.get("relative_mce")),
        "mce_to_first": None if against_first is None else against_first.mce,
        "ece": sum(eces) / len(eces) if eces else None,
    }


def compare_to(run: Run, first: Run, name: str) -> CorruptionErrors | None:
    """CE of `run` against `first`, where both have parts in common that the first does not get all right."""
    try:
        theirs = first.shifts[name].as_baseline(first.name)
        ours = run.shifts[name]
        errors = ours.as_baseline(run.name).errors
        judged = {group: errors[group] for group in ours.averaged}
        return corruption_errors(judged, theirs, clean_error=ours.clean_error)
    except DataError:
        return None


def natural_table(runs: Sequence[Run]) -> list[Table]:
    """One line per set and run: accuracy, ECE and AURRA with their intervals; no table where no run has such a set."""
    parts = [(report.name, run, part) for run in runs for report in run.shifts.values() for part in _natural(report)]
    if not parts:
        return []
    parts.sort(key=lambda each: (each[0], each[2].name, each[1].index))
    rows: list[dict[str, object]] = []
    for name, run, part in parts:
        row = {"set": name, "part": part.name, "run": run.name, "n": part.n, "accuracy": part.accuracy}
        rows.append({**row, "low": part.low, "high": part.high, "aurra": part.aurra, **part.calibration})
        for key, (low, high) in part.intervals.items():
            rows[-1] |= {f"{key}_low": low, f"{key}_high": high}
    cells = [
        [
            Cell(text=name if part.name == name else f"{name}, {part.name}"),
            run_cell(run),
            share_cell(row, "accuracy", "low", "high"),
            share_cell(row, "ece"),
            number_cell(number(row.get("rms")), percent),
            share_cell(row, "aurra"),
            number_cell(part.n, count),
        ]
        for (name, run, part), row in zip(parts, rows, strict=True)
    ]
    titles = ["set", "run", "accuracy", "ECE", "RMS error", "AURRA", "images"]
    caption = "Natural shifts. Intervals are 95 %: Wilson's for accuracy, bootstrap for the others."
    return [Table(name="natural-shifts", titles=titles, cells=cells, rows=rows, caption=caption)]


def _natural(report: ShiftReport) -> list[PartScore]:
    """The parts that are not corruptions; none of a set with images from outside the classes."""
    if any(part.outside for part in report.parts):
        return []
    return [part for part in report.parts if part.severity is None]


@section("reliability", title="Calibration", order=46)
def reliability(runs: Sequence[Run]) -> Sequence[Block]:
    """Accuracy over confidence, clean and shifted, of every run."""
    diagrams = collect_diagrams(runs)
    if not diagrams:
        return []
    shown = sorted({run.index for pairs in diagrams.values() for run, _ in pairs})
    panels = []
    for title, pairs in diagrams.items():
        errors = ", ".join(f"{run.name} {percent(bin_error(bins))}" for run, bins in pairs)
        alt = f"Reliability diagram, {title}. Expected calibration error: {errors}."
        panels.append((draw_reliability(pairs, title), alt))
    return [
        Drawing(
            name="reliability",
            panels=panels,
            caption="A model that knows how sure it may be lies on the dashed diagonal, an overconfident one below it; "
            "the histogram shows how many images have each confidence.",
            rows=[
                {"run": run.name, "images": title, **one}
                for title, pairs in diagrams.items()
                for run, bins in pairs
                for one in bins
            ],
            legend=run_keys([runs[index] for index in shown]),
        )
    ]


def collect_diagrams(runs: Sequence[Run]) -> dict[str, list[Diagram]]:
    """clean, then each shift → the runs that have such a diagram; images from outside have none."""
    diagrams: dict[str, list[Diagram]] = {}
    for run in runs:
        clean = [bins for report in run.shifts.values() if (bins := report.reliability.get("clean"))]
        if clean:  # from the first shift that came with clean images
            diagrams.setdefault("clean", []).append((run, clean[0]))
    for name in shift_names(runs):
        for run, report in [(run, run.shifts[name]) for run in runs if name in run.shifts]:
            bins = report.reliability.get("shifted")
            if bins and not any(part.outside for part in report.parts):
                diagrams.setdefault(name, []).append((run, bins))
    return diagrams


def draw_reliability(diagrams: Sequence[Diagram], title: str) -> Figure:
    """Above, accuracy over confidence and the diagonal of honesty; below, how many images have which confidence."""
    with figure_style():
        figure = Figure(figsize=(4.5, 4.3), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
        above.plot([0, 1], [0, 1], color=LIGHT["quiet"], linewidth=1, linestyle=(0, (3, 3)))
        for run, bins in diagrams:
            look = {"color": run.look.colour, "linewidth": 1.6}
            above.plot([b["confidence"] for b in bins], [b["accuracy"] for b in bins], marker=run.look.marker, **look)
            total = sum(b["count"] for b in bins)
            for b in bins:
                x, share = [b["low"], b["low"], b["high"], b["high"]], b["count"] / total
                below.fill(x, [0, share, share, 0], facecolor=run.look.colour, alpha=0.18, linewidth=0)
                below.plot([b["low"], b["high"]], [share, share], **look)
        above.set(title=title, ylim=(-0.02, 1.02), ylabel="accuracy")
        below.set(xlim=(-0.01, 1.01), xlabel="confidence", ylabel="images")
        in_percent(above.yaxis, below.xaxis, below.yaxis)
    return figure


def bin_error(bins: Bins) -> float:
    """ECE of a diagram."""
    total = sum(b["count"] for b in bins)
    return sum(b["count"] * abs(b["confidence"] - b["accuracy"]) for b in bins) / total


@section("detection", title="Detection", order=47)
def detection(runs: Sequence[Run]) -> Sequence[Block]:
    """How well images from outside the classes are told from known ones: AUROC, AUPR both ways, FPR95."""
    tables = []
    for name in shift_names(runs):
        found: list[tuple[Run, dict[str, object]]] = []
        for run in [run for run in runs if name in run.shifts]:
            for score, numbers in run.shifts[name].detection.items():
                row: dict[str, object] = {"run": run.name, "score": score}
                for key in DETECTION:
                    low, high = (numbers.get("intervals") or {}).get(key, (None, None))
                    row |= {key: numbers.get(key), f"{key}_low": low, f"{key}_high": high}
                found.append((run, row))
        cells = [
            [run_cell(run), Cell(text=str(row["score"])), *(share_cell(row, key) for key in DETECTION)]
            for run, row in found
        ]
        caption = (
            f"{name}: images from outside told from known ones. FPR95 is the share of known images taken for outside "
            "ones when 95 % of those are found: smaller is better. Intervals are 95 %, bootstrap."
        )
        rows, titles = [row for _, row in found], ["run", "score", *DETECTION.values()]
        if found:
            tables.append(Table(name=f"{name}-detection", titles=titles, cells=cells, rows=rows, caption=caption))
    return tables
