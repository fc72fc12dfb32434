"""One request: read once, the same images in every verb, locked while it is open, and nothing touched by a refusal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from small_run import small_run
from vitruvius._errors import ConfigError, RunError
from vitruvius._files import load_tensors
from vitruvius._signals import exit_message
from vitruvius.cli import main
from vitruvius.evaluation import load_ledger
from vitruvius.request import open_request
from vitruvius.studies import _base

IMAGES = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "run", "train.epochs=1")


def ids_of(run: Path, images: int, **settings: Any) -> list[int]:
    with open_request(str(run), images=images, **settings) as request:
        return [number for _, _, ids in request.loader.with_ids() for number in ids.tolist()]


def test_every_verb_looks_at_the_same_images(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids_of(run, IMAGES)
    assert len(expected) == IMAGES
    assert set(expected) < set(ids_of(run, 9))
    few = ["--images", str(IMAGES)]
    assert main(["evaluate", str(run), *few, "--out", str(tmp_path / "judged")]) == 0
    assert load_ledger(tmp_path / "judged")["clean"]["id"].tolist() == expected
    assert main(["attack", str(run), "--threat", "fgsm:eps=0.1", *few, "--out", str(tmp_path / "x.safetensors")]) == 0
    assert load_tensors(tmp_path / "x.safetensors")[0]["ids"].tolist() == expected
    assert main(["report", str(run), *few, "--out", str(tmp_path / "page.html")]) == 0
    pictures = json.loads((run / "attention.json").read_text())["pictures"]
    assert sorted({int(name.split()[-1]) for name in pictures}) == expected
    subject = _base.open_subject(str(run), (), IMAGES, 8)
    assert torch.cat([ids for _, _, ids in subject]).tolist() == expected
    asked: list[Any] = []
    monkeypatch.setattr(
        "vitruvius.analysis.analysing.analyse", lambda model, loader, *_, **__: asked.extend(loader.with_ids())
    )
    assert main(["analyse", str(run), "norms", *few]) == 1  # the patch returns no table
    assert torch.cat([ids for _, _, ids in asked]).tolist() == expected


def test_training_images_are_chosen_by_the_same_rule(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ids_of(run, IMAGES, split="training", labels=False)
    assert len(chosen) == IMAGES
    assert set(chosen) < set(ids_of(run, 9, split="training", labels=False))
    asked: list[int] = []

    def write_maps(request: Any) -> Path:
        asked.extend(number for _, _, ids in request.loader.with_ids() for number in ids.tolist())
        return run

    monkeypatch.setattr("vitruvius.compression.steps.write_maps", write_maps)
    assert main(["maps", str(run), "--images", str(IMAGES)]) == 0
    assert asked == chosen


def test_an_evaluation_reads_the_config_once(run: Path, tmp_path: Path) -> None:
    opened: list[str] = []
    watching = True

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and str(arguments[0]) == str(run / "config.yaml"):
            opened.append(str(arguments[0]))

    sys.addaudithook(note)  # which stays for good
    words = ["--threat", "fgsm:eps=0.1", "--images", "4", "--sanity", "8/255", "--out", str(tmp_path / "judged")]
    assert main(["evaluate", str(run), *words]) == 0
    watching = False
    assert len(opened) == 1


def test_results_are_locked_while_the_request_is_open(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "results"
    with open_request(str(run), out=place, writes="evaluation") as request:
        assert not place.exists()
        assert request.folder == place
        assert list(place.iterdir())
    assert not place.exists()
    with open_request(str(run), images=IMAGES) as request, pytest.raises(ConfigError, match="--out"):
        assert request.folder


def test_a_file_cannot_be_where_a_folder_is(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is a folder"), open_request(str(run), out=tmp_path, writes="maps.safetensors"):
        pass


def test_a_refusal_needs_no_model(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitruvius.models.create.load_run", lambda *_, **__: pytest.fail("was loaded"))
    for words in (["seed=1"], ["data.nope=1"], ["runs/other"]):
        with pytest.raises(ConfigError), open_request(str(run), words):
            pass
    assert main(["evaluate", str(run), "--threat", "pdg:eps=1"]) == 1


def interrupted(run: Path, place: Path, *, keep: bool) -> None:
    with open_request(str(run), out=place, writes="evaluation") as request:
        if keep:
            (request.folder / "part").touch()
        raise KeyboardInterrupt


@pytest.mark.parametrize(("keep", "text"), [(False, "nothing was kept yet"), (True, "keeps what was done so far")])
def test_somebody_who_interrupts_is_told_what_is_kept(keep: bool, text: str, run: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted(run, tmp_path / "results", keep=keep)
    assert text in exit_message(caught.value)[0]
