"""Generated mistakes over all verbs: no traceback, an exit code, nothing touched. `make mistakes` tries every one."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mistakes import Mistake, bomb, every_mistake, some_mistakes
from small_run import RECIPE, small_run
from vitruvius._yaml import dump_yaml
from vitruvius.cli import main

NUMBER = 220
CHOSEN = every_mistake() if os.environ.get("EVERY_MISTAKE") else some_mistakes(NUMBER)


class Bomb:
    """A pickle that would leave a mark if anybody ran it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("the-pickle-was-run",)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, maps, masks and all kinds of broken things, which nobody may touch."""
    place = tmp_path_factory.mktemp("place")
    run = small_run(place / "run", "train.epochs=1")
    for folder in ("empty", "bad", "broken_images/cat"):
        (place / folder).mkdir(parents=True)
    (place / "bad" / "config.yaml").write_text("model: [")
    (place / "broken_images" / "cat" / "one.png").write_bytes(b"no picture")
    Image.new("RGB", (8, 8), (40, 90, 10)).save(place / "dog.png")
    (place / "text.txt").write_text("I am a text.")
    (place / "bad.yaml").write_text("model: {name: [}")
    (place / "bomb.yaml").write_text(bomb())
    (place / "empty.yaml").touch()
    (place / "no_sweep.yaml").write_text("grid: {seed: 3}\n")
    (place / "sweep.yaml").write_text(
        dump_yaml({"recipe": str(RECIPE), "out": str(place / "out"), "grid": {"seed": [0]}})
    )
    torch.save({"model": {"head.weight": torch.zeros(2, 3)}}, place / "weights.pth")
    (place / "hostile.pth").write_bytes(pickle.dumps(Bomb()))
    (place / "empty.pth").touch()
    (place / "empty.npy").touch()
    (place / "damaged.npy").write_bytes(b"\x93NUMPY")
    (place / "damaged.safetensors").write_bytes(b"0123456789")
    np.save(place / "flat.npy", np.zeros(3))
    assert main(["maps", str(run), "--images", "4", "--out", str(place / "maps.safetensors")]) == 0
    assert main(["masks", str(place / "maps.safetensors"), "--out", str(place / "masks.safetensors")]) == 0
    return place


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working folder is empty, and stays so."""
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


def snapshot(folder: Path) -> dict[str, int]:
    """Every file and folder, with the time of its last change."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def answer(words: list[str]) -> int:
    """The exit code of a command; argparse ends by itself."""
    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("mistake", CHOSEN, ids=str)
def test_a_mistake_is_one_line_and_an_exit_code_and_touches_nothing(
    mistake: Mistake, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(place)
    code = answer([word.replace("{place}", str(place)) for word in mistake.words])
    err = capsys.readouterr().err
    assert code != 0
    assert "Traceback" not in err
    assert snapshot(place) == before
    last = err.strip().splitlines()[-1]
    assert last.startswith("vitruvius")
    assert "-v shows where" not in last  # somebody has foreseen it
    assert len(last) > 20


def test_there_are_two_hundred_and_every_word_of_every_verb_is_among_them() -> None:
    chosen = {(mistake.verb, mistake.what.partition("=")[0]) for mistake in CHOSEN}
    assert len(CHOSEN) >= 200
    assert chosen == {(mistake.verb, mistake.what.partition("=")[0]) for mistake in every_mistake()}
