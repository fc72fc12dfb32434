"""What the sections compute, against slow loops and limits; and what their figures say."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from fake_run import write_run

from vitruvius._format import DASH, count, format_duration, interval, number, percent
from vitruvius._style import HEAT, legend_below, new_axes
from vitruvius.analysis import analyses
from vitruvius.report.analysis_figures import HEADINGS, axis_label, heading
from vitruvius.report.run import Run, Threat, label_threats, read_runs
from vitruvius.report.sections.curves import curves, draw_metrics, group_metrics, line_styles
from vitruvius.report.sections.maps import draw_maps, shade, shrink
from vitruvius.report.sections.summary import _figures, compare, flatten, model, summary
from vitruvius.report.sections.threats import _ticks, collect_strengths, draw_strengths, draw_threats, threats
from vitruvius.report.sections.viewer import encode


@pytest.fixture(scope="module")
def two(runs: list[Path]) -> list[Run]:
    return read_runs(runs)


def threat(name: str, eps: float | None = None, accuracy: float = 0.5, spec: str | None = None) -> Threat:
    none = dict.fromkeys(("low", "high", "n", "top5", "loss", "seconds"))
    return Threat(name=name, spec=spec or name, eps=eps, accuracy=accuracy, **none)


def test_metrics_are_grouped_into_panels(two: list[Run]) -> None:
    panels = group_metrics(two)
    assert panels == {
        "loss": ["val_loss", "train_loss"],
        "accuracy": ["val_accuracy", "train_accuracy", "ema_accuracy"],
        "learning rate": ["lr"],
    }
    lines = line_styles(panels)
    assert list(lines) == ["val", "train", "ema"]
    assert len(set(map(str, lines.values()))) == 3


def test_an_unknown_metric_gets_a_panel_of_its_own(two: list[Run]) -> None:
    row = {"epoch": 0, "reconstruction": 0.1, "note": "words", "bad": float("nan")}
    run = dataclasses.replace(two[0], epochs=[row])
    assert group_metrics([run]) == {"reconstruction": ["reconstruction"]}


def test_what_is_right_under_attack_has_a_panel_of_its_own_and_alarms_are_drawn_if_there_were_any(
    two: list[Run],
) -> None:
    row = {"epoch": 0, "val_accuracy": 0.9, "val_robust_accuracy": 0.5, "single_step_accuracy": 0.6, "train_eps": 0.1}
    quiet = dataclasses.replace(two[0], epochs=[{**row, "alarms": 0, "rollbacks": 0}])
    expected = {
        "accuracy": ["val_accuracy"],
        "accuracy under attack": ["val_robust_accuracy", "single_step_accuracy"],
        "ε of training": ["train_eps"],
    }
    assert group_metrics([quiet]) == expected
    alarmed = dataclasses.replace(two[0], epochs=[{**row, "alarms": 1, "rollbacks": 0}])
    assert group_metrics([alarmed]) == {**expected, "alarms": ["alarms"]}


def test_curves_pass_through_every_logged_value_and_stop_at_nan(two: list[Run]) -> None:
    rows = [{"epoch": e, "val_loss": v} for e, v in enumerate((3.0, float("nan"), 1.0))] + [{"epoch": 3}]
    run = dataclasses.replace(two[0], epochs=rows)
    (line,) = draw_metrics([run], "loss", ["val_loss"], {}).axes[0].lines
    np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3])
    np.testing.assert_array_equal(line.get_ydata(), [3.0, np.nan, 1.0])


def test_dots_of_threats_stand_at_their_accuracies_with_their_intervals(two: list[Run]) -> None:
    axes = draw_threats(two).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["clean", "pgd ε = 2/255"]
    dots = [(one.lines[0].get_xdata()[0], one.lines[2][0].get_segments()[0]) for one in axes.containers]
    expected = [run.threats[place] for place in range(7) for run in two]
    for (x, bar), one in zip(dots, expected, strict=True):
        assert x == one.accuracy
        np.testing.assert_allclose(bar[:, 0], [one.low, one.high])


def test_an_interval_that_ends_at_zero_is_drawn_to_zero(two: list[Run]) -> None:
    one = dataclasses.replace(threat("pgd", 0.1, 0.02), low=0.0, high=0.1)
    (container,) = draw_threats([dataclasses.replace(two[0], threats=[one])]).axes[0].containers
    np.testing.assert_allclose(container.lines[2][0].get_segments()[0][:, 0], [0.0, 0.1])


def test_strengths_of_one_attack_make_a_curve_from_clean_onwards(two: list[Run]) -> None:
    ((name, curves),) = collect_strengths(two).items()
    assert name == "pgd(steps=10)", "fgsm was run at one strength only"
    for run, points in zip(two, curves.values(), strict=True):
        assert [eps for eps, _ in points] == [0.0, *(steps / 255 for steps in (2, 4, 8, 16, 32))]
        assert points[0][1] is run.clean
    lines = draw_strengths(two, "pgd", curves).axes[0].lines
    np.testing.assert_array_equal(lines[1].get_ydata(), [t.accuracy for t in (two[1].threats[:6])])


def test_attacks_that_differ_in_more_than_strength_are_different_curves() -> None:
    specs = [
        "pgd(eps=4/255, steps=10)",
        "pgd(steps=10, eps=8/255)",
        "pgd(eps=4/255, steps=20)",
        "fgsm(eps=0.1)",
        "clean",
    ]
    found = [threat("x", 0.1, spec=spec).family for spec in specs]
    assert found == ["pgd(steps=10)", "pgd(steps=10)", "pgd(steps=20)", "fgsm", "clean"]


def test_labels_of_threats_are_short_and_all_different(two: list[Run]) -> None:
    threats = [threat("clean"), threat("pgd", 4 / 255, spec="pgd(eps=4/255)"), threat("fab")]
    threats += [threat("pgd(eps=4/255, steps=20)", 4 / 255), threat("pgd(eps=8/255)", 8 / 255)]
    labels = label_threats([dataclasses.replace(two[0], threats=threats)])
    assert list(labels.values()) == ["clean", "pgd(eps=4/255)", "fab", "pgd(eps=4/255, steps=20)", "pgd ε = 8/255"]


def test_labels_of_strengths_do_not_run_into_each_other() -> None:
    assert _ticks([0.0, 0.001, 0.01, 0.02, 0.03]) == [0.0, 0.01, 0.02, 0.03]
    assert _ticks([0.05]) == [0.05]


def test_the_card_shows_clean_and_worst_case_else_the_last_validation(two: list[Run]) -> None:
    run = two[0]
    assert [label for label, _, _ in _figures(run)] == ["clean", "worst case"]
    only_clean = dataclasses.replace(run, threats=run.threats[:1])
    assert [label for label, _, _ in _figures(only_clean)] == ["clean"]
    no_worst = dataclasses.replace(run, worst_case=None)
    assert _figures(no_worst)[1][1] == percent(min(t.accuracy for t in run.threats))
    unevaluated = dataclasses.replace(run, threats=[], worst_case=None)
    assert _figures(unevaluated) == [("held-out", percent(run.epochs[-1]["val_accuracy"]), "")]


def test_a_run_without_attacks_has_no_worst_case_beside_one_that_was_attacked(two: list[Run]) -> None:
    unattacked = dataclasses.replace(two[0], threats=two[0].threats[:1], worst_case=two[0].threats[0])
    drawing, table = threats([unattacked, two[1]])
    label, *worst = table.cells[-1]
    assert label.text == "worst case"
    assert [cell.text for cell in worst] == ["–", percent(two[1].worst_case.accuracy)]
    assert [row["name"] for row in drawing.rows if row["run"] == unattacked.name] == ["clean"]


def test_a_doubtful_figure_is_never_shown_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "masked")
    file = folder / "evaluation" / "report.json"
    said = json.loads(file.read_text())
    name = said["threats"][-1]["name"]
    for entry in (said["threats"][-1], said["worst_case"]):
        entry["doubts"] = ["probabilities"]
    said["remarks"] = ["doubtful figure: probabilities: no logits."]
    file.write_text(json.dumps(said))
    runs = read_runs([folder])
    drawing, table = threats(runs)
    assert f"masked under {name} (probabilities)" in drawing.caption
    assert all("doubtful: probabilities" in row[1].detail for row in table.cells[-2:])
    assert [row["doubts"] for row in drawing.rows[-2:]] == ["probabilities", "probabilities"]
    card = summary(runs)[0]
    assert "doubtful: probabilities" in card.cards[0].figures[1][2]
    assert runs[0].remarks[0] == "evaluation: doubtful figure: probabilities: no logits."


def test_shrunk_maps_are_means_over_blocks_of_neighbours() -> None:
    maps = {"a": np.random.default_rng(0).random((2, 12, 20)).astype(np.float32)}
    small, side = shrink(maps, 2 * 10 * 10)
    assert side == 10
    assert small["a"].shape == (2, 10, 10)
    rows, columns = (np.linspace(0, n, 11).round().astype(int) for n in (12, 20))
    for i in range(10):
        for j in range(10):
            block = maps["a"][:, rows[i] : rows[i + 1], columns[j] : columns[j + 1]]
            np.testing.assert_allclose(small["a"][:, i, j], block.mean((1, 2)), rtol=1e-5)
    assert shrink(maps, 2 * 12 * 20) == (maps, None), "what fits is left as it is"


def test_bytes_of_the_viewer_give_attention_back_within_half_a_level() -> None:
    maps = np.random.default_rng(2).dirichlet(np.ones(17), (1, 2, 17))
    levels = np.frombuffer(base64.b64decode(encode(maps)), np.uint8).reshape(maps.shape)
    np.testing.assert_allclose(levels / 255, np.sqrt(maps), atol=0.5 / 255 + 1e-6)


def test_two_runs_are_compared_by_what_differs(two: list[Run]) -> None:
    differing = compare(two)
    assert differing["seed"] == ["0", "1"]
    assert differing["attention.0.parts.0.use"] == [DASH, "low_rank"]
    assert not any(key.startswith(("versions", "train", "model")) for key in differing)
    judged = dataclasses.replace(two[0], config={"seed": 7})  # by `evaluate MODEL`: nothing was trained
    assert compare([judged, two[0]]) == {"seed": ["7", "0"]}


def test_nested_tables_become_dotted_keys() -> None:
    table = {"a": {"b": 1, "c": [1, 2]}, "d": [{"e": None}], "f": [], "g": {}}
    assert flatten(table) == {"a.b": "1", "a.c": "[1, 2]", "d.0.e": "None"}


def test_the_cost_table_counts_parameters_of_cores(two: list[Run]) -> None:
    table = model(two)[0]
    assert [row["core_parameters"] for row in table.rows] == [0, 4 * 2 * 3]
    assert [row["attention"] for row in table.rows] == [
        "upstream",
        "blocks.*.attn: low_rank(rank=2, tensors=qk) → softmax",
    ]
    assert threats(two[:1])[0].legend == [], "a single run needs none"
    assert table.rows[0]["seconds"] == pytest.approx(sum(row["seconds"] for row in two[0].epochs))


def test_maps_can_be_drawn_as_a_figure_to_save(two: list[Run]) -> None:
    figure = draw_maps(two[0].maps)
    assert len(figure.axes) == 12
    shown = figure.axes[4].images[0].get_array()
    heads = two[0].maps["blocks.1.attn"]
    np.testing.assert_allclose(shown, np.sqrt(heads[1] / max(heads[1].max(), 4 / 65)), rtol=1e-5)


def test_even_attention_is_shown_in_the_middle_and_a_peak_at_the_top() -> None:
    np.testing.assert_allclose(shade(np.full((5, 8), 1 / 8), 8), 0.5)
    np.testing.assert_allclose(shade(np.eye(8), 8), np.eye(8))
    script = (Path(__file__).parents[2] / "src/vitruvius/report/viewer.js").read_text()
    assert sum(colour in script for colour in HEAT) >= 3, "the viewer and the maps share their colours"


def test_numbers_are_written_for_readers() -> None:
    assert [number(value) for value in (1, 0.5, True, None, "1", float("nan"), float("inf"))] == [1, 0.5, *[None] * 5]
    assert [percent(0.97251), percent(None)] == ["97.3 %", DASH]
    assert [interval(0.951, 0.987), interval(None, 1.0)] == ["95.1 to 98.7", ""]
    assert [count(1234567), count(0), count(None)] == ["1\u202f234\u202f567", "0", DASH]
    assert format_duration(None) == DASH


def test_headings_tell_settings_and_axes_have_units() -> None:
    assert heading("norms:variant=released,seed=1") == "Norms of queries and outputs (variant released, seed 1)"
    assert set(analyses) <= set(HEADINGS), "write its heading into analysis_figures.py"
    assert heading("my_own") == "My own"
    assert axis_label("entropy", "nats") == "entropy (nats)"
    assert axis_label("gammas:variant=released", "alignment_by_column") == "|cos(K a, a)|"
    assert axis_label("my_own", "some_number") == "some number"


def test_axes_are_labelled_and_tables_count_epochs_from_one(two: list[Run]) -> None:
    assert draw_metrics(two[:1], "loss", ["train_loss"], {}).axes[0].get_ylabel() == "loss"
    assert [row["epoch"] for row in curves(two[:1])[0].rows][:3] == [1, 2, 3]
    assert draw_threats(two).axes[0].get_xlabel() == "accuracy"
    axes = draw_strengths(two, *next(iter(collect_strengths(two).items()))).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("ε (of pixels from 0 to 1)", "accuracy")


def test_a_legend_lies_outside_the_axes_and_names_each_line_once() -> None:
    figure, axes = new_axes()
    for _ in range(2):
        axes.plot([0, 1], [0, 1], label="line")
    legend_below(figure)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["line"]
    figure.canvas.draw()
    assert not axes.get_window_extent().overlaps(legend.get_window_extent())
