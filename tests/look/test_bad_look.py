"""What cannot be looked at gets one clear sentence, and nothing is left behind."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bad_pictures import bad_files, photograph, write_all

import vitruvius
from vitruvius._errors import VitruviusError
from vitruvius.cli import main
from vitruvius.models import create_model

MODEL = "vitruvius/vit_digits"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a photograph and all the files that are none; a verb may leave nothing else in it."""
    write_all(tmp_path)
    (tmp_path / "dog.jpg").write_bytes(photograph())
    (tmp_path / "void").mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    yield tmp_path
    assert sorted(tmp_path.rglob("*")) == before, "something was left behind"


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 1) -> str:
    """The one line that a refusal prints."""
    assert main(["look", *words]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    said = [line for line in lines if line.startswith("vitruvius: ")]
    assert len(said) == 1, lines
    assert "Traceback" not in said[0]
    assert "-v shows where" not in said[0], "this was not foreseen"
    assert len(said[0]) < 500
    return said[0]


@pytest.mark.parametrize("name", bad_files())
def test_a_file_that_is_no_good_picture(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert name in refused(capsys, MODEL, name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((MODEL, "cat.jpg"), "cat.jpg"),
        ((MODEL, "void"), "no picture"),
        ((MODEL, "https://example.org/dog.jpg"), "URL"),
        ((MODEL, "dog.jpg", "--data", "digits"), "choose one"),
        ((MODEL,), "data.dataset"),
        ((MODEL, "dog.jpg", "--threat", "pgd:epsilon=2/255"), "eps"),
        ((MODEL, "dog.jpg", "--threat", "corruptions"), "one"),
        ((MODEL, "dog.jpg", "--attention", "rcp"), "rpc"),
        ((MODEL, "dog.jpg", "--attention", "mask"), "pattern"),
        ((MODEL, "dog.jpg", "--masks", "none.safetensors"), "none.safetensors"),
        ((MODEL, "dog.jpg", "--masks", "dog.jpg"), "dog.jpg"),
        ((MODEL, "dog.jpg", "--sparsity", "1"), "sparsity"),
        ((MODEL, "dog.jpg", "--beside", "vit_tinny_patch16_224"), "vit_tiny_patch16_224"),
        ((MODEL, "dog.jpg", "--class", "tench"), "tench"),
        ((MODEL, "dog.jpg", "--class", "10"), "10"),
        ((MODEL, "void", "--images", "0"), "--images"),
        ((MODEL, "dog.jpg", "--out", "void"), "folder"),
        ((MODEL, "dog.jpg", "--out", "dog.jpg/look.html"), "dog.jpg"),
        ((MODEL, "dog.jpg", "--png", "dog.jpg"), "dog.jpg"),
        ((MODEL, "model.kwargs={num_classes: 0}", "dog.jpg", "--threat", "pgd:eps=2/255"), "no head"),
        ((MODEL, "model.kwargs={num_classes: 0}", "dog.jpg", "--class", "1"), "no head"),
        ((MODEL, "dog.jpg", "--serve", "--threat", "pgd:eps=2/255"), "--serve"),
        ((MODEL, "--serve", "--port", "70000"), "port"),
        ((MODEL, "dog.jpg", "--port", "8000"), "--serve"),
        ((MODEL, "--data", "digits", "--images", "0"), "--images"),
    ],
)
def test_words_that_make_no_sense(
    words: tuple[str, ...], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *words)


def test_a_port_that_is_taken(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn", reason="the live page needs the extra `live`")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused(capsys, MODEL, "--serve", "--port", str(port))


def test_without_the_extra_a_line_says_what_to_install(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "[live]" in refused(capsys, MODEL, "--serve")


@pytest.mark.parametrize(
    "image",
    [
        torch.rand(8, 8),
        torch.rand(3, 8, 8) + 1,
        torch.zeros(3, 8, 8, dtype=torch.uint8),
        torch.full((3, 8, 8), float("nan")),
        42,
        None,
        [],
    ],
    ids=["two axes", "above 1", "uint8", "nan", "a number", "nothing", "empty"],
)
def test_in_python_what_is_no_image_is_refused(image: object) -> None:
    with pytest.raises(VitruviusError):
        vitruvius.look(create_model(MODEL), image)


def test_in_python_what_is_no_model_is_refused() -> None:
    with pytest.raises(VitruviusError, match="not a model"):
        vitruvius.look(42, torch.rand(3, 8, 8))  # type: ignore[arg-type]
