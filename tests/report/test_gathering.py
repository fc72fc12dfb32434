"""Pages of sweeps and studies: a table, a figure, and what differs between their runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from fake_run import write_run

from vitruvius._errors import RunError
from vitruvius._style import save_figure
from vitruvius.cli import main
from vitruvius.report import write_page
from vitruvius.report.page import draw_sweep, gathered_parts, runs_in, study_blocks, sweep_blocks
from vitruvius.report.run import read_runs


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three runs of different rates, one of them failed, and one that has not begun."""
    folder = tmp_path / "rates"
    folder.mkdir()
    notes = {}
    for place, rate in enumerate((0.001, 0.002, 0.004)):
        run = write_run(folder / f"lr-{rate}", epochs=3, patch=2, images=1, seed=place)
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["train"]["lr"] = rate
        config["seed"] = 0
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        notes[run.name] = {"status": "finished", "settings": {"train.lr": rate}}
    notes["lr-0.004"]["status"] = "failed: the loss is not finite"
    notes["lr-0.008"] = {"status": "waiting"}
    (folder / "sweep.json").write_text(json.dumps(notes))
    return folder


@pytest.fixture
def study(tmp_path: Path, sweep: Path) -> Path:
    """A study about one of these runs and about a model by name."""
    folder = tmp_path / "eps-sweep"
    folder.mkdir()
    (folder / "study.json").write_text(json.dumps({"study": "eps-sweep", "settings": {"steps": 20}}))
    (folder / "subjects.json").write_text(json.dumps({str(sweep / "lr-0.001"): {}, "deit_tiny_patch16_224": {}}))
    (folder / "table.csv").write_text("model,eps,accuracy\nlr-0.001,0.00392156862745098,0.5\ndeit,0.0078,\n")
    save_figure(draw_sweep(read_runs(runs_in([sweep]))), folder / "figure")
    return folder


def test_a_sweep_has_a_figure_and_a_table_of_what_differs_best_first(sweep: Path) -> None:
    drawing, table, *notes = sweep_blocks(sweep, read_runs(runs_in([sweep])), "rates")
    assert drawing.panels
    assert list(table.titles[:3]) == ["run", "train.lr", "best"], "seed and all the rest are the same"
    best = [row["best"] for row in table.rows]
    assert best == sorted(best, reverse=True)
    assert all(row["run"] == f"lr-{row['train.lr']}" for row in table.rows)
    assert {row["run"]: row["status"] for row in table.rows}["lr-0.004"] == "failed"
    said = [note.text for note in notes]
    assert said == ["Without a folder: lr-0.008.", "lr-0.004: failed: the loss is not finite"]


def test_runs_that_differ_in_attention_say_it_in_words(tmp_path: Path) -> None:
    write_run(tmp_path / "plain", epochs=1, patch=2, images=1)
    parts = [{"use": "low_rank", "rank": 2}, {"use": "softmax"}]
    write_run(tmp_path / "rank", epochs=1, patch=2, images=1, parts=parts)
    (tmp_path / "sweep.json").write_text("{}")
    _, table = sweep_blocks(tmp_path, read_runs(runs_in([tmp_path])), "sweep")
    told = {row["run"]: row["attention"] for row in table.rows}
    assert told == {"plain": "as upstream", "rank": "low_rank(rank=2) → softmax"}


def test_a_sweep_that_has_not_begun_says_so(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(RunError, match="none of whose runs"):
        write_page([tmp_path], tmp_path / "page.html")


def test_a_study_has_its_settings_figure_and_table(study: Path) -> None:
    settings, figure, table = study_blocks(study, "study")
    assert settings.text == "Study eps-sweep; settings: steps 20."
    assert "data:image/png" in figure.markup
    assert list(table.numeric) == ["eps", "accuracy"]
    assert [cell.text for cell in table.cells[0]] == ["lr-0.001", "0.003922", "0.5"]
    (study / "table.csv").unlink()
    assert study_blocks(study, "study")[-1].text.endswith("has no table.csv yet: the study has not ended.")


def test_a_page_of_models_by_name_alone_has_the_study_and_no_runs(study: Path) -> None:
    (study / "subjects.json").write_text(json.dumps({"deit_tiny_patch16_224": {}}))
    page = write_page([study], study / "page.html").read_text(encoding="utf-8")
    assert "Study: eps-sweep" in page
    assert 'id="summary"' not in page


def test_sweep_study_and_run_come_together_on_one_page(sweep: Path, study: Path) -> None:
    single = write_run(sweep.parent / "single", epochs=1, patch=2, images=1)
    folders = [sweep, study, single]
    runs = read_runs(runs_in(folders))
    assert [run.name for run in runs] == ["lr-0.001", "lr-0.002", "lr-0.004", "single"], "each once"
    assert [title for _, title, _ in gathered_parts(folders, runs)] == ["Sweep: rates", "Study: eps-sweep"]


def test_the_verb_takes_the_folder_of_a_sweep(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(sweep), "--out", str(sweep / "page.html")]) == 0
    assert "viewer" not in capsys.readouterr().err, "runs of a sweep get a viewer only if it is asked for"
    page = (sweep / "page.html").read_text(encoding="utf-8")
    assert page.index("Sweep: rates") < page.index('id="summary"')
