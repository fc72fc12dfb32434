"""evaluate_shift: right rows, subsets of logits, the model's own preprocessing, resumed after any kill, never mixed."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import Stop, assert_same_rows, model, rows, stopped_after
from PIL import Image

from shift_layouts import CLASSES, write_arrays, write_corrupted, write_pictures
from two_processes import in_two_processes
from vitruvius._errors import ConfigError, DataError, RunError
from vitruvius._imagenet import imagenet_classes, subset_columns
from vitruvius._processes import process_group
from vitruvius.data import DataConfig
from vitruvius.data.preprocessing import eval_transform, resolve
from vitruvius.evaluation import evaluate_shift
from vitruvius.evaluation import shift as shift_module
from vitruvius.evaluation.metrics import EqualWidth, alexnet, detect, expected_error
from vitruvius.evaluation.metrics.corruption import Baseline
from vitruvius.evaluation.shift import shift_loader
from vitruvius.evaluation.shift_report import load_shift_report
from vitruvius.shifts import open_shift

DATA = DataConfig(batch_size=4, workers=0)
KNOWING = {"num_classes": 1000}


def answers_until(monkeypatch: pytest.MonkeyPatch, calls: int) -> list[int]:
    return stopped_after(monkeypatch, shift_module, "respond", calls, 1)


def test_arrays_are_judged_as_in_a_slow_loop(tmp_path: Path) -> None:
    net, shift = model(), open_shift(f"cifar-10-c:{write_arrays(tmp_path, ['fog', 'snow'], images=7)}")
    report = evaluate_shift(net, shift, data=DATA)
    assert [part.name for part in report.parts][::5] == ["snow 1", "fog 1"]
    for part, score in zip(shift.parts, report.parts, strict=True):
        images = part.open()
        pixels = torch.stack([torch.from_numpy(_array(images.read(i)[0])) for i in range(7)]) / 255
        logits = net(pixels)
        right = logits.argmax(-1) == torch.arange(7)
        assert score.accuracy == float(right.double().mean())
        found = report.ledger.rows(part.name)
        assert found["id"].tolist() == list(range(7))
        torch.testing.assert_close(found["energy"], logits.logsumexp(-1))
        assert score.calibration["ece"] == pytest.approx(
            expected_error(EqualWidth()(logits.softmax(-1).amax(-1), right)), abs=1e-6
        )
    assert report.corruption["mean_error"] == pytest.approx(1 - sum(p.accuracy for p in report.parts) / 10)
    low, high = report.corruption["mean_error_interval"]
    assert low < report.corruption["mean_error"] < high
    assert "mce" not in report.corruption  # nobody to compare with


def _array(image: Image.Image) -> Any:
    import numpy as np

    return np.asarray(image).transpose(2, 0, 1).astype("float32")


def test_imagenet_c_has_ce_against_alexnet_and_the_rest_is_named(tmp_path: Path) -> None:
    write_corrupted(tmp_path, ["fog", "spatter"], [2, 5], CLASSES[:3])
    report = evaluate_shift(model(**KNOWING), f"imagenet-c:{tmp_path}", data=DATA, clean_error=0.4)
    fog = {part.severity: 1 - part.accuracy for part in report.parts if part.group == "fog"}
    theirs = alexnet().errors["fog"]
    assert report.corruption["ce"] == {"fog": pytest.approx((fog[2] + fog[5]) / (theirs[2] + theirs[5]))}
    assert report.corruption["mce"] == report.corruption["ce"]["fog"]  # extra corruptions are not in the mean
    rise = theirs[2] + theirs[5] - 2 * alexnet().clean_error
    assert report.corruption["relative_mce"] == pytest.approx((fog[2] + fog[5] - 0.8) / rise)
    assert {"fog 1", "gaussian_noise", "saturate", "spatter 3"} < set(report.missing)
    text = str(report)
    assert text.splitlines()[0].split() == ["imagenet-c", "2", "5", "mean", "CE"]
    assert re.search(r"^mean accuracy [^,]*, over the 1 of the benchmark$", text, re.MULTILINE)
    assert report.corruption["mean_error"] == pytest.approx((fog[2] + fog[5]) / 2)
    assert list(report.averaged) == ["fog"]
    assert "missing: gaussian_noise, shot_noise" in text
    assert text.count("note: imagenet-c: classes without pictures: n01491361, n01494475, n01496331 and 994 more") == 1
    assert text.count("without pictures") == 1
    baseline = Baseline(name="worse", errors={"fog": {2: 1.0, 5: 1.0}, "snow": {1: 1.0}})
    other = evaluate_shift(model(**KNOWING), f"imagenet-c:{tmp_path}", data=DATA, baseline=baseline)
    assert other.corruption["mce"] == pytest.approx((fog[2] + fog[5]) / 2)


@pytest.mark.parametrize("letter", ["a", "r"])
def test_of_a_subset_only_its_logits_count(tmp_path: Path, letter: str) -> None:
    write_pictures(tmp_path, imagenet_classes(letter)[::40], each=2)
    net, shift = model(**KNOWING), open_shift(f"imagenet-{letter}:{tmp_path}")
    report = evaluate_shift(net, shift, data=DATA)
    images = shift.parts[0].open()
    pixels = torch.stack([torch.from_numpy(_array(images.read(i)[0])) for i in range(len(images))]) / 255
    logits = net(pixels)[:, list(subset_columns(letter))]
    found = report.ledger.rows(f"imagenet-{letter}")
    order = images.keys.argsort()
    assert torch.equal(found["prediction"].long(), logits.argmax(-1)[order])
    torch.testing.assert_close(found["confidence"], logits.softmax(-1).amax(-1)[order])
    assert int(found["label"].max()) < 200
    (score,) = report.parts
    assert score.accuracy == float((logits.argmax(-1) == torch.tensor([f[1] for f in images.files])).double().mean())
    low, high = score.intervals["aurra"]
    assert low <= score.aurra <= high
    assert report.remarks[0].startswith(f"imagenet-{letter}: {len(images)} images are too few for bins of 100")


def test_images_from_outside_are_told_from_known_ones_by_three_scores(tmp_path: Path) -> None:
    classes = imagenet_classes("o")[:4]
    write_pictures(tmp_path / "o", classes, each=3, seed=1)
    write_pictures(tmp_path / "val", classes, each=2, seed=2)
    spec = f"imagenet-o:{tmp_path / 'o'},validation={tmp_path / 'val'}"
    report = evaluate_shift(model(**KNOWING), spec, data=DATA)
    out, known = (report.ledger.rows(part.name) for part in report.parts)
    for score, column in (("max softmax", "confidence"), ("max logit", "max_logit"), ("energy", "energy")):
        found = report.detection[score]
        assert found["auroc"] == detect(-out[column], -known[column]).auroc
        slow = (out[column][:, None] < known[column]).double().mean()
        assert found["auroc"] == pytest.approx(float(slow))
        low, high = found["intervals"]["auroc"]
        assert low <= found["auroc"] <= high
    assert report.parts[0].accuracy is None
    assert report.parts[0].outside
    assert "from outside, no right answers" in str(report)
    assert "FPR95" in str(report)


def test_cropped_images_are_resized_and_others_cropped_as_the_model_says(tmp_path: Path) -> None:
    write_pictures(tmp_path, CLASSES[:1], size=16)
    images = open_shift(f"imagenet-sketch:{tmp_path}").parts[0].open()
    size = {"input_size": (3, 8, 8), "crop_pct": 0.5, "interpolation": "bilinear"}
    with process_group("cpu") as process:
        for cropped, crop in ((True, 1.0), (False, 0.5)):
            loader = shift_loader(images, torch.arange(1), DATA, size, process, cropped=cropped)
            ((x, _),) = loader
            expected = eval_transform(resolve(replace(DATA, crop_pct=crop), size))(images.read(0)[0])
            torch.testing.assert_close(x[0], expected.float() / 255)


@pytest.fixture(scope="module")
def digits_c(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three parts of six pictures in two batches each."""
    root = tmp_path_factory.mktemp("digits-c")
    classes = [str(digit) for digit in range(10)]
    write_corrupted(root, ["fog"], [1, 2, 3], classes)
    return root


@pytest.fixture(scope="module")
def undisturbed(digits_c: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    evaluate_shift(model(), f"folder-c:{digits_c}", data=DATA, folder=folder)
    return folder


def assert_same(one: Path, other: Path) -> None:
    assert rows(one).keys() == {"fog 1", "fog 2", "fog 3"}
    assert_same_rows(one, other, atol=1e-6)
    reports = [json.loads((folder / "report.json").read_text()) for folder in (one, other)]
    assert reports[0]["corruption"] == reports[1]["corruption"]


@pytest.mark.parametrize("calls", [0, 2, 4, 8])
def test_killed_at_any_batch_nothing_is_judged_twice_or_lost(
    calls: int, digits_c: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = f"folder-c:{digits_c}"
    with monkeypatch.context() as patch:
        before = answers_until(patch, calls)
        with pytest.raises(Stop):
            evaluate_shift(model(), spec, data=DATA, folder=tmp_path)
    with monkeypatch.context() as patch:
        asked = answers_until(patch, 99)
        evaluate_shift(model(), spec, data=DATA, folder=tmp_path)
    assert sum(before) + sum(asked) == 30
    assert_same(tmp_path, undisturbed)
    with monkeypatch.context() as patch:
        assert answers_until(patch, 0) == []  # a third time there is nothing left to ask
        evaluate_shift(model(), spec, data=DATA, folder=tmp_path)


def test_parts_that_come_later_join_those_that_are_done(
    digits_c: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift = open_shift(f"folder-c:{digits_c}")
    evaluate_shift(model(), replace(shift, parts=shift.parts[1:2]), data=DATA, folder=tmp_path)
    with monkeypatch.context() as patch:
        asked = answers_until(patch, 99)
        evaluate_shift(model(), shift, data=DATA, folder=tmp_path)
    assert sum(asked) == 20
    assert_same(tmp_path, undisturbed)


def _share(rank: int, root: str, folder: str) -> None:
    with process_group("cpu") as process:
        evaluate_shift(model(), f"folder-c:{root}", data=DATA, folder=folder, process=process)


def test_two_processes_share_the_images_and_write_one_ledger(digits_c: Path, undisturbed: Path, tmp_path: Path) -> None:
    in_two_processes(_share, str(digits_c), str(tmp_path))
    assert_same(tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("net", "settings", "letter"),
    [
        (model(seed=1), {}, "weights was"),
        (model(), {"data": replace(DATA, crop_pct=0.5)}, "data.crop_pct was not noted, now 0.5"),
        (model(), {"temperature": 2.0}, "temperature was not noted, now 2.0"),
    ],
    ids=["weights", "crop", "temperature"],
)
def test_the_ledger_of_another_evaluation_is_refused(
    net: Any, settings: dict[str, Any], letter: str, digits_c: Path, undisturbed: Path
) -> None:
    with pytest.raises(RunError, match=f"holds the ledger of another evaluation: .*{letter}"):
        evaluate_shift(net, f"folder-c:{digits_c}", folder=undisturbed, **{"data": DATA, **settings})


def test_images_that_changed_between_two_halves_are_refused(digits_c: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(digits_c, tmp_path / "c")
    shift = open_shift(f"folder-c:{copy}")
    evaluate_shift(model(), replace(shift, parts=shift.parts[:1]), data=DATA, folder=tmp_path / "out")
    file = next(path for path in sorted((copy / "fog" / "1").rglob("*")) if path.is_file())
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunError, match="holds rows of other images of fog 1: contents were"):
        evaluate_shift(model(), open_shift(f"folder-c:{copy}"), data=DATA, folder=tmp_path / "out")


def test_a_temperature_adds_confidences_of_its_own(digits_c: Path) -> None:
    net = model()
    report = evaluate_shift(net, f"folder-c:{digits_c}", data=DATA, temperature=2.5)
    plain = evaluate_shift(net, f"folder-c:{digits_c}", data=DATA)
    assert report.temperature == 2.5
    found = report.ledger.rows("fog 1")
    assert bool((found["tempered"] < found["confidence"]).all())
    assert report.parts[0].accuracy == plain.parts[0].accuracy
    expected = expected_error(EqualWidth()(found["tempered"], found["correct"]))
    assert report.parts[0].calibration["ece_tempered"] == expected
    assert report.parts[0].calibration["ece"] == plain.parts[0].calibration["ece"]


def test_a_limit_takes_the_same_files_of_every_part(digits_c: Path) -> None:
    report = evaluate_shift(model(), f"folder-c:{digits_c}", data=replace(DATA, val_num_samples=4))
    first, *others = [report.ledger.rows(part.name)["id"] for part in report.parts]
    keys = open_shift(f"folder-c:{digits_c}").parts[0].open().keys
    assert torch.equal(first, keys.sort().values[:4])
    assert all(torch.equal(first, other) for other in others)


def test_a_report_is_read_as_it_was_saved(digits_c: Path, tmp_path: Path) -> None:
    report = evaluate_shift(model(), f"folder-c:{digits_c}", data=DATA, folder=tmp_path, clean_error=0.25)
    again = load_shift_report(tmp_path / "report.json")
    assert again == report
    baseline = again.as_baseline("first")
    assert baseline.clean_error == 0.25
    assert baseline.errors["fog"][2] == 1 - report.accuracies["fog"][2]
    (tmp_path / "report.json").write_text('{"name": "x"}')
    with pytest.raises(DataError, match=r"report.json is not the report of a shift"):
        load_shift_report(tmp_path / "report.json")


def test_models_that_do_not_fit_are_refused(tmp_path: Path, digits_c: Path) -> None:
    write_pictures(tmp_path, CLASSES[:1])
    bare = torch.nn.Sequential(model()).eval()
    with pytest.raises(
        DataError, match=r"imagenet-sketch needs a model that knows its 1000 classes .* answers with 10"
    ):
        evaluate_shift(model(), f"imagenet-sketch:{tmp_path}", data=DATA)
    with pytest.raises(DataError, match="answers with 10"):  # found out by asking
        evaluate_shift(bare, f"imagenet-sketch:{tmp_path}", data=DATA, input_size=(3, 8, 8))
    with pytest.raises(ConfigError, match="give input_size="):
        evaluate_shift(bare, f"folder-c:{digits_c}")
    with pytest.raises(ConfigError, match="train mode"):
        evaluate_shift(model().train(), f"folder-c:{digits_c}")


@pytest.mark.parametrize(
    ("images", "numbers", "letter"),
    [
        (
            14,
            set(),
            "14 images are too few for bins of 100 and for 15 bins of equal mass, so it has no RMS error and no",
        ),
        (15, {"ece_adaptive"}, "15 images are too few for bins of 100, so it has no RMS error. Other parts with fewer"),
        (100, {"ece_adaptive", "rms", "rms_as_released"}, None),
    ],
)
def test_fewer_images_than_bins_leave_numbers_out_and_say_so(
    images: int, numbers: set[str], letter: str | None, tmp_path: Path
) -> None:
    report = evaluate_shift(model(), f"cifar-10-c:{write_arrays(tmp_path, ['fog'], images=images)}", data=DATA)
    assert all(part.calibration.keys() == {"ece", "mce"} | numbers for part in report.parts)
    said = [remark for remark in report.remarks if "too few" in remark]
    assert len(said) == (letter is not None)
    assert all(remark.startswith(f"fog 1: {letter}") and remark.endswith("than 100: 4.") for remark in said)


def test_class_folders_that_the_model_does_not_know_are_named(tmp_path: Path) -> None:
    write_corrupted(tmp_path, ["fog"], [1], [*map(str, range(10)), "junk"])
    letter = r"its 11 classes \(0, 1, .*, 9, junk\) in their order; .* answers with 10. Correct the class folders, or"
    with pytest.raises(DataError, match=letter):
        evaluate_shift(model(), f"folder-c:{tmp_path}", data=DATA)


def test_broken_pictures_are_an_error_or_skipped_and_named(digits_c: Path, tmp_path: Path) -> None:
    write_corrupted(tmp_path, ["fog"], [1], [str(digit) for digit in range(10)])
    (tmp_path / "fog" / "1" / "3" / "000.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"3/000.png cannot be decoded"):
        evaluate_shift(model(), f"folder-c:{tmp_path}", data=DATA)
    report = evaluate_shift(model(), f"folder-c:{tmp_path}", data=replace(DATA, broken="skip"))
    assert report.parts[0].n == 9
    assert any("fog 1: 1 image(s) could not be read" in remark for remark in report.remarks)


def test_parts_that_lack_other_classes_share_a_line(tmp_path: Path) -> None:
    write_corrupted(tmp_path / "c", ["fog"], [1, 2, 3], CLASSES[:4])
    write_corrupted(tmp_path / "c", ["snow"], [1], CLASSES[:1])
    write_pictures(tmp_path / "c" / "fog" / "2", ["n00000000"])
    report = evaluate_shift(model(**KNOWING), f"imagenet-c:{tmp_path / 'c'}", data=DATA, folder=tmp_path / "out")
    about = [remark for remark in report.remarks if "too few" not in remark]
    assert sorted(about) == [
        "imagenet-c/fog 2: left out, not a class of it: n00000000.",
        "imagenet-c: classes without pictures: n01443537, n01484850, n01491361 and 996 more.",
    ]
    again = evaluate_shift(model(**KNOWING), f"imagenet-c:{tmp_path / 'c'}", data=DATA, folder=tmp_path / "out")
    assert again.remarks == report.remarks  # nothing is judged, all is said
