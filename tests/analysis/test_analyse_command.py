"""`vitruvius analyse`: analyses and explanations of runs and of models by name, and what is left behind."""

from pathlib import Path

import pytest

from small_run import small_run
from vitruvius._yaml import read_yaml
from vitruvius.analysis import Table
from vitruvius.cli import main
from vitruvius.cli.look import analyse

MODEL = "vitruvius/vit_digits"
SMALL = ["model.kwargs={depth: 1}", "device=cpu", "data.dataset=digits"]


def test_a_model_by_name_is_analysed_and_its_folder_can_be_reported(tmp_path, capsys):
    out = tmp_path / "out"
    words = ["analyse", MODEL, "entropy", "relevance", *SMALL, "--images", "4", "--seed", "1", "--out", str(out)]
    assert main([*words, "--attack", "fgsm:eps=0.1"]) == 0
    table = Table.load(out)
    printed, _, paths = capsys.readouterr().out.partition("\n\nfigures, each as PNG and PDF:\n")
    assert printed.splitlines()[2:] == str(table).splitlines()[2:]
    drawn = sorted((out / "figures").glob("*.png"))
    assert sorted(map(Path, paths.splitlines())) == drawn != []
    assert all(path.with_suffix(".pdf").is_file() for path in drawn)
    assert table.facts["images"] == 4
    assert table.facts["model"] == MODEL
    assert "digits" in table.facts["data"]
    assert table.names("analysis") == ["entropy", "relevance"]
    assert len(table.pictures["relevance"].attacked) == 4
    assert (out / "figures" / "relevance-pictures.png").is_file()
    assert read_yaml(out / "config.yaml")["model"]["name"] == MODEL
    assert main(["report", str(out), "--images", "0", "--out", str(tmp_path / "page.html")]) == 0
    assert "deletion attacked" in (tmp_path / "page.html").read_text()


def test_the_seed_is_of_chance_alone_and_the_images_are_those_of_evaluate() -> None:
    one, other = (analyse(MODEL, *SMALL, "entropy", images=20, seed=seed) for seed in (1, 2))
    evaluated = analyse(MODEL, *SMALL, "entropy", "data.val_num_samples=20", seed=1)
    assert one.rows == evaluated.rows
    assert [row.mean for row in one.rows] == [row.mean for row in other.rows]
    assert one.rows != other.rows


def test_a_run_folder_keeps_its_analysis(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", "train.epochs=1")
    assert main(["analyse", str(run), "norms", "relevance", "device=cpu", "--images", "8", "--attack", "none"]) == 0
    table = Table.load(run / "analysis")
    assert not (run / "analysis" / "config.yaml").exists()
    assert table.names("site") == ["blocks.0.attn", "model"]
    assert [row.statistic for row in table.select(analysis="relevance")] == ["deletion", "insertion"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["entropie"], "did you mean 'entropy'"),
        (["entropy", "--images", "0"], "--images"),
        (["integrated_gradients:stops=4"], "stops"),
        (["relevance", "--attack", "pdg:eps=0.1"], "no attack named 'pdg'"),
    ],
)
def test_mistakes_are_found_before_the_model_is_made(words, reason, capsys, monkeypatch):
    monkeypatch.setattr("vitruvius.models.create.create_model", lambda *_, **__: pytest.fail("made"))
    assert main(["analyse", MODEL, *SMALL, *words]) == 1
    assert reason in capsys.readouterr().err
