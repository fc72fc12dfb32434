"""Corrupted copies in the published layouts: made once, whole or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitruvius import corrupted_copies
from vitruvius._errors import ConfigError, DataError, RunError
from vitruvius.cli import main
from vitruvius.corrupted_copies import file_id, read_image, share, write_corrupted
from vitruvius.corruptions import corruptions
from vitruvius.data import DataConfig, eval_loader

CONTRAST: dict[str, Any] = {"names": ["contrast"], "workers": 1}


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


def pixels_of(file: Path) -> Any:
    with Image.open(file) as image:
        return np.array(image.convert("RGB"))


def files_below(folder: Path) -> dict[str, float]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_folder_gets_image_net_cs_layout(folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[float, float | None]] = []
    count = write_corrupted(
        str(folder),
        out=tmp_path / "out",
        severities=[1, 2],
        size=24,
        progress=lambda done, total, _="": seen.append((done, total)),
        **CONTRAST,
    )
    assert count == 6
    assert seen == [(1, 1)]
    assert sorted(files_below(tmp_path / "out")) == [
        *(f"contrast/{s}/{file}" for s in (1, 2) for file in ("cat/one.JPEG", "cat/two.jpeg", "dog/one.JPEG")),
        "corrupt.json",
    ]
    with Image.open(tmp_path / "out/contrast/2/dog/one.JPEG") as image:
        assert image.size == (24, 24)
        assert image.quantization[0][0] == 5  # 16 × 30 % rounded: the first step of the table at quality 85


def test_png_copies_hold_exactly_what_the_corruption_gives(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"size": None, "format": "png", "scale": "cifar", "workers": 1}
    write_corrupted(str(folder), out=tmp_path / "out", names=["impulse_noise"], severities=[2], **settings)
    x = torch.from_numpy(pixels_of(folder / "dog/one.JPEG")).movedim(-1, 0)[None].float() / 255
    noise = corruptions["impulse_noise"](severity=2, scale="cifar")
    wanted = noise.apply(x, ids=torch.tensor([file_id(folder / "dog/one.JPEG")]))
    stored = pixels_of(tmp_path / "out/impulse_noise/2/dog/one.png")
    assert (stored == (wanted[0] * 255).round().byte().movedim(0, -1).numpy()).all()


def test_the_random_numbers_of_a_file_belong_to_its_class_and_name() -> None:
    assert file_id(Path("/a/cat/one.png")) == file_id(Path("b/cat/one.png")) == -7021297449137120487
    assert file_id(Path("/a/dog/one.png")) != file_id(Path("/a/cat/one.png"))


def test_images_are_cropped_in_the_middle(tmp_path: Path) -> None:
    image = Image.new("RGB", (400, 200))
    image.paste((255, 0, 0), (150, 0, 250, 200))
    image.save(tmp_path / "a.png")
    red = read_image(tmp_path / "a.png", 224)[0, 0]
    assert red.shape == (224, 224)
    assert (red[:, 112] == 1).all()
    assert red[0, 0] == red[0, 223] == 0


def test_a_data_set_gets_cifar_10_cs_layout_and_equals_what_happens_on_the_fly(tmp_path: Path) -> None:
    names = ["impulse_noise", "contrast"]
    assert write_corrupted("digits", ["data.val_num_samples=12"], out=tmp_path, names=names, workers=1) == 2
    assert sorted(files_below(tmp_path)) == ["contrast.npy", "corrupt.json", "impulse_noise.npy", "labels.npy"]
    ((x, y, ids),) = eval_loader(DataConfig(val_num_samples=12), input_size=(1, 8, 8)).with_ids()
    assert ids.tolist() != list(range(12))
    assert np.load(tmp_path / "labels.npy").tolist() == 5 * y.tolist()
    stored = np.load(tmp_path / "impulse_noise.npy")
    assert (stored.shape, stored.dtype) == ((60, 8, 8, 1), np.uint8)
    x = (x * 255).round() / 255
    for severity in (1, 4):
        wanted = corruptions["impulse_noise"](severity=severity).apply(x, ids=ids)
        rows = stored[12 * (severity - 1) : 12 * severity]
        assert (rows == (wanted * 255).round().byte().movedim(1, -1).numpy()).all()
    record = json.loads((tmp_path / "corrupt.json").read_text())
    assert (record["layout"], record["seed"]) == ("arrays", 0)


def test_an_interrupted_copy_is_continued_and_computes_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    honest = corrupted_copies._copy_array

    def mortal(images: Any, ids: Any, out: Path, five: Any) -> None:
        if len(made) == 2:
            raise KeyboardInterrupt
        honest(images, ids, out, five)
        made.append(five[0].name)

    settings: dict[str, Any] = {"names": ["contrast", "fog", "brightness"], "images": 6, "workers": 1}
    monkeypatch.setattr(corrupted_copies, "_copy_array", mortal)
    with pytest.raises(KeyboardInterrupt):
        write_corrupted("digits", out=tmp_path / "out", **settings)
    monkeypatch.setattr(corrupted_copies, "_copy_array", lambda *all: (honest(*all), made.append(all[-1][0].name)))
    write_corrupted("digits", out=tmp_path / "out", **settings)
    assert made == ["fog", "brightness", "contrast"]  # in ImageNet-C's order
    write_corrupted("digits", out=tmp_path / "whole", **settings)
    for name in ("fog.npy", "brightness.npy", "contrast.npy", "labels.npy"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_folder_copy_makes_only_what_is_missing(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_corrupted(str(folder), out=out, severities=[1, 2], size=24, **CONTRAST)
    (out / "contrast/1/cat/one.JPEG").unlink()
    (out / "contrast/1/cat/.two.jpeg.123.tmp").write_bytes(b"left by a killed process")
    before = files_below(out)
    write_corrupted(str(folder), out=out, severities=[1, 2, 3], size=24, **CONTRAST)
    after = files_below(out)
    assert {name for name in after if before.get(name) != after[name]} == {
        "contrast/1/cat/one.JPEG",
        *(f"contrast/3/{file}" for file in ("cat/one.JPEG", "cat/two.jpeg", "dog/one.JPEG")),
        "corrupt.json",
    }
    assert not list(out.rglob(".*"))


def test_several_processes_write_what_one_writes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrupted_copies, "CHUNK", 1)
    seen: list[tuple[float, float | None]] = []
    settings: dict[str, Any] = {"names": ["impulse_noise"], "severities": [1, 2], "size": None}
    write_corrupted(str(folder), out=tmp_path / "one", workers=1, **settings)
    settings["progress"] = lambda done, total, _="": seen.append((done, total))
    write_corrupted(str(folder), out=tmp_path / "two", workers=2, **settings)
    for name in files_below(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_killed_worker_is_named() -> None:
    with pytest.raises(RunError, match=r"worker process was killed.*fewer --workers"):
        share(os._exit, [1], workers=2)


def test_a_copy_of_other_images_or_settings_is_refused(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image=np.zeros((4, 8, 8, 3), np.uint8), label=np.arange(4))
    np.savez(tmp_path / "b.npz", image=np.zeros((4, 8, 8, 3), np.uint8), label=np.arange(4)[::-1])
    write_corrupted("npz", [f"data.root={tmp_path}/a.npz"], out=tmp_path / "arrays", **CONTRAST)
    with pytest.raises(ConfigError, match="seed was 0, is now 3"):
        write_corrupted("npz", [f"data.root={tmp_path}/a.npz"], out=tmp_path / "arrays", seed=3, **CONTRAST)
    with pytest.raises(ConfigError, match="sha256 was"):
        write_corrupted("npz", [f"data.root={tmp_path}/b.npz"], out=tmp_path / "arrays", **CONTRAST)
    write_corrupted(str(folder), out=tmp_path / "out", severities=[1], size=24, **CONTRAST)
    file = folder / "cat" / "two.png"
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    before = files_below(tmp_path / "out")
    with pytest.raises(ConfigError, match="images was"):
        write_corrupted(str(folder), out=tmp_path / "out", severities=[1, 2], size=24, **CONTRAST)
    assert files_below(tmp_path / "out") == before


def test_a_folder_of_somebody_else_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="holds no corrupted copies"):
        write_corrupted("digits", out=tmp_path, **CONTRAST)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_bad_folders_are_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lies inside"):
        write_corrupted(str(folder), out=folder / "out", **CONTRAST)
    with pytest.raises(DataError, match="at least 4×4"):
        write_corrupted(str(folder), out=tmp_path / "out", size=3, **CONTRAST)
    with pytest.raises(ConfigError, match="for data sets by name"):
        write_corrupted(str(folder), ["data.val_split=x"], out=tmp_path / "out", **CONTRAST)
    (folder / "cat" / "one.png").write_bytes((folder / "cat" / "two.png").read_bytes())
    with pytest.raises(DataError, match="would both become one file"):
        write_corrupted(str(folder), out=tmp_path / "out", format="png", **CONTRAST)
    assert not (tmp_path / "out").exists()
    (folder / "cat" / "one.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"one\.png cannot be read as an image"):
        write_corrupted(str(folder), out=tmp_path / "out", size=24, **CONTRAST)


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere/at/all.zip"], "no folder nowhere/at/all.zip"),
        (["digits", "--corruptions", "fogg"], "did you mean 'fog'?"),
        (["digits", "--severities", "7"], "from 1 to 5"),
        (["digits", "--severities", "1,2"], "each once"),
        (["digits", "--severities", "two"], "--severities 'two'"),
        (["digits", "model.name=x"], "unknown key 'model'"),
        (["digitz"], "no data set named 'digitz'"),
        (["digits", "--images", "0"], "--images 0"),
    ],
)
def test_the_command_refuses_in_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["corrupt", *words, "--out", str(tmp_path / "out")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
