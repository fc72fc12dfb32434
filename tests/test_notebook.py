"""What a notebook shows: every result in one line of text, as HTML, as a picture, a frame and a CSV file."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from matplotlib.axes import Axes

import vitruvius
from vitruvius._errors import MissingExtra, UnknownName
from vitruvius._notebook import MOST_ROWS, as_html, draw_tiles, to_csv
from vitruvius._style import new_axes, outlier_proof
from vitruvius.surgery.recording import map_of


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return vitruvius.rewire(vitruvius.create_model("vitruvius/vit_digits", depth=2).eval(), "rpc:iterations=2")


@pytest.fixture(scope="module")
def results(model: Any) -> dict[str, Any]:
    """One object of each kind that shows itself."""
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.rand(4, 3, 8, 8, generator=generator), torch.arange(4)
    with torch.no_grad(), vitruvius.record(model) as seen:
        model(images)
    threats = ["uniform_noise:eps=8/255", "gaussian_noise:severity=2"]
    return {
        "report": vitruvius.evaluate(model, [(images, labels)], threats),
        "table": vitruvius.analyse(model, [images], "entropy", "distance", "rollout"),
        "record": seen,
        "heads": seen["blocks.1.attn"],
    }


@pytest.mark.parametrize("kind", ["report", "table", "record", "heads"])
def test_a_result_shows_itself(results: dict[str, Any], kind: str, tmp_path: Path) -> None:
    result = results[kind]
    assert len(repr(result)) < 400
    assert "\n" not in repr(result)
    markup = result._repr_html_()
    assert "<table>" in markup
    assert len(markup) < 20_000
    assert "prefers-color-scheme:dark" in markup
    assert isinstance(result.plot(), Axes)
    figure, axes = new_axes()
    assert result.plot(axes) is axes
    figure.savefig(tmp_path / "figure.png")
    text = result.to_csv(tmp_path / "numbers.csv")
    assert (tmp_path / "numbers.csv").read_text() == text
    assert len(list(csv.DictReader(text.splitlines()))) >= 2


def test_a_report_shows_the_numbers_it_prints(results: dict[str, Any]) -> None:
    report = results["report"]
    markup = report._repr_html_()
    for score in report.threats:
        assert f"{score.accuracy:.2%}" in markup or score.severity is not None
    rows = list(csv.DictReader(report.to_csv().splitlines()))
    assert [float(row["accuracy"]) for row in rows[:-1]] == [score.accuracy for score in report.threats]
    assert rows[-1]["name"] == "worst case"


def test_a_table_draws_the_statistic_that_is_asked_for(results: dict[str, Any]) -> None:
    table = results["table"]
    axes = table.plot(analysis="distance", statistic="neighbours")
    observed = next(line for line in axes.lines if line.get_label() == "observed")
    heads = [row.mean for row in table.select(site="blocks.1.attn", statistic="neighbours", null="gaussian")]
    assert observed.get_ydata()[1] == pytest.approx(np.mean(heads))
    with pytest.raises(UnknownName, match="neighbours"):
        table.plot(analysis="distance", statistic="neighbors")


def test_a_recording_maps_what_its_core_really_does(model: Any, results: dict[str, Any]) -> None:
    seen = results["record"]
    site = "blocks.1.attn"
    torch.testing.assert_close(seen.map(site), map_of(model, site, seen[site]))
    assert not torch.allclose(seen.map(site), seen[site].weights())
    picture = seen.plot(image=2).images[0].get_array()
    tile = seen.map("blocks.0.attn")[2].mean(0).numpy()
    shown = picture[-tile.shape[0] :, : tile.shape[1]]
    np.testing.assert_allclose(shown, tile / outlier_proof(tile), rtol=1e-5)


def test_a_frame_holds_every_number(results: dict[str, Any]) -> None:
    pytest.importorskip("pandas")
    for result in results.values():
        frame = result.to_frame()
        assert list(frame.columns) == next(csv.reader(result.to_csv().splitlines()))
        assert len(frame) == len(list(csv.reader(result.to_csv().splitlines()))) - 1


def test_without_pandas_it_says_what_to_install(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match="notebook"):
        results["report"].to_frame()


def test_one_outlier_bleaches_nothing_and_few_values_keep_their_maximum() -> None:
    values = np.linspace(0, 1, 196)
    assert outlier_proof(np.append(values, 1000.0)) < 1
    assert outlier_proof(np.array([0.0, 5.0])) == 5
    _, axes = new_axes()
    draw_tiles(axes, [values.reshape(14, 14)] * 3, ["a", "b", "c"], across=2)
    assert [text.get_text() for text in axes.texts] == ["a", "b", "c"]


def test_markup_is_escaped_and_long_tables_are_cut() -> None:
    rows = [{"<b>": place, "none": None} for place in range(MOST_ROWS + 3)]
    markup = as_html("<script>", {"a & b": rows})
    assert "<script>" not in markup
    assert "&lt;b&gt;" in markup
    assert "a &amp; b" in markup
    assert "and 3 more rows" in markup
    assert to_csv(rows).count("\n") == MOST_ROWS + 4


def test_a_rewired_model_is_a_line_in_a_notebook(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "2 × rpc" in model._repr_html_()
    shown: dict[type, Any] = {}
    shell = SimpleNamespace(
        display_formatter=SimpleNamespace(formatters={"text/html": SimpleNamespace(for_type=shown.__setitem__)})
    )
    ipython = ModuleType("IPython")
    monkeypatch.setattr(ipython, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    bare = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    text = repr(bare)
    rewired = vitruvius.rewire(bare, "rpc")
    assert "1 × rpc" in shown[type(bare)](rewired)
    vitruvius.restore(rewired)
    assert repr(rewired) == text
