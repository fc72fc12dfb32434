"""Sections of shift: heat maps, curves, tables and diagrams show the numbers of the reports, each with its CSV."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from fake_run import write_run
from html_page import read_page

from vitruvius._format import percent
from vitruvius.evaluation.metrics.corruption import corruption_errors
from vitruvius.evaluation.shift_report import ShiftReport
from vitruvius.report import write_page
from vitruvius.report.run import Run, read_runs
from vitruvius.report.sections.shift import (
    bin_error,
    collect_diagrams,
    compare_to,
    corruption_table,
    detection,
    draw_heat,
    draw_reliability,
    draw_severities,
    mean_by_severity,
    natural_table,
    reliability,
    shift,
)
from vitruvius.report.sections.summary import _figures


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    where = tmp_path_factory.mktemp("shifted")
    small = {"epochs": 1, "patch": 4, "images": 1, "shifts": True}
    return [write_run(where / "plain", **small), write_run(where / "robust", seed=1, robust=0.9, **small)]


@pytest.fixture(scope="module")
def both(folders: list[Path]) -> list[Run]:
    return read_runs(folders)


@pytest.fixture(scope="module")
def corrupted(both: list[Run]) -> ShiftReport:
    return both[0].shifts["imagenet-c"]


def test_every_cell_of_the_heat_map_shows_its_accuracy(corrupted: ShiftReport) -> None:
    axes = draw_heat(corrupted, "plain").axes[0]
    shown = [text.get_text() for text in axes.texts]
    assert shown == [f"{100 * a:.0f}" for row in corrupted.accuracies.values() for a in row.values()]
    assert len(shown) == 75
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["gaussian noise", "shot noise"]
    darkness = [sum(patch.get_facecolor()[:3]) for patch in axes.patches]
    accuracies = [a for row in corrupted.accuracies.values() for a in row.values()]
    assert np.argmax(darkness) == np.argmax(accuracies)  # the lightest is the best


def test_a_hole_in_the_grid_stays_empty(corrupted: ShiftReport) -> None:
    partial = dataclasses.replace(corrupted, parts=[corrupted.parts[0], corrupted.parts[7]])
    axes = draw_heat(partial, "plain").axes[0]
    assert len(axes.patches) == 2
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "3"]


def test_the_curve_over_severity_starts_at_clean(both: list[Run], corrupted: ShiftReport) -> None:
    curve = mean_by_severity(corrupted)
    assert list(curve) == [0, 1, 2, 3, 4, 5]
    assert curve[0] == 1 - corrupted.clean_error
    assert curve[4] == pytest.approx(np.mean([row[4] for row in corrupted.accuracies.values()]))
    lines = draw_severities(both, "imagenet-c").axes[0].lines
    np.testing.assert_array_equal(lines[0].get_ydata(), list(curve.values()))


def test_runs_are_compared_with_the_baseline_and_with_the_first_run(both: list[Run]) -> None:
    table = corruption_table(both, "imagenet-c")
    titles = ["run", "mean accuracy", "mCE, AlexNet", "relative mCE, AlexNet", "mCE, plain", "mean ECE"]
    assert list(table.titles) == titles
    first, second = table.rows
    assert first["mce_to_first"] == pytest.approx(1.0)
    ours, theirs = (run.shifts["imagenet-c"].as_baseline(run.name) for run in (both[1], both[0]))
    assert second["mce_to_first"] == pytest.approx(corruption_errors(ours.errors, theirs).mce)
    assert table.cells[0][2].text == percent(both[0].shifts["imagenet-c"].corruption["mce"])
    alone = corruption_table(both[:1], "imagenet-c")
    assert "mCE, plain" not in alone.titles


def test_means_are_over_the_benchmark_wherever_they_are_shown(both: list[Run]) -> None:
    few = list(both[0].shifts["imagenet-c"].accuracies)[:9]
    runs = []
    for run in both:
        report = run.shifts["imagenet-c"]
        judged = dataclasses.replace(report, corruption={**report.corruption, "corruptions": few})
        runs.append(dataclasses.replace(run, shifts={"imagenet-c": judged}))
    first, second = (run.shifts["imagenet-c"] for run in runs)
    ours = {group: second.as_baseline("").errors[group] for group in few}
    row = corruption_table(runs, "imagenet-c").rows[1]
    assert row["mce_to_first"] == pytest.approx(corruption_errors(ours, first.as_baseline("")).mce)
    eces = [part.calibration["ece"] for part in second.parts if part.group in few]
    assert row["ece"] == pytest.approx(np.mean(eces))
    assert mean_by_severity(second)[5] == pytest.approx(np.mean([second.accuracies[group][5] for group in few]))
    caption = shift(runs)[1].caption  # type: ignore[union-attr]
    assert "averaged over the corruptions of the benchmark" in caption


def test_runs_with_different_baselines_say_whose_each_number_is(both: list[Run]) -> None:
    report = both[1].shifts["imagenet-c"]
    other = dataclasses.replace(report, corruption={**report.corruption, "baseline": "other"})
    table = corruption_table([both[0], dataclasses.replace(both[1], shifts={"imagenet-c": other})], "imagenet-c")
    assert list(table.titles)[2:4] == ["mCE, each its own baseline", "relative mCE, each its own baseline"]
    assert [cells[2].detail.rpartition(" of ")[2] for cells in table.cells] == ["AlexNet's", "other's"]
    assert [row["baseline"] for row in table.rows] == ["AlexNet", "other"]


def test_a_first_run_without_errors_is_no_baseline(both: list[Run], corrupted: ShiftReport) -> None:
    perfect = [dataclasses.replace(part, accuracy=1.0) for part in corrupted.parts]
    first = dataclasses.replace(both[0], shifts={"imagenet-c": dataclasses.replace(corrupted, parts=perfect)})
    assert compare_to(both[1], first, "imagenet-c") is None


def test_natural_sets_have_a_line_each_and_outside_ones_none(both: list[Run]) -> None:
    (table,) = natural_table(both)
    assert [(row["set"], row["run"]) for row in table.rows] == [("imagenet-a", "plain"), ("imagenet-a", "robust")]
    (part,) = both[0].shifts["imagenet-a"].parts
    assert table.cells[0][2].text == percent(part.accuracy)
    assert table.rows[0]["aurra_low"] == part.intervals["aurra"][0]


def test_reliability_lines_pass_through_the_bins_and_their_error_is_the_ece(both: list[Run]) -> None:
    diagrams = collect_diagrams(both)
    assert list(diagrams) == ["clean", "imagenet-a", "imagenet-c"]  # outside there is nothing to be right about
    above, below = draw_reliability(diagrams["imagenet-a"], "imagenet-a").axes
    for (_, bins), line in zip(diagrams["imagenet-a"], above.lines[1:], strict=True):
        np.testing.assert_array_equal(line.get_xdata(), [one["confidence"] for one in bins])
        np.testing.assert_array_equal(line.get_ydata(), [one["accuracy"] for one in bins])
    heights = [patch.get_xy()[1, 1] for patch in below.patches[: len(diagrams["imagenet-a"][0][1])]]
    assert sum(heights) == pytest.approx(1.0)
    (part,) = both[0].shifts["imagenet-a"].parts
    assert bin_error(diagrams["imagenet-a"][0][1]) == pytest.approx(part.calibration["ece"])


def test_detection_has_a_line_for_each_run_and_score(both: list[Run]) -> None:
    (table,) = detection(both)
    scores = ["max softmax", "max logit", "energy"]
    assert [(row["run"], row["score"]) for row in table.rows][:3] == [("plain", score) for score in scores]
    found = both[1].shifts["imagenet-o"].detection["energy"]
    assert table.rows[5]["fpr95"] == found["fpr95"]
    assert table.rows[5]["fpr95_high"] == found["intervals"]["fpr95"][1]


def test_every_figure_carries_its_numbers(both: list[Run]) -> None:
    heat, curve, *_ = shift(both)
    assert len(heat.rows) == 150
    assert {"run", "corruption", "severity", "accuracy", "low", "high", "n", "ece", "aurra"} == set(heat.rows[0])
    assert len(curve.rows) == 12
    (diagrams,) = reliability(both)
    assert len(diagrams.panels) == 3
    assert [key.text for key in diagrams.legend] == ["plain", "robust"]


def test_the_card_shows_the_mean_under_corruptions(both: list[Run], corrupted: ShiftReport) -> None:
    label, mean, interval = _figures(both[0])[2]
    assert (label, mean) == ("imagenet-c", percent(1 - corrupted.corruption["mean_error"]))
    low, high = (float(end) for end in interval.split(" to "))
    assert low <= 100 * (1 - corrupted.corruption["mean_error"]) <= high


def test_runs_without_shift_have_no_such_sections(both: list[Run]) -> None:
    bare = [dataclasses.replace(run, shifts={}) for run in both]
    assert [list(draw(bare)) for draw in (shift, reliability, detection)] == [[], [], []]


def test_the_page_shows_shift_and_says_what_is_missing(folders: list[Path], tmp_path: Path) -> None:
    damaged = folders[0] / "evaluation" / "shifts" / "imagenet-b"
    damaged.mkdir()
    (damaged / "report.json").write_text('{"name": ')
    page = read_page(write_page(folders, tmp_path / "page.html"))
    assert not page.errors
    assert {"shift", "reliability", "detection"} <= set(page.text)
    files = {"imagenet-c-accuracy.csv", "imagenet-c-severity.csv", "imagenet-c-mce.csv", "natural-shifts.csv"}
    assert files | {"reliability.csv", "imagenet-o-detection.csv"} <= set(page.downloads())
    assert "imagenet-a: not there: n01440764." in page.text["remarks"]
    assert "evaluation/shifts/imagenet-b/report.json is not the report of a shift" in page.text["remarks"]
    assert str(folders[0]) not in page.text["remarks"]


def test_corruptions_are_shown_under_shift_and_not_among_attacks(folders: list[Path], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=1, patch=4, images=1)
    path = run / "evaluation" / "report.json"
    report = json.loads(path.read_text())
    report["threats"].append({**report["threats"][0], "name": "fog", "spec": "fog(severity=3)", "severity": 3})
    path.write_text(json.dumps(report))
    assert [threat.name for threat in read_runs([run])[0].threats if "fog" in threat.name] == []
