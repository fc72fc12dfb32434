"""Figures say what they show: headings in words, axes with units, legends beside the data, epochs from 1."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from fake_run import write_run
from matplotlib.figure import Figure

from vitruvius.analysis import analyses
from vitruvius.report._runs import read_runs
from vitruvius.report.sections.analyses_words import HEADINGS, axis_label, heading
from vitruvius.report.sections.curves import curves, draw_metrics
from vitruvius.report.sections.strengths import collect_strengths, draw_strengths
from vitruvius.report.sections.threats import draw_threats
from vitruvius.report.style import legend_below, new_axes


@pytest.fixture(autouse=True)
def _close_figures() -> None:
    plt.close("all")


def test_every_analysis_has_a_heading_in_words() -> None:
    assert set(analyses) <= set(HEADINGS), "write its heading into analyses_words.py"


def test_a_heading_tells_settings_and_falls_back_to_the_name() -> None:
    assert heading("entropy") == "Entropy of attention"
    assert heading("norms:variant=released,seed=1") == "Norms of queries and outputs (variant released, seed 1)"
    assert heading("my_own") == "My own"


def test_axes_have_units_where_there_are_some() -> None:
    assert axis_label("entropy", "nats") == "entropy (nats)"
    assert axis_label("distance", "patches") == "mean distance (patches)"
    assert axis_label("gammas:variant=released", "alignment_by_column") == "|cos(K a, a)|"
    assert axis_label("value_vectors", "principal_angle") == "mean principal angle (degrees)"
    assert axis_label("my_own", "some_number") == "some number"


def test_epochs_are_counted_from_one(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "run", epochs=4, patch=2, images=1)])
    figure = draw_metrics([run], "loss", ["train_loss"], {})
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 2, 3, 4]
    assert [row["epoch"] for row in curves([run])[0].rows] == [1, 2, 3, 4]


def test_a_remark_counts_epochs_from_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=2, patch=2, images=1)
    rows = [{"epoch": 0, "train_loss": 1.0}, {"epoch": 1, "train_loss": float("nan")}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (read,) = read_runs([run])
    assert any("1 of 2 epochs (first: 2)" in remark for remark in read.remarks)


def test_axes_of_accuracy_and_strength_are_labelled(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "run", epochs=1, patch=2, images=1)])
    assert draw_threats([run]).axes[0].get_xlabel() == "accuracy"
    name, points = next(iter(collect_strengths([run]).items()))
    axes = draw_strengths([run], name, points).axes[0]
    assert axes.get_ylabel() == "accuracy"
    assert axes.get_xlabel() == "ε (of pixels from 0 to 1)"
    assert draw_metrics([run], "loss", ["train_loss"], {}).axes[0].get_ylabel() == "loss"


def test_a_legend_lies_outside_the_axes_and_names_each_line_once() -> None:
    figure, axes = new_axes()
    for _ in range(2):
        axes.plot([0, 1], [0, 1], label="line")
    legend_below(figure)
    assert axes.get_legend() is None
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["line"]
    assert not overlaps(figure)


def overlaps(figure: Figure) -> bool:
    """Whether the legend of a figure lies over its axes."""
    figure.canvas.draw()
    return bool(figure.axes[0].get_window_extent().overlaps(figure.legends[0].get_window_extent()))
