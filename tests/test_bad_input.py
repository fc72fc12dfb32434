"""Bad input, verb by verb: one line, an exit code, nothing touched, and never a traceback."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from failing_disk import fill_the_disk
from mistakes import bomb
from small_run import RECIPE, SMALL, small_config, small_run
from vitruvius._checks import as_label
from vitruvius._errors import CheckpointError, ConfigError, DataError, RunError
from vitruvius._files import save_tensors
from vitruvius._yaml import parse_value, read_yaml
from vitruvius.cli import main
from vitruvius.compression.files import save_maps
from vitruvius.compression.maps import average_maps
from vitruvius.converters.base import read_checkpoint
from vitruvius.evaluation.ledger import Ledger
from vitruvius.models import load_model
from vitruvius.training import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder that all tests of this file read and none writes."""
    return small_run(tmp_path_factory.mktemp("runs") / "run")


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
    """Let the verb `list` raise this error."""

    def run() -> None:
        raise error

    monkeypatch.setattr("vitruvius.cli.about.list_pieces", run)


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
    said = mistake(capsys, "list")
    assert words in said
    assert said.endswith("-v shows where.\n")
    assert main(["-v", "list"]) == 1
    seen = capsys.readouterr().err
    assert "Traceback (most recent call last)" in seen
    assert "test_bad_input.py" in seen
    assert words in seen


def test_what_shows_where_shows_no_secret(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    failing_verb(monkeypatch, RuntimeError("cannot read https://me:hunter2@host/data?token=hunter3"))
    assert main(["-v", "list"]) == 1
    seen = capsys.readouterr().err
    assert "Traceback" in seen
    assert "hunter" not in seen


def test_a_terminal_without_the_character_gets_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr("vitruvius.cli.about.list_pieces", lambda: sys.stdout.write("ε = 8/255") and None)
    assert main(["list"]) == 0
    terminal.flush()
    assert terminal.buffer.getvalue() == b"\\u03b5 = 8/255"  # type: ignore[attr-defined]


# recipes and settings


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


# data


def save_images(file: Path, *, images: Tensor | None = None, labels: Tensor | None = None) -> list[str]:
    """Forty images of digits' size, and how a command names them."""
    if images is None:
        images = torch.rand(40, 1, 8, 8)
    if labels is None:
        labels = torch.arange(40) % 10
    save_tensors(file, {"images": images, "labels": labels})
    return ["data.dataset=tensors", f"data.root={file}"]


BAD_LABELS = [
    (torch.arange(40) % 10 + 0.5, "labels have dtype torch.float32"),
    (torch.arange(40) % 10 - 1, "labels reach down to -1"),
]


@pytest.mark.parametrize(("labels", "words"), BAD_LABELS)
def test_labels_that_are_no_classes_are_refused_by_evaluate_and_train(
    labels: Tensor, words: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = save_images(tmp_path / "odd.safetensors", labels=labels)
    out = tmp_path / "made" / "out"
    assert words in mistake(capsys, "evaluate", str(run), *data, "--out", str(out))
    assert words in mistake(capsys, "train", str(RECIPE), *SMALL, *data, f"out={out}", "--quiet")
    assert not out.parent.exists()


def test_one_label_is_a_whole_number_or_refused() -> None:
    assert as_label(np.float32(3)) == 3
    with pytest.raises(DataError, match=r"the label 1\.5 is not a whole number"):
        as_label(1.5)


# maps and masks


@pytest.mark.parametrize(
    ("images", "words"), [(torch.full((40, 1, 8, 8), torch.nan), "NaN"), (torch.full((40, 1, 8, 8), 255.0), "to 255")]
)
def test_maps_are_averaged_over_pixels_only(
    images: Tensor, words: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = save_images(tmp_path / "odd.safetensors", images=images)
    out = tmp_path / "made" / "maps.safetensors"
    assert words in mistake(capsys, "maps", str(run), *data, "--out", str(out))
    assert not out.parent.exists()
    model = load_model(run)
    with pytest.raises(DataError, match=words):
        average_maps(model.eval(), [(images, torch.zeros(40, dtype=torch.int64))])


def test_maps_and_masks_say_that_a_disk_is_read_only(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = tmp_path / "maps.safetensors"
    assert main(["maps", str(run), "--images", "4", "--out", str(maps)]) == 0
    capsys.readouterr()
    fill_the_disk(monkeypatch, after=0, number=errno.EROFS)
    for out in ("masks.safetensors", "masks.npy"):
        assert "no permission" in mistake(capsys, "masks", str(maps), "--out", str(tmp_path / out))
    said = mistake(capsys, "maps", str(run), "--images", "4", "--out", str(tmp_path / "new" / "maps.safetensors"))
    assert "no permission" in said


# evaluate


@pytest.mark.parametrize("eps", ["-1", "0", ".nan", ".inf", "true", "2", "x"])
def test_a_strength_that_is_none_is_refused_before_anything_is_judged(
    eps: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake(capsys, "evaluate", str(run), f"--sanity={eps}", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ['{"subject"', "[]", '{"subject": {}}', '{"subject": {}, "threats": [{"x": 1}]}', "ÿ"])
def test_a_damaged_ledger_is_called_so(
    text: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parts").mkdir()
    save_tensors(tmp_path / "parts" / "0-0.safetensors", {"clean/id": torch.arange(2)})  # a ledger that holds rows
    (tmp_path / "ledger.json").write_bytes(text.encode("latin-1"))
    assert "ledger.json is damaged" in mistake(capsys, "evaluate", str(run), "--out", str(tmp_path))


def test_an_evaluation_whose_folder_is_moved_away_is_an_error(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "out")
    ledger.claim({"data": "digits"}, [])
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="was moved or deleted while it was written to"):
        ledger.add("clean", {"id": torch.arange(2), "label": torch.zeros(2), "correct": torch.ones(2)})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", ["0", "-5"])
@pytest.mark.parametrize("verb", ["evaluate", "maps", "analyse", "attack", "corrupt", "study"])
def test_no_images_are_refused_by_every_verb(
    verb: str, number: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"attack": ["--threat", "fgsm:eps=0.1"], "study": []}.get(verb, [])
    subject = {"corrupt": ["digits"], "study": ["eps-sweep", str(run)]}.get(verb, [str(run)])
    said = mistake(capsys, verb, *subject, *words, "--images", number, "--out", str(tmp_path / "made" / "out"))
    assert f"images {number}" in said.replace("= ", "")
    assert not (tmp_path / "made").exists()


# copies


def test_a_copy_of_broken_images_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "one.png").write_bytes(b"not a picture")
    words = ["--out", str(tmp_path / "made"), "--workers", "1", "--corruptions", "fog"]
    mistake(capsys, "corrupt", str(tmp_path / "images"), *words)
    assert not (tmp_path / "made").exists()
    assert "--workers -1" in mistake(capsys, "corrupt", "digits", "--out", str(tmp_path / "made"), "--workers", "-1")


# train


@pytest.mark.parametrize(
    "setting",
    [
        "train.weight_decay=-1",
        "train.opt_betas=[0.9, .nan]",
        "data.mixup=.inf",
        "data.train_interpolation=nope",
        "seed=99999999999999999999999",
        "seed=",
    ],
)
def test_a_number_no_training_can_use_is_refused_before_it_begins(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = mistake(capsys, "train", str(RECIPE), *SMALL, f"out={tmp_path / 'out'}", setting)
    assert setting.partition("=")[0] in said
    assert not (tmp_path / "out").exists()


def test_a_run_whose_folder_is_moved_away_is_an_error(tmp_path: Path) -> None:
    class Mover:
        def epoch_end(self, epoch: int, model: nn.Module) -> None:
            (tmp_path / "out").rename(tmp_path / f"elsewhere-{epoch}")

    with pytest.raises(RunError, match="was moved or deleted while the run was writing"):
        train(small_config(tmp_path / "out"), quiet=True, callbacks=[Mover()])
    assert not (tmp_path / "out").exists()


def test_a_run_folder_may_be_called_like_a_date_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(RECIPE), "out=2024-13-45", "--dry-run"]) == 0
    assert "2024-13-45" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "masks PLACE/maps.safetensors --out PLACE/maps.safetensors",
        "masks PLACE/maps.safetensors --figure PLACE/maps.safetensors",
        "masks PLACE/maps.safetensors --out RUN/last.safetensors",
        "masks PLACE/maps.safetensors --figure PLACE/figure.txt",
        "maps RUN --out RUN/state.pt",
        "export RUN --out RUN/best.safetensors",
        "export RUN --out RUN",
        "evaluate RUN --out RUN",
        "analyse RUN norms --out RUN",
        "attack RUN --threat fgsm:eps=0.1 --out RUN/best.safetensors",
        "attack RUN data.dataset=tensors data.root=PLACE/x.safetensors --threat fgsm:eps=0.1 --out PLACE/x.safetensors",
        "attack RUN --threat fgsm:eps=0.1 --out RUN",
        "report RUN --out RUN/config.yaml",
        "report RUN --out PLACE/nowhere/page.html",
        "study eps-sweep RUN --out RUN",
        "compress RUN --out RUN",
        "convert PLACE/weights.pth --from deit --out PLACE/weights.pth",
        "corrupt PLACE/pictures --out PLACE/pictures",
    ],
)
def test_what_is_read_and_what_a_run_is_made_of_is_never_written_over(
    words: str, run: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path_factory.mktemp("place")
    maps = {"blocks.0.attn": torch.rand(4, 17, 17).softmax(-1)}
    save_maps(place / "maps.safetensors", maps)
    save_tensors(place / "x.safetensors", {"images": torch.rand(4, 1, 8, 8), "labels": torch.arange(4)})
    torch.save({"model": {"head.weight": torch.zeros(2, 3)}}, place / "weights.pth")
    (place / "pictures" / "cat").mkdir(parents=True)
    before = {file: file.stat().st_mtime_ns for folder in (place, run) for file in folder.rglob("*")}
    mistake(capsys, *[word.replace("PLACE", str(place)).replace("RUN", str(run)) for word in words.split()])
    assert {file: file.stat().st_mtime_ns for folder in (place, run) for file in folder.rglob("*")} == before
