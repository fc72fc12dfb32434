"""`vitruvius report` on trained runs: it records what the viewer needs, or says why it cannot."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from small_run import small_run
from vitruvius._errors import DataError, VitruviusError
from vitruvius.cli import main
from vitruvius.cli.look import report
from vitruvius.report._examples import read_examples


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def write(run: Path, *overrides: str, **options: Any) -> Path:
    return report(str(run), *overrides, out=run.parent / "page.html", **options)


def test_the_page_of_a_run_has_viewer_and_sites_without_being_asked(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "vitruvius"):
        page = write(run).read_text(encoding="utf-8")
    (line,) = caplog.messages
    assert "recording attention on 8 pictures, clean and under pgd(eps=8/255)" in line
    assert "data-viewer" in page
    assert "attention sites" in page
    found = read_examples(run, remarks := [])
    assert remarks == []
    assert found is not None
    assert found.threats == ["", "pgd(eps=8/255)"] * 8, "each picture clean, then attacked"
    assert found.pictures[0::2] == found.pictures[1::2]
    assert (found.images[0] != found.images[1]).any()
    assert found.labels[0::2] == sorted(found.labels[0::2])
    assert found.relevance is not None
    assert found.relevance.shape == (16, 4, 4)


def test_what_is_recorded_is_recorded_again_only_for_newer_weights_or_when_asked(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said(**options: Any) -> int:
        caplog.clear()
        with caplog.at_level("INFO", "vitruvius"):
            write(run, **options)
        return len(caplog.messages)

    assert said() == 1
    assert said() == 0
    made = (run / "attention.json").stat().st_mtime
    os.utime(run / "best.safetensors", (made + 5, made + 5))
    assert said() == 1
    assert said(images=2) == 1
    assert len(read_examples(run, []).images) == 4
    assert said(images=0) == 0


def test_data_that_are_gone_leave_the_viewer_out_unless_it_was_asked_for(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = ("data.dataset=folder", "data.root=/nowhere")
    with caplog.at_level("INFO", "vitruvius"):
        assert write(run, *gone).exists()
    assert "no attention viewer: data folder /nowhere does not exist" in caplog.messages[-1]
    assert not (run / "attention.safetensors").exists()
    with pytest.raises(DataError, match="/nowhere does not exist"):
        write(run, *gone, images=4)


def test_a_wrong_threat_is_found_before_anything_is_written(run: Path) -> None:
    with pytest.raises(VitruviusError, match="no attack named 'pdg'"):
        write(run, threat="pdg")
    assert not (run.parent / "page.html").exists()
    assert not (run / "model.json").exists()


def test_two_runs_are_recorded_on_the_same_pictures(run: Path, trained: Path) -> None:
    other = shutil.copytree(trained, run.parent / "other")
    report(str(run), str(other), images=3, out=run.parent / "page.html")
    pictures = [json.loads((one / "attention.json").read_text())["pictures"] for one in (run, other)]
    assert pictures[0] == pictures[1]


def test_the_folder_of_a_model_by_name_has_a_viewer_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["model.kwargs={depth: 1, embed_dim: 24}", "data.dataset=digits", "--images", "16"]
    assert main(["evaluate", "vitruvius/vit_digits", *small, "--out", "by_name"]) == 0
    assert main(["report", "by_name", "--images", "2", "--out", "page.html"]) == 0
    assert read_examples(Path("by_name"), []) is not None
