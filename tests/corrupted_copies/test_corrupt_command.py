"""`vitruvius corrupt`: copies in the published layouts, made once, whole or absent."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitruvius._errors import ConfigError, DataError, RunError
from vitruvius.cli import main
from vitruvius.corrupted_copies import arrays as arrays_module
from vitruvius.corrupted_copies import folders as folders_module
from vitruvius.corrupted_copies._work import share
from vitruvius.corrupted_copies.arrays import copy_arrays
from vitruvius.corrupted_copies.folders import copy_folder, cropped, encoded, file_id
from vitruvius.corruptions import Corruption, corruption_grid, corruptions
from vitruvius.data import DataConfig, eval_loader

PAIR = [corruptions[name](severity=severity) for name in ("contrast", "impulse_noise") for severity in (1, 2, 3, 4, 5)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes with three images of different sizes and kinds, and a file that is none."""
    dice = np.random.default_rng(0)
    for name, size in {"cat/one.JPEG": (40, 30), "cat/two.png": (30, 30), "dog/one.JPEG": (33, 50)}.items():
        file = tmp_path / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(dice.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(file)
    (tmp_path / "data" / "cat" / "notes.txt").write_text("nobody's")
    return tmp_path / "data"


@pytest.fixture
def small() -> tuple[Any, Any]:
    dice = np.random.default_rng(1)
    return dice.integers(0, 256, (7, 12, 12, 3), dtype=np.uint8), np.arange(7) % 3


def pixels_of(file: Path) -> Any:
    with Image.open(file) as image:
        return np.array(image.convert("RGB"))


def files_below(folder: Path) -> dict[str, float]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_folder_gets_image_net_cs_layout(folder: Path, tmp_path: Path) -> None:
    count = copy_folder(folder, tmp_path / "out", PAIR[:2], size=24)
    assert count == 6
    assert sorted(files_below(tmp_path / "out")) == [
        *(f"contrast/{s}/{file}" for s in (1, 2) for file in ("cat/one.JPEG", "cat/two.jpeg", "dog/one.JPEG")),
        "corrupt.json",
    ]
    assert pixels_of(tmp_path / "out/contrast/2/dog/one.JPEG").shape == (24, 24, 3)


def test_png_copies_hold_exactly_what_the_corruption_gives(folder: Path, tmp_path: Path) -> None:
    noise = corruptions["impulse_noise"](severity=2, scale="cifar")
    copy_folder(folder, tmp_path / "out", [noise], size=None, format="png")
    x = torch.from_numpy(pixels_of(folder / "dog/one.JPEG")).movedim(-1, 0)[None].float() / 255
    wanted = noise.apply(x, ids=torch.tensor([file_id("dog/one.JPEG")]))
    found = pixels_of(tmp_path / "out/impulse_noise/2/dog/one.png")
    assert (found == (wanted[0] * 255).round().byte().movedim(0, -1).numpy()).all()


def test_images_are_cropped_in_the_middle() -> None:
    image = Image.new("RGB", (400, 200))
    image.paste((255, 0, 0), (150, 0, 250, 200))
    middle = np.asarray(cropped(image, 224))
    assert middle.shape == (224, 224, 3)
    assert (middle[:, 112, 0] == 255).all()
    assert middle[0, 0, 0] == middle[0, 223, 0] == 0


def test_jpeg_copies_have_quality_85() -> None:
    pixels = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    read = Image.open(io.BytesIO(encoded(pixels, "jpeg")))
    assert read.quantization[0][0] == 5  # 16 × 30 % rounded: the first step of the table at quality 85


def test_small_images_get_cifar_10_cs_layout_and_equal_those_on_the_fly(small: tuple[Any, Any], tmp_path: Path) -> None:
    images, labels = small
    assert copy_arrays(images, labels, tmp_path / "out", PAIR) == 2
    assert sorted(files_below(tmp_path / "out")) == ["contrast.npy", "corrupt.json", "impulse_noise.npy", "labels.npy"]
    stored = np.load(tmp_path / "out/impulse_noise.npy")
    assert (stored.shape, stored.dtype) == ((35, 12, 12, 3), np.uint8)
    assert np.load(tmp_path / "out/labels.npy").tolist() == labels.tolist() * 5
    x = torch.from_numpy(images).movedim(-1, 1).float() / 255
    wanted = corruptions["impulse_noise"](severity=4)(None, x, None, ids=torch.arange(7))
    assert (stored[21:28] == (wanted * 255).round().byte().movedim(1, -1).numpy()).all()
    record = json.loads((tmp_path / "out/corrupt.json").read_text())
    assert (record["layout"], record["seed"]) == ("arrays", 0)


def test_an_interrupted_copy_goes_on_and_computes_nothing_twice(
    small: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    honest = arrays_module.copy_severity

    def mortal(out: Path, ids: Any, one: Corruption) -> None:
        if len(made) == 7:
            raise KeyboardInterrupt
        honest(out, ids, one)
        made.append(one.label)

    monkeypatch.setattr(arrays_module, "copy_severity", mortal)
    with pytest.raises(KeyboardInterrupt):
        copy_arrays(*small, tmp_path / "out", PAIR)
    assert not list((tmp_path / "out").glob("contrast.npy"))
    monkeypatch.setattr(arrays_module, "copy_severity", lambda *all: (honest(*all), made.append(all[-1].label)))
    copy_arrays(*small, tmp_path / "out", PAIR)
    assert made == [one.label for one in PAIR]
    copy_arrays(*small, tmp_path / "whole", PAIR)
    for name in ("contrast.npy", "impulse_noise.npy", "labels.npy"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_folder_copy_makes_only_what_is_missing(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    copy_folder(folder, out, PAIR[:2], size=24)
    (out / "contrast/1/cat/one.JPEG").unlink()
    before = files_below(out)
    copy_folder(folder, out, PAIR[:3], size=24)
    after = files_below(out)
    assert {name for name in after if before.get(name) != after[name]} == {
        "contrast/1/cat/one.JPEG",
        *(f"contrast/3/{file}" for file in ("cat/one.JPEG", "cat/two.jpeg", "dog/one.JPEG")),
        "corrupt.json",
    }


def test_a_killed_copy_leaves_no_temporary_files_among_the_classes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill is simulated: nothing is cleaned up after the first picture."""
    out = tmp_path / "out"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        patch.setattr(os, "replace", killed)
        patch.setattr(folders_module, "claim", lambda out, _: (out / "corrupt.json").write_text("{}"))
        patch.setattr(folders_module, "claim_files", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            copy_folder(folder, out, PAIR[:1], size=24)
    assert [path.parent.name for path in out.rglob("*.tmp")] == [".parts"]
    (out / ".lock").unlink()
    copy_folder(folder, out, PAIR[:1], size=24)
    assert sorted(path.name for path in out.rglob(".*")) == []


def test_several_processes_write_what_one_writes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders_module, "CHUNK", 1)
    seen: list[tuple[int, int]] = []
    copy_folder(folder, tmp_path / "one", PAIR[5:7], size=None)
    share_many = {"workers": 2, "progress": lambda done, total: seen.append((done, total))}
    copy_folder(folder, tmp_path / "two", PAIR[5:7], size=None, **share_many)
    for name in files_below(tmp_path / "one"):
        if name != "corrupt.json":
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_killed_worker_is_named() -> None:
    with pytest.raises(RunError, match=r"a worker process was killed.*fewer --workers"):
        share(os._exit, [1], workers=2, progress=None)


def test_other_settings_in_the_same_folder_are_refused(small: tuple[Any, Any], tmp_path: Path) -> None:
    copy_arrays(*small, tmp_path / "out", PAIR[:5])
    with pytest.raises(ConfigError, match=r"seed was 0, is now 3.*Choose another folder"):
        copy_arrays(*small, tmp_path / "out", [corruptions["fog"](severity=s, seed=3) for s in (1, 2, 3, 4, 5)])
    with pytest.raises(ConfigError, match="sha256 was"):
        copy_arrays(small[0] // 2, small[1], tmp_path / "out", PAIR[:5])


def test_other_labels_or_places_of_the_images_are_refused(small: tuple[Any, Any], tmp_path: Path) -> None:
    images, labels = small
    copy_arrays(images, labels, tmp_path / "out", PAIR[:5])
    with pytest.raises(ConfigError, match=r"made otherwise \(labels was"):
        copy_arrays(images, labels[::-1], tmp_path / "out", PAIR)
    with pytest.raises(ConfigError, match=r"made otherwise \(ids was"):
        copy_arrays(images, labels, tmp_path / "out", PAIR, ids=np.arange(7) + 1)


@pytest.mark.parametrize("kind", ["size", "content"])
def test_images_that_changed_between_two_halves_of_a_copy_are_refused(kind: str, folder: Path, tmp_path: Path) -> None:
    copy_folder(folder, tmp_path / "out", PAIR[:1], size=24)
    file = folder / "cat" / "two.png"
    data = bytearray(file.read_bytes())
    if kind == "size":
        data += b"x"
    else:
        data[-20] ^= 1
    file.write_bytes(data)
    before = files_below(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"1 file\(s\) have changed since, among them cat/two\.png\. Choose another"):
        copy_folder(folder, tmp_path / "out", PAIR[:2], size=24)
    assert {name for name in before if name != "corrupt.json"} == {
        name for name in files_below(tmp_path / "out") if name != "corrupt.json"
    }


def test_images_that_came_later_are_copied_too(folder: Path, tmp_path: Path) -> None:
    copy_folder(folder, tmp_path / "out", PAIR[:1], size=24)
    (folder / "dog" / "new.png").write_bytes((folder / "cat" / "two.png").read_bytes())
    assert copy_folder(folder, tmp_path / "out", PAIR[:1], size=24) == 4
    assert (tmp_path / "out" / "contrast" / "1" / "dog" / "new.jpeg").exists()


def test_a_folder_of_somebody_else_is_not_written_into(small: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="exists and is not a corrupted copy"):
        copy_arrays(*small, tmp_path, PAIR[:5])


def test_truncated_files_of_a_copy_are_named(small: tuple[Any, Any], tmp_path: Path) -> None:
    copy_arrays(*small, tmp_path / "out", PAIR[:5])
    file = tmp_path / "out/contrast.npy"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"contrast\.npy cannot be read.*Delete it"):
        copy_arrays(*small, tmp_path / "out", PAIR[:5])
    np.save(file, np.zeros((3, 12, 12, 3), np.uint8))
    with pytest.raises(DataError, match="not five times"):
        copy_arrays(*small, tmp_path / "out", PAIR[:5])


def test_bad_folders_are_refused_with_a_remedy(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no images in the folders of .* Did you mean .*data\?"):
        copy_folder(folder.parent, tmp_path / "out", PAIR[:1])
    with pytest.raises(DataError, match="is not a folder"):
        copy_folder(tmp_path / "absent", tmp_path / "out", PAIR[:1])
    with pytest.raises(ConfigError, match="lies inside"):
        copy_folder(folder, folder / "out", PAIR[:1])
    (folder / "cat" / "one.png").write_bytes((folder / "cat" / "two.png").read_bytes())
    with pytest.raises(DataError, match=r"would both become one\.png"):
        copy_folder(folder, tmp_path / "out", PAIR[:1], format="png")
    (folder / "cat" / "one.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"one\.png cannot be read as an image"):
        copy_folder(folder, tmp_path / "new", PAIR[:1], size=24)


def test_bad_arrays_are_refused(small: tuple[Any, Any], tmp_path: Path) -> None:
    images, labels = small
    with pytest.raises(DataError, match=r"expected uint8 \(N, height, width, 1 or 3\)"):
        copy_arrays(images.astype(float), labels, tmp_path / "out", PAIR)
    with pytest.raises(DataError, match="a class for each of 7 images"):
        copy_arrays(images, labels[:5], tmp_path / "out", PAIR)
    with pytest.raises(ConfigError, match="holds 1, 2, 3, 4, 5, each once"):
        copy_arrays(images, labels, tmp_path / "out", PAIR[:3])
    assert not (tmp_path / "out").exists()


def test_the_command_writes_digits_and_says_how_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "corrupt",
        "digits",
        "--out",
        str(tmp_path / "out"),
        "--corruptions",
        "contrast,brightness",
        "--workers",
        "1",
    ]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 2 files\n"
    assert np.load(tmp_path / "out/contrast.npy").shape == (1800, 8, 8, 1)


def test_the_command_writes_a_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "corrupt",
        str(folder),
        "--out",
        str(tmp_path / "out"),
        "--corruptions",
        "fog",
        "--severities",
        "5",
        "--size",
        "keep",
    ]
    assert main([*words, "--workers", "1"]) == 0
    assert pixels_of(tmp_path / "out/fog/5/dog/one.JPEG").shape == (50, 33, 3)


def test_a_limited_copy_of_a_folder_has_the_images_that_an_evaluation_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (f"{kind}/{number}.png" for kind in ("cat2", "cat10", "dog") for number in range(11)):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "data" / name)
    words = ["corrupt", str(tmp_path / "data"), "--corruptions", "contrast", "--severities", "1,2", "--size", "keep"]
    words += ["--format", "png", "--workers", "1", "--out", str(tmp_path / "out")]
    assert main([*words, "--images", "7"]) == 0
    assert capsys.readouterr().out.endswith("out: 14 files\n")
    data = DataConfig(dataset="folder", root=str(tmp_path / "data"), val_split=".", val_num_samples=7, workers=0)
    loader: Any = eval_loader(data, input_size=(3, 8, 8))
    judged = [Path(loader.images.describe(index)) for _, _, ids in loader.with_ids() for index in ids.tolist()]
    for severity in (1, 2):
        copied = sorted((tmp_path / "out" / "contrast" / str(severity)).glob("*/*"))
        assert [path.parts[-2:] for path in copied] == sorted(path.parts[-2:] for path in judged)
    assert main([*words, "--images", "8"]) == 1
    assert "limit was 7, is now 8" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "every"), "--images", "33"]) == 0  # all there are
    assert json.loads((tmp_path / "every" / "corrupt.json").read_text())["limit"] is None
    assert main([*words[:-1], str(tmp_path / "none"), "--images", "0"]) == 1
    assert "--images 0 leaves nothing to do; give 1 or more." in capsys.readouterr().err


def test_a_limited_copy_of_a_data_set_equals_what_happens_on_the_fly(tmp_path: Path) -> None:
    words = ["corrupt", "digits", "--corruptions", "impulse_noise", "--workers", "1", "--images", "12"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    ((x, y, ids),) = eval_loader(DataConfig(val_num_samples=12), input_size=(1, 8, 8)).with_ids()
    assert ids.tolist() != list(range(12))
    assert np.load(tmp_path / "labels.npy").tolist() == 5 * y.tolist()
    moved = corruptions["impulse_noise"](severity=1).apply((x * 255).round() / 255, ids=ids)
    found = np.load(tmp_path / "impulse_noise.npy")
    assert found.shape == (60, 8, 8, 1)
    assert (found[:12] == (moved * 255).round().byte().movedim(1, -1).numpy()).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere/at/all.zip"], "no folder nowhere/at/all.zip"),
        (["digits", "--corruptions", "fogg"], "no corruption named 'fogg'; did you mean 'fog'?"),
        (["digits", "--severities", "7"], "expected a whole number from 1 to 5"),
        (["digits", "--severities", "two"], "--severities 'two' is not a whole number"),
        (["digits", "model.name=x"], "'model.name=x' says nothing about the data"),
        (["digitz"], "no data set named 'digitz'"),
        (["digits", "--images", "0"], "--images 0 leaves nothing to do; give 1 or more"),
    ],
)
def test_the_command_refuses_in_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["corrupt", *words, "--out", str(tmp_path / "out")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_grid_of_a_copy_is_the_grid_of_an_evaluation() -> None:
    assert len(corruption_grid()) == 75


def test_the_old_flag_for_the_number_of_images_still_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["corrupt", "digits", "--corruptions", "contrast", "--workers", "1", "--out", str(tmp_path / "old")]
    assert main([*words, "--limit", "5"]) == 0
    assert "--limit N is deprecated; write --images N" in capsys.readouterr().err
    assert np.load(tmp_path / "old" / "contrast.npy").shape[0] == 25
