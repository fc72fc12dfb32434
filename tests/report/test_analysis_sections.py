"""The sections about attention's inside, and their figures: what is drawn, what is told, what is left out."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_run import write_run
from html_page import read_page
from matplotlib.text import Text

import vitruvius
from vitruvius._style import encode_figure
from vitruvius.analysis import Table, analyse
from vitruvius.analysis.callback import AnalysisCallback
from vitruvius.analysis.norms import QUANTILES
from vitruvius.report import write_page
from vitruvius.report.analysis_figures import (
    Scale,
    alone,
    draw_bands,
    draw_curves,
    draw_heads,
    draw_histogram,
    draw_norms,
    draw_training,
    figures,
    save_figures,
)

ASKED = ("eigenvalues", "gammas", "value_vectors", "norms", "rollout", "effective_rank")


@pytest.fixture(scope="module")
def table() -> Table:
    """A tiny model on noise."""
    model = vitruvius.create_model("vitruvius/vit_digits", depth=3, num_heads=2, embed_dim=16)
    images = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return analyse(model, [images], *ASKED, null_images=4, facts={"model": "tiny", "data": "noise"})


def some(table: Table, *analyses: str) -> Table:
    """Of a table only some analyses: figures take their time."""
    rows = [row for row in table.rows if row.analysis in analyses]
    return Table(rows=rows, curves=table.curves, facts=table.facts)


def analysed(folder: Path, table: Table) -> Path:
    run = write_run(folder, epochs=1, patch=4, images=1)
    table.save(run / "analysis")
    return run


def test_the_page_shows_every_analysis_with_its_numbers_and_claims(table: Table, tmp_path: Path) -> None:
    run = analysed(tmp_path / "tiny", some(table, "value_vectors", "rollout"))
    page = read_page(write_page([run], tmp_path / "report.html"))
    assert not page.errors
    told = page.text["analyses"]
    for name in ("value_vectors", "rollout", "Values against kernel PCA's prediction", "Attention rollout"):
        assert name in told
    assert "6 images of noise, seed 0" in told
    assert "heads beyond chance" in told
    rows = page.downloads()["analysis-value-vectors.csv"]
    assert {"gaussian", "spectrum", "permuted"} == {row["null"] for row in rows}
    first = next(row for row in rows if row["statistic"] == "matched_cosine" and row["null"] == "permuted")
    own = table.select(site=first["site"], analysis="value_vectors", statistic="matched_cosine", null="permuted")
    assert float(first["mean"]) == pytest.approx(sum(row.mean for row in own) / 2, rel=1e-4)
    assert float(first["null_mean"]) == pytest.approx(sum(row.null_mean for row in own) / 2, rel=1e-4)


def test_two_runs_share_panels_and_a_damaged_table_is_told_not_shown(table: Table, tmp_path: Path) -> None:
    small = some(table, "norms")
    runs = [analysed(tmp_path / name, small) for name in ("one", "other", "damaged")]
    (runs[2] / "analysis" / "table.json").write_text("{")
    page = read_page(write_page(runs, tmp_path / "report.html"))
    assert not page.errors
    assert "Norms of queries and outputs by layer: other" in page.text["analyses"]
    assert "not a table of an analysis" in page.text["analyses"]


def test_a_folder_of_a_model_without_a_run_can_be_reported(table: Table, tmp_path: Path) -> None:
    some(table, "effective_rank").save(tmp_path / "model")
    (tmp_path / "model" / "config.yaml").write_text("model: {name: tiny}\n")
    page = read_page(write_page([tmp_path / "model"], tmp_path / "report.html"))
    assert "effective_rank" in page.text["analyses"]


def test_runs_without_analyses_have_no_such_section(run: Path, tmp_path: Path) -> None:
    page = read_page(write_page([run], tmp_path / "report.html"))
    assert "analyses" not in page.text
    assert "analyses_training" not in page.text


def test_every_figure_is_saved_as_png_and_pdf_without_a_complaint(table: Table, tmp_path: Path) -> None:
    small = some(table, "eigenvalues", "rollout")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files = save_figures(small, tmp_path)
    names = {file.name for file in files}
    assert {"eigenvalues-max.png", "eigenvalues-max.pdf", "eigenvalues-spectrum.png", "rollout-map.pdf"} <= names
    assert all(file.stat().st_size > 1000 for file in files)


def test_the_gallery_is_whole_and_no_text_of_a_figure_is_cut_off(table: Table) -> None:
    """Titles, labels and ticks lie inside the figure, colour bars too; also where a heading is long."""
    names = set()
    for name, figure in figures(table):
        names.add(name)
        encode_figure(figure, "png")
        figure.draw_without_rendering()
        width, height = figure.get_size_inches() * figure.dpi
        for text in figure.findobj(Text):
            if text.get_visible() and text.get_text().strip() and text.axes is not None and text.axes.axison:
                box = text.get_window_extent()
                assert -2 <= box.x0 <= box.x1 <= width + 2, (name, text.get_text())
                assert -2 <= box.y0 <= box.y1 <= height + 2, (name, text.get_text())
    assert {"value_vectors-matched_cosine", "eigenvalues-spectrum", "gammas-relative_by_column"} <= names
    assert {"value_vectors-histogram-matched_cosine", "value_vectors-heads-linear_cka", "rollout-map"} <= names


def test_figures_do_not_vanish_when_an_analysis_has_settings(table: Table) -> None:
    gammas = some(table, "gammas", "rollout")
    named = {"gammas": "gammas:variant=released", "rollout": "rollout:residual=0.4"}
    renamed = replace(
        gammas,
        rows=[replace(row, analysis=named[row.analysis]) for row in gammas.rows if row.analysis in named],
        curves=[replace(one, analysis=named[one.analysis]) for one in gammas.curves if one.analysis in named],
    )
    names = {name for name, _ in figures(renamed)}
    assert {"gammas-variant-released-relative_by_column", "gammas-variant-released-absolute_by_column"} <= names
    assert "rollout-residual-0.4-map" in names


def test_both_norms_are_drawn_together_with_the_spread_of_their_tokens(table: Table) -> None:
    (axes,) = draw_norms(table).axes
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["‖φ(q)‖²", "‖φ(q)‖², chance", "‖h‖²", "‖h‖², chance"]
    curve = next(c for c in table.curves if c.statistic == "log10_h2_quantiles" and c.site == "blocks.1.attn")
    assert axes.lines[2].get_ydata()[1] == pytest.approx(float(curve.mean[:, QUANTILES.index(0.5)].mean()), rel=1e-5)
    assert len(axes.collections) == 4  # half of the tokens, and 90 % of them, of both
    names = [name for name, _ in figures(some(table, "norms"))]
    assert {"norms-joint", "norms-error", "norms-relative_to_h", "norms-relative_to_phi"} <= set(names)


def test_bands_draw_the_mean_over_heads_their_range_and_the_nulls_that_tell(table: Table) -> None:
    (axes,) = draw_bands(alone(table), "effective_rank", "keys").axes
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["observed", "gaussian"]  # the others keep the rank by construction
    rows = table.select(analysis="effective_rank", statistic="keys", null="gaussian", site="blocks.1.attn")
    assert axes.lines[0].get_ydata()[1] == pytest.approx(sum(row.mean for row in rows) / 2)
    assert axes.lines[1].get_ydata()[1] == pytest.approx(sum(row.null_mean for row in rows) / 2)
    assert len(axes.collections) == 1


def test_spectra_are_drawn_in_the_order_of_layers_after_loading(table: Table, tmp_path: Path) -> None:
    table.save(tmp_path)
    for own in (table, Table.load(tmp_path)):
        (axes,) = draw_curves(own, "eigenvalues", "spectrum", xlabel="rank").axes
        last = next(line for line in axes.lines if line.get_label() == "layer 2")
        curve = next(c for c in table.curves if c.site == "blocks.2.attn" and c.statistic == "spectrum" and not c.null)
        drawn = Scale.of([1.0, 1e-9] if min(last.get_ydata()) < 0 else [1.0])(curve.mean.mean(0).tolist())
        assert list(last.get_ydata()) == pytest.approx(drawn, rel=1e-4, nan_ok=True)


def test_histograms_and_heat_maps_count_every_head(table: Table) -> None:
    (axes,) = draw_histogram(alone(table), "value_vectors", "linear_cka").axes
    assert sum(patch.get_height() for patch in axes.patches) == 3 * 2
    assert all(sum(line.get_ydata()) == 3 * 2 for line in axes.lines)
    panels = [axes for axes in draw_heads(table, "value_vectors", "linear_cka").axes if axes.images]
    assert [axes.images[0].get_array().shape for axes in panels] == [(3, 2), (3, 2)]
    assert panels[0].images[0].get_clim() == panels[1].images[0].get_clim()


def test_powers_of_ten_reach_as_far_as_float64() -> None:
    scale = Scale.of([1e-300, 1.0, 1e300])
    assert scale.powers
    assert scale([1e-300, 0.0, 1e300])[0::2] == pytest.approx([-300, 300])
    assert not Scale.of([1.0, 5.0]).powers
    assert not Scale.of([-1.0, 500.0]).powers


def test_curves_over_training_are_on_the_page(run: Path, tmp_path: Path) -> None:
    model = vitruvius.create_model("vitruvius/vit_digits", depth=1)
    batches = {name: torch.rand(2, 3, 8, 8) for name in ("train", "validation")}
    callback = AnalysisCallback(["reconstruction:variant=reproduction"], batches, folder=run)
    rows = [row for epoch in range(3) for row in callback.epoch_end(epoch, model)]
    page = read_page(write_page([run], tmp_path / "report.html"))
    assert not page.errors
    assert "Reconstruction error (variant reproduction)" in page.text["analyses_training"]
    name = next(name for name in page.downloads() if name.startswith("training-0-reconstruction"))
    assert len(page.downloads()[name]) == len(rows) == 3 * 2 * 6
    figure = draw_training(rows, "reconstruction:variant=reproduction", ["error", "h2"])
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == ["error, train", "error, validation", "‖h‖², train", "‖h‖², validation"]
