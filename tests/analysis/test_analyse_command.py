from pathlib import Path

import pytest

from small_run import small_run
from vitruvius._errors import ConfigError, UnknownName
from vitruvius._yaml import read_yaml
from vitruvius.analysis import Table
from vitruvius.cli.look import analyse
from vitruvius.report import write_page

MODEL = "vitruvius/vit_digits"
SMALL = ["model.kwargs={depth: 1}", "device=cpu", "data.dataset=digits"]


def test_a_model_by_name_is_analysed_and_its_folder_can_be_reported(tmp_path: Path) -> None:
    table = analyse(MODEL, "data.crop_mode=center", "entropy", *SMALL, images=20, seed=1, out=tmp_path / "out")
    assert table.names("analysis") == ["entropy"]
    assert table.facts["images"] == 20
    assert table.facts["model"] == MODEL
    assert "digits" in table.facts["data"]
    assert Table.load(tmp_path / "out") == table
    assert read_yaml(tmp_path / "out" / "config.yaml")["model"]["name"] == MODEL


def test_the_seed_is_of_chance_alone_and_the_images_are_those_of_evaluate() -> None:
    one, other = (analyse(MODEL, *SMALL, "entropy", images=20, seed=seed) for seed in (1, 2))
    evaluated = analyse(MODEL, *SMALL, "entropy", "data.val_num_samples=20", seed=1)
    assert one.rows == evaluated.rows
    assert [row.mean for row in one.rows] == [row.mean for row in other.rows]
    assert one.rows != other.rows


def test_a_run_folder_keeps_its_analysis(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", "train.epochs=1")
    table = analyse(str(run), "device=cpu", "norms", "entropy", images=8)
    assert Table.load(run / "analysis") == table
    assert not (run / "analysis" / "config.yaml").exists()
    assert table.names("site") == ["blocks.0.attn"]


def test_more_images_than_there_are_means_all() -> None:
    assert analyse(MODEL, *SMALL, "entropy", images=10**6).facts["images"] == 360


@pytest.mark.parametrize(
    ("words", "options", "word"),
    [
        (["entropie"], {}, "no analysis named 'entropie'"),
        (["entropy"], {"images": 0}, "--images 0"),
        (["relevance"], {"attack": "pdg:eps=0.1"}, "no attack named 'pdg'"),
        (["integrated_gradients:stops=4"], {}, "integrated_gradients"),
    ],
)
def test_mistakes_are_found_before_the_model_is_opened(words: list[str], options: dict[str, str], word: str) -> None:
    with pytest.raises((UnknownName, ConfigError), match=word):
        analyse("no_such_model", "data.dataset=digits", *words, **options)


def test_explanations_are_asked_for_like_analyses_and_their_pictures_are_drawn(tmp_path: Path) -> None:
    out = tmp_path / "out"
    table = analyse(MODEL, *SMALL, "entropy", "relevance", images=4, seed=1, out=out, attack="fgsm:eps=0.1")
    assert table.names("analysis") == ["entropy", "relevance"]
    assert len(table.pictures["relevance"].attacked) == 4
    assert "insertion_attacked" in table.names("statistic")
    assert (out / "figures" / "relevance-pictures.png").is_file()
    page = write_page([out], tmp_path / "page.html").read_text()
    assert "relevance" in page
    assert "deletion attacked" in page
    alone = analyse(MODEL, *SMALL, "attention_gradient", images=4, seed=1, attack="none")
    assert alone.names("statistic") == ["deletion", "insertion"]
