"""JPEGs decoded by a GPU, with a stand-in for it: what it cannot decode is left to Pillow; nobody uses it unasked."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.io
from pictures import write_image
from PIL import Image
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.data import DataConfig, TensorSet, jpeg
from vitruvius.data.cache import cached
from vitruvius.data.preprocessing import resolve
from vitruvius.data.sources.folder import open_folder

SIZE = (3, 16, 20)


class Gpu:
    """Decodes by Pillow, three levels brighter so that one sees who did it; refuses a batch that it cannot read."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, files: list[Tensor]) -> list[Tensor]:
        self.batches.append(len(files))
        return [self.decode(file.numpy().tobytes()) for file in files]

    def decode(self, file: bytes) -> Tensor:
        try:
            image = Image.open(io.BytesIO(file))
            image.load()
        except OSError as error:
            raise RuntimeError("nvjpegDecode failed: 1") from error
        if image.mode == "CMYK":
            raise RuntimeError("nvjpegDecode failed: 6")
        pixels = np.array(image.convert("RGB")).clip(0, 252) + 3
        return torch.from_numpy(pixels.astype(np.uint8)).movedim(-1, 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(jpeg, "_on_gpu", made)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight images of two classes: JPEGs, one of them CMYK, one a PNG."""
    for number in range(8):
        ending = "png" if number == 3 else "jpg"
        write_image(tmp_path / "train" / f"class{number % 2}" / f"{number}.{ending}", number)
    print_ready = tmp_path / "train" / "class1" / "5.jpg"
    Image.open(print_ready).convert("CMYK").save(print_ready)
    return tmp_path


def stored(folder: Path, **settings: str) -> dict[int, tuple[Tensor, int]]:
    """Image and label in memory, by id."""
    config = DataConfig(
        dataset="folder", root=str(folder), cache="memory", scale=(0.5, 1.0), workers=0, batch_size=8, **settings
    )
    images = open_folder(config, "train", SIZE)
    data, _ = cached(images, torch.arange(len(images)), resolve(config, SIZE), config, training=True)
    assert isinstance(data, TensorSet)
    assert data.rows is not None
    rows = enumerate(data.rows.tolist())
    return {number: (data.images[row], int(data.labels[row])) for number, row in rows if row >= 0}


def test_what_the_gpu_can_decode_it_does_and_the_rest_is_left_to_pillow(folder: Path, gpu: Gpu) -> None:
    plain, by_gpu = stored(folder), stored(folder, decoder="nvjpeg")
    assert plain.keys() == by_gpu.keys() == set(range(8))
    assert [label for _, label in plain.values()] == [label for _, label in by_gpu.values()]
    brighter = [not torch.equal(by_gpu[number][0], plain[number][0]) for number in range(8)]
    assert brighter.count(False) == 2  # the PNG and the CMYK image
    assert gpu.batches == [7, *[1] * 7]  # one that fails makes the batch fail; then each alone


def test_nobody_uses_the_gpu_unasked(folder: Path, gpu: Gpu) -> None:
    stored(folder)
    assert gpu.batches == []
    assert DataConfig().decoder == "pillow"


def test_a_broken_file_is_met_by_the_workers_who_name_it(folder: Path, gpu: Gpu) -> None:
    broken = folder / "train" / "class0" / "4.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    assert len(stored(folder, decoder="nvjpeg", broken="skip")) == 7


def test_without_a_gpu_auto_says_why_and_nvjpeg_is_an_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with caplog.at_level(logging.DEBUG):
        assert len(stored(folder, decoder="auto")) == 8
    assert "Pillow decodes: there is no CUDA device" in caplog.text
    with pytest.raises(ConfigError, match="there is no CUDA device"):
        stored(folder, decoder="nvjpeg")


def test_what_the_gpu_cannot_decode_is_said(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    class Files:
        def read_bytes(self, index: int) -> tuple[bytes, int]:
            return b"", index

    assert jpeg.choose_decoder("auto", Files(), 3) is gpu
    with pytest.raises(ConfigError, match="these images are not files"):
        jpeg.choose_decoder("nvjpeg", object(), 3)
    with pytest.raises(ConfigError, match=r"the model takes 1 channel\(s\)"):
        jpeg.choose_decoder("nvjpeg", Files(), 1)
    monkeypatch.delattr(torchvision.io, "decode_jpeg")
    with pytest.raises(ConfigError, match="has no decode_jpeg"):
        jpeg.choose_decoder("nvjpeg", Files(), 3)
