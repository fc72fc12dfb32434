import pytest

from small_run import small_run
from vitruvius._errors import ConfigError, UnknownName
from vitruvius._yaml import read_yaml
from vitruvius.analysis import Table
from vitruvius.analysis.command import analyse_target, split_arguments
from vitruvius.cli import main
from vitruvius.report import write_page
from vitruvius.report.sections.analyses_gallery import save_figures

MODEL = "vitruvius/vit_digits"
SMALL = ["model.kwargs={depth: 1}", "device=cpu", "data.dataset=digits"]


def test_analyses_and_overrides_are_told_apart():
    given = ["norms", "gammas:variant=released,noise=0.2", "data.root=/a:b", "seed=3", "entropy"]
    names, overrides = split_arguments(given)
    assert names == ["norms", "gammas:variant=released,noise=0.2", "entropy"]
    assert overrides == ["data.root=/a:b", "seed=3"]


def test_a_model_by_name_is_analysed_on_random_images_and_its_folder_can_be_reported(tmp_path):
    drawn = []
    table = analyse_target(
        MODEL, SMALL, ["entropy"], 20, 1, str(tmp_path / "out"), draw=lambda t, folder: drawn.append((t, folder))
    )
    assert table.facts["images"] == 20
    assert table.facts["model"] == MODEL
    assert "digits" in table.facts["data"]
    assert Table.load(tmp_path / "out") == table
    assert drawn == [(table, tmp_path / "out")]
    assert read_yaml(tmp_path / "out" / "config.yaml")["model"]["name"] == MODEL
    again = analyse_target(MODEL, SMALL, ["entropy"], 20, 1)
    other = analyse_target(MODEL, SMALL, ["entropy"], 20, 2)
    assert again.rows == table.rows
    assert other.rows[0].mean != table.rows[0].mean


def test_a_run_folder_keeps_its_analysis(tmp_path):
    run = small_run(tmp_path / "run", "train.epochs=1")
    table = analyse_target(str(run), ["device=cpu"], ["norms", "entropy"], 8)
    assert Table.load(run / "analysis") == table
    assert not (run / "analysis" / "config.yaml").exists()
    assert table.names("site") == ["blocks.0.attn"]


def test_more_images_than_there_are_means_all():
    assert analyse_target(MODEL, SMALL, ["entropy"], 10**6).facts["images"] == 360


def test_mistakes_are_found_before_the_model_is_opened():
    with pytest.raises(UnknownName, match="no analysis named 'entropie'"):
        analyse_target("no_such_model", [], ["entropie"])
    with pytest.raises(ConfigError, match="--images 0"):
        analyse_target("no_such_model", [], ["entropy"], 0)


def test_explanations_are_asked_for_like_analyses_and_their_pictures_are_drawn(tmp_path):
    out = tmp_path / "out"
    table = analyse_target(
        MODEL, SMALL, ["entropy", "relevance"], 4, 1, str(out), attack="fgsm:eps=0.1", draw=save_figures
    )
    assert table.names("analysis") == ["entropy", "relevance"]
    assert len(table.pictures["relevance"].attacked) == 4
    assert (out / "figures" / "relevance-pictures.png").is_file()
    page = write_page([out], tmp_path / "page.html").read_text()
    assert "relevance" in page
    assert "deletion attacked" in page
    alone = analyse_target(MODEL, SMALL, ["attention_gradient"], 4, 1, attack=None)
    assert alone.names("statistic") == ["deletion", "insertion"]


def test_a_wrong_attack_or_setting_of_an_explanation_is_found_before_the_model_is_opened():
    with pytest.raises(UnknownName, match="no attack named 'pdg'"):
        analyse_target("no_such_model", [], ["relevance"], attack="pdg:eps=0.1")
    with pytest.raises(ConfigError, match="integrated_gradients"):
        analyse_target("no_such_model", [], ["integrated_gradients:stops=4"])


def test_the_command_line_explains_clean_and_attacked_images(capsys):
    main(["analyse", MODEL, "relevance", *SMALL, "--images", "3", "--attack", "pgd:eps=4/255,steps=1"])
    told = capsys.readouterr().out
    assert "insertion_attacked" in told
    main(["analyse", MODEL, "relevance", *SMALL, "--images", "3", "--attack", "none"])
    assert "attacked" not in capsys.readouterr().out
