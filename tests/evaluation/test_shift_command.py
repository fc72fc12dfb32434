"""The command: runs and models by name, threats and shifts side by side, compact tables, baselines, temperatures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shift_layouts import CLASSES, write_arrays, write_corrupted, write_pictures
from small_run import small_run
from vitruvius._errors import ConfigError, DataError
from vitruvius.cli import main
from vitruvius.cli.evaluate import evaluate
from vitruvius.evaluation.metrics.temperature import collect_logits, fit_temperature
from vitruvius.evaluation.shift_report import load_shift_report


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("run") / "small", "train.epochs=1")


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_arrays(tmp_path_factory.mktemp("arrays"), ["fog", "snow"], images=12)


def test_threats_that_are_corruptions_print_as_a_grid_and_are_saved_whole(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--threat", "corruptions:severities=[1,5]", "--threat", "fgsm:eps=4/255", "--out", str(tmp_path)]
    assert main(["evaluate", str(run), "device=cpu", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["clean", "fgsm(eps=4/255)", "worst"]
    assert lines[6].split() == ["corruption", "1", "5", "mean"]
    grid = lines[8:24]
    assert grid[0].startswith("gaussian_noise")
    assert grid[-1].startswith("mean")
    assert any(line.startswith("frost (drawn) ") for line in grid)
    assert lines[24].startswith("note: frost is drawn")
    assert lines[25].startswith("mean accuracy")
    assert len(lines) == 26  # and not one line for each of thirty
    saved = json.loads((tmp_path / "report.json").read_text())
    assert len(saved["threats"]) == 32
    fog = next(threat for threat in saved["threats"] if threat["spec"] == "fog(severity=5)")
    assert (fog["family"], fog["severity"], fog["n"]) == ("fog", 5, 24)
    clean = next(threat for threat in saved["threats"] if threat["name"] == "clean")
    attack = next(threat for threat in saved["threats"] if threat["name"] == "fgsm")
    assert saved["worst_case"]["correct"] <= min(clean["correct"], attack["correct"])
    report = load_shift_report(tmp_path / "shifts" / "corruptions" / "report.json")
    assert report.accuracies["fog"][5] == fog["accuracy"]
    assert report.clean_error == 1 - clean["accuracy"]


def test_a_run_is_compared_with_another_and_calibrated_on_what_it_held_out(
    run: Path, arrays: Path, tmp_path: Path
) -> None:
    spec = f"cifar-10-c:{arrays}"
    alone = evaluate(str(run), "device=cpu", shift=[spec], out=tmp_path / "first")
    (first,) = alone.shifts
    assert "mce" not in first.corruption
    first_run = str(tmp_path / "first")
    found = evaluate(
        str(run), "device=cpu", shift=[spec], baseline=first_run, calibrate="held-out", out=tmp_path / "second"
    )
    (second,) = found.shifts
    assert second.corruption["mce"] == pytest.approx(1.0)  # against itself
    assert second.corruption["baseline"] == "first"
    assert found.report is not None
    assert second.clean_error == 1 - found.report["clean"].accuracy
    assert second.temperature == pytest.approx(_temperature(run))
    assert "ece_tempered" in second.parts[0].calibration
    assert "mCE 100.00 % of first's" in str(second)
    (third,) = evaluate(str(run), "device=cpu", shift=[spec], baseline="alexnet", out=tmp_path / "first").shifts
    assert third.corruption["baseline"] == "AlexNet"
    assert third.corruption["ce"].keys() == {"fog", "snow"}
    with pytest.raises(DataError, match="has not been evaluated under corruptions"):
        evaluate(str(run), "device=cpu", threat=["fog:severity=1"], baseline=first_run, out=tmp_path / "third")


def _temperature(run: Path) -> float:
    """Fitted by hand on the 12 images that small_run holds out."""
    from small_run import small_config
    from vitruvius.data import eval_loader
    from vitruvius.data.loading import held_out
    from vitruvius.models import load_model

    config, model = small_config(run), load_model(run)
    chosen = held_out(config.data, 0.25, seed=config.seed)
    loader = eval_loader(config.data, input_size=model.data_config, split="train", only=chosen)
    assert loader.num_images == 12
    return fit_temperature(*collect_logits(model, loader))


def test_a_model_by_name_needs_no_data_but_its_shift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corrupted(tmp_path / "c", ["fog"], [1], CLASSES[:2])
    settings = ["model.kwargs={num_classes: 1000, depth: 1, embed_dim: 24}", "device=cpu", "data.workers=0"]
    assert main(["evaluate", "vitruvius/vit_digits", *settings, "--shift", f"imagenet-c:{tmp_path / 'c'}"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["imagenet-c", "1", "mean", "CE"]
    folder = tmp_path / "runs" / "vitruvius-vit_digits" / "evaluation"
    assert [path.name for path in folder.iterdir()] == ["shifts"]
    assert main(["evaluate", "vitruvius/vit_digits", *settings]) == 1
    assert "say which images" in capsys.readouterr().err


def test_imagenet_o_takes_the_validation_folder_of_the_data(tmp_path: Path) -> None:
    from vitruvius._imagenet import imagenet_classes
    from vitruvius.data import DataConfig
    from vitruvius.evaluation.shift import open_shifts

    write_pictures(tmp_path / "o", imagenet_classes("o")[:1])
    write_pictures(tmp_path / "imagenet" / "val", CLASSES[:3])
    data = DataConfig(dataset="folder", root=str(tmp_path / "imagenet"))
    (shift,) = open_shifts([f"imagenet-o:{tmp_path / 'o'}"], data)
    assert len(shift.parts) == 2
    assert not shift.missing
    (bare,) = open_shifts([f"imagenet-o:{tmp_path / 'o'}"], DataConfig())
    assert bare.missing


def test_a_shift_of_other_classes_is_refused_before_anything_is_judged(run: Path, tmp_path: Path) -> None:
    write_pictures(tmp_path / "sketch", CLASSES[:1])
    sketch = f"imagenet-sketch:{tmp_path / 'sketch'}"
    with pytest.raises(DataError, match=r"knows its 1000 classes in their order; this one answers with 10\. Choose"):
        evaluate(str(run), "device=cpu", threat=["fog:severity=1"], shift=[sketch], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_shift_is_given_once_and_held_out_images_must_exist(run: Path, arrays: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--shift cifar-10-c is given twice"):
        evaluate(str(run), shift=[f"cifar-10-c:{arrays}"] * 2)
    config = run / "config.yaml"
    text = config.read_text()
    try:
        config.write_text(text.replace("holdout: 0.25", "holdout: 0.0"))
        with pytest.raises(ConfigError, match="has held out no images of its training set"):
            evaluate(str(run), "device=cpu", shift=[f"cifar-10-c:{arrays}"], calibrate="held-out", out=tmp_path)
    finally:
        config.write_text(text)
