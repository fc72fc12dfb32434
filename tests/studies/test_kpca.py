"""`study kpca`: the reproduction study's tables and figures for several models, chance beside every number."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from small_run import small_run
from vitruvius._errors import DataError
from vitruvius._progress import Bar
from vitruvius.analysis import Table
from vitruvius.analysis.base import NULLS
from vitruvius.analysis.callback import read_rows
from vitruvius.studies import kpca, study
from vitruvius.studies._base import folder_of
from vitruvius.studies.kpca import ANALYSES, draw_reconstruction, published_curves, recorded_curves

FEW = {"images": 3}
STATISTICS = ("error", "h", "varphi", "rel_error_wrt_h", "rel_error_wrt_varphi")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has looked at reconstruction after both of its epochs."""
    wanted = ("analyses=[reconstruction:variant=reproduction]", "train.analyse_images=4")
    return small_run(tmp_path_factory.mktemp("kpca") / "run", *wanted)


@pytest.fixture(scope="module")
def other(run: Path) -> Path:
    return Path(shutil.copytree(run, run.parent / "other"))


@pytest.fixture(scope="module", autouse=True)
def _few_figures() -> Iterator[None]:
    """The thirty figures of a model, which take a while, are not saved here."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(kpca, "save_figures", lambda table, folder: (folder / "figures").mkdir(exist_ok=True))
    yield
    monkeypatch.undo()


@pytest.fixture(scope="module")
def studied(run: Path, other: Path, shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study")
    study("kpca", [str(run), str(other)], {**FEW, "shipped": str(shipped)}, out)
    return out


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files in the layout of the study's folder wandb_data: one row per epoch, steps that do not tell epochs."""
    folder = tmp_path_factory.mktemp("wandb_data")
    for model in ("deit", "vit"):
        (folder / f"{model}_tiny").mkdir()
        for batch in ("train", "test"):
            for statistic in STATISTICS:
                name = f"{model} - {batch}_{statistic}"
                text = f'"Step","{name}","{name}__MIN","{name}__MAX"\n"14","4.9","4.9","4.9"\n"29","2.5","2.5","2.5"\n'
                (folder / f"{model}_tiny" / f"{model}_{batch}_{statistic}.csv").write_text(text)
    return folder


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_every_statistic_of_every_model_has_its_chance_beside_it(studied: Path, run: Path, other: Path) -> None:
    rows = read(studied / "table.csv")
    assert {row["model"] for row in rows} == {str(run), str(other)}
    assert {row["analysis"] for row in rows} == set(ANALYSES)
    for row in rows:
        assert all(row[f"chance_{null}"] for null in NULLS), row
    table = Table.load(folder_of(studied, str(other)))
    row = next(row for row in rows if row["model"] == str(other) and row["statistic"] == "matched_cosine")
    numbers = table.select(analysis="value_vectors", statistic="matched_cosine", null="gaussian")
    assert float(row["mean"]) == pytest.approx(sum(one.mean for one in numbers) / len(numbers))
    assert float(row["chance_gaussian"]) == pytest.approx(sum(one.null_mean or 0 for one in numbers) / len(numbers))
    assert int(row["heads"]) == len(numbers)


def test_the_bar_is_told_how_many_images_there_are(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    totals: set[int | None] = set()
    monkeypatch.setattr(Bar, "__call__", lambda self, done, total, *words, **numbers: totals.add(total))
    study("kpca", [str(run)], {**FEW, "analyses": ("norms",)}, tmp_path)
    assert totals == {3}


def test_layers_and_heads_and_the_figures_of_each_model_are_kept(studied: Path, run: Path) -> None:
    layers = read(studied / "layers.csv")
    assert {row["null"] for row in layers} == set(NULLS)
    assert {row["site"] for row in layers if row["model"] == str(run)} == {"blocks.0.attn", "model"}
    for name in ("figure", "norms", "reconstruction"):
        assert (studied / f"{name}.png").stat().st_size > 5000
    assert (folder_of(studied, str(run)) / "figures").is_dir()


def test_no_label_of_a_figure_covers_another_or_is_cut_off(studied: Path) -> None:
    name = "a_model_with_a_rather_long_name_224"
    recorded = map(json.loads, (studied / "rows.jsonl").read_text().splitlines())
    rows = [{**row, "model": name} for row in recorded if "other" in row["model"]]
    figure = kpca.draw(rows)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for axes in figure.axes:
        ticks = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
        shown = [box for box in ticks if axes.bbox.x0 <= (box.x0 + box.x1) / 2 <= axes.bbox.x1]
        assert all(one.x1 < other.x0 for one, other in pairwise(shown))
        assert axes.title.get_window_extent().x1 <= figure.bbox.x1
    (legend,) = figure.legends
    assert legend.get_window_extent().x0 >= 0
    assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_two_ways_to_look_at_reconstruction_are_two_curves_over_epochs_from_1(tmp_path: Path) -> None:
    analyses = "analyses=[reconstruction, 'reconstruction:variant=reproduction']"
    run = small_run(tmp_path / "both", analyses, "train.analyse_images=4")
    lines = [line for line in recorded_curves([str(run)]) if (line.statistic, line.batch) == ("error", "validation")]
    assert [line.model for line in lines] == ["both", "both, variant=reproduction"]
    assert all(line.epochs == [1, 2] for line in lines)


def test_published_curves_are_drawn_beside_those_of_the_run(run: Path, shipped: Path) -> None:
    lines = [*recorded_curves([str(run)]), *published_curves(str(shipped))]
    axes = draw_reconstruction(lines).axes[0]
    drawn = {str(line.get_label()): line.get_ydata() for line in axes.lines}
    ours = [row["mean"] for row in read_rows(run) if (row["statistic"], row["batch"]) == ("error", "validation")]
    assert list(drawn["run, variant=reproduction, validation"]) == pytest.approx(ours)
    assert list(drawn["deit, published, train"]) == [4.9, 2.5]
    assert len(drawn) == 6


def test_a_killed_study_goes_on_with_the_tables_it_has(studied: Path, run: Path, other: Path, shipped: Path) -> None:
    whole = (studied / "table.csv").read_text()
    lines = (studied / "rows.jsonl").read_text().splitlines()
    (studied / "rows.jsonl").write_text("\n".join(lines[: len(lines) // 4]) + "\n")
    (studied / "table.csv").unlink()
    study("kpca", [str(run), str(other)], {**FEW, "shipped": str(shipped)}, studied)
    assert (studied / "table.csv").read_text() == whole


def test_a_folder_without_curves_is_refused_before_anything_is_analysed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="holds no curves of the reproduction study; expected files such as deit_train"):
        study("kpca", [str(run)], {**FEW, "shipped": str(tmp_path)}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
