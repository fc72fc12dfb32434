"""`vitruvius report` on trained runs: it records what the viewer needs, or says why it cannot."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from small_run import small_run
from vitruvius.cli import main
from vitruvius.report.run import read_examples

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def report(*words: object) -> int:
    return main(["report", *map(str, words)])


def test_the_page_of_a_run_has_viewer_and_sites_without_being_asked(run: Path, tmp_path: Path) -> None:
    assert report(run, "--out", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "data-viewer" in page
    assert "attention sites" in page
    found = read_examples(run, remarks := [])
    assert remarks == []
    assert found is not None
    assert found.threats == ["", "pgd(eps=8/255)"] * 8, "each picture clean, then attacked"
    assert found.pictures[0::2] == found.pictures[1::2]
    assert (found.images[0] != found.images[1]).any()
    assert found.relevance is not None
    assert found.relevance.shape == (16, 4, 4)


def test_what_is_recorded_is_recorded_again_only_for_newer_weights_or_when_asked(run: Path, tmp_path: Path) -> None:
    def recorded(*words: object) -> bool:
        os.utime(run / "attention.safetensors", (1, 1))
        assert report(run, *words, "--out", tmp_path / "page.html") == 0
        return (run / "attention.safetensors").stat().st_mtime > 1

    assert report(run, "--out", tmp_path / "page.html") == 0
    assert not recorded()
    made = (run / "attention.json").stat().st_mtime
    os.utime(run / "best.safetensors", (made + 5, made + 5))
    assert not recorded("--images", 0)
    assert recorded()
    assert recorded("--images", 2)
    assert len(read_examples(run, []).images) == 4


def test_data_that_are_gone_leave_the_viewer_out_unless_it_was_asked_for(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    gone = ("data.dataset=folder", "data.root=/nowhere", "--out", tmp_path / "page.html")
    assert report(run, *gone) == 0
    assert "no attention viewer: data.root /nowhere does not exist" in capsys.readouterr().err
    assert (tmp_path / "page.html").exists()
    assert not (run / "attention.safetensors").exists()
    assert report(run, "--images", 4, *gone) == 1


def test_a_wrong_threat_is_found_before_anything_is_written(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert report(run, "--threat", "pdg", "--out", tmp_path / "page.html") == 1
    assert "no attack named 'pdg'" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
    assert not (run / "model.json").exists()


def test_two_runs_are_recorded_on_the_same_pictures(run: Path, trained: Path, tmp_path: Path) -> None:
    other = shutil.copytree(trained, tmp_path / "other")
    assert report(run, other, "--images", 3, "--out", tmp_path / "page.html") == 0
    pictures = [json.loads((one / "attention.json").read_text())["pictures"] for one in (run, other)]
    assert pictures[0] == pictures[1]


def test_the_folder_of_a_model_by_name_has_a_viewer_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["model.kwargs={depth: 1, embed_dim: 24}", "data.dataset=digits", "--images", "16"]
    assert main(["evaluate", "vitruvius/vit_digits", *small, "--out", "by_name"]) == 0
    assert report("by_name", "--images", 2, "--out", "page.html") == 0
    assert read_examples(Path("by_name"), []) is not None


def test_the_page_of_an_analysis_of_a_model_without_a_head_has_a_viewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    headless = ["model.kwargs={depth: 1, embed_dim: 24, num_classes: 0}", "data.dataset=digits", "--images", "4"]
    assert main(["analyse", "vitruvius/vit_digits", "entropy", "rollout", *headless, "--out", "seen"]) == 0
    assert "seen/figures/rollout-pictures.png" in capsys.readouterr().out
    assert report("seen", "--images", 2, "--out", "page.html") == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "data-viewer" in page
    assert "no attention viewer" not in capsys.readouterr().err
    found = read_examples(Path("seen"), [])
    assert found is not None
    assert found.threats == ["", ""]
