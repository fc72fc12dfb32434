"""Bad input, verb by verb: one line, an exit code, nothing touched, and never a traceback."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from small_run import RECIPE
from vitruvius import cli
from vitruvius._errors import CheckpointError, ConfigError
from vitruvius._yaml import parse_value, read_yaml
from vitruvius.cli import main
from vitruvius.cli._verb import Verb
from vitruvius.converters._checkpoint import read_checkpoint


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that answers a mistake."""
    code = main(words)
    out, err = capsys.readouterr()
    assert code == 1
    assert out == ""
    assert err.startswith("vitruvius: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


# every verb


def failing_verb(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A command line whose one verb, `fail`, raises this error."""

    def run(_: Any) -> None:
        """Fail."""
        raise error

    monkeypatch.setattr(cli, "every_verb", lambda: [Verb(name="fail", arguments=lambda _: None, run=run)])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(30, "Read-only file system", "/mnt/x"), "a file cannot be read or written: "),
        (MemoryError(), "out of memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "data.eval_batch_size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory:\nyou tried"), "out of memory"),
        (RuntimeError("a worker\ndied"), "RuntimeError: a worker died."),
        (ValueError("month must be in 1..12"), "ValueError: month must be in 1..12."),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "UnicodeDecodeError"),
    ],
    ids=str,
)
def test_an_error_nobody_foresaw_is_one_line_that_says_how_to_see_more(
    error: Exception, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_verb(monkeypatch, error)
    said = mistake(capsys, "fail")
    assert words in said
    assert said.endswith("-v shows where.\n")
    with pytest.raises(type(error)):
        main(["-v", "fail"])


def test_a_terminal_without_the_character_gets_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(
        cli,
        "every_verb",
        lambda: [Verb(name="say", arguments=lambda _: None, run=lambda _: sys.stdout.write("ε = 8/255"))],
    )
    assert main(["say"]) == 0
    terminal.flush()
    assert terminal.buffer.getvalue() == b"\\u03b5 = 8/255"  # type: ignore[attr-defined]


# recipes and settings


def bomb(levels: int = 9, wide: int = 9) -> str:
    """A few hundred bytes that stand for 9⁹ values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * wide)}]")
    return "\n".join(lines)


@pytest.mark.parametrize("text", [bomb(), "a: &a [*a]", "a: &a {b: *a}"])
def test_aliases_that_stand_for_too_much_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bomb.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"aliases \(\*name\) stand for more than"):
        read_yaml(tmp_path / "bomb.yaml")


def test_a_few_aliases_are_as_good_as_ever(tmp_path: Path) -> None:
    (tmp_path / "fine.yaml").write_text("a: &a {lr: 1e-3}\nb: *a\nc: {<<: *a, epochs: 3}\n")
    assert read_yaml(tmp_path / "fine.yaml") == {"a": {"lr": 1e-3}, "b": {"lr": 1e-3}, "c": {"lr": 1e-3, "epochs": 3}}


@pytest.mark.parametrize(
    "text",
    ["!!timestamp x", "!!int x", "!!bool x", "!!float x", "[" * 5000, "9" * 5000, "!!binary é", "{a: 1, [}", "1/0"],
    ids=lambda text: text[:12],
)
def test_a_value_that_is_no_yaml_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        parse_value(text)


@pytest.mark.parametrize("date", ["2024-13-45", "2024-01-31"])
def test_a_date_is_text(date: str) -> None:
    assert parse_value(date) == date


# convert


def test_an_empty_checkpoint_is_called_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = str(tmp_path / "empty.pth"), tmp_path / "run"
    Path(file).touch()
    with pytest.raises(CheckpointError, match="damaged: EOFError"):
        read_checkpoint(file)
    assert "empty.pth" in mistake(capsys, "convert", file, "--from", "deit", "--out", str(run))
    assert not run.exists()


# train


def test_a_run_folder_may_be_called_like_a_date_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(RECIPE), "out=2024-13-45", "--dry-run"]) == 0
    assert "2024-13-45" in capsys.readouterr().out
