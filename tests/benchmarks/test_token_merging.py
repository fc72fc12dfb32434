"""benchmarks/token_merging.py: images in one file, and judges that know what is right."""

from __future__ import annotations

import importlib.util
import io
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

FILE = Path(__file__).parents[2] / "benchmarks" / "token_merging.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("token_merging", FILE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["token_merging"] = made
    spec.loader.exec_module(made)
    return made


def write_archive(path: Path, split: str, classes: list[str], each: int) -> Path:
    with tarfile.open(path, "w") as tar:
        for place, name in enumerate(classes):
            for number in range(each):
                buffer = io.BytesIO()
                Image.new("RGB", (16, 16), (40 * place, 10 * number, 90)).save(buffer, "JPEG")
                member = tarfile.TarInfo(f"{split}/{name}/{number}.JPEG")
                member.size = buffer.tell()
                buffer.seek(0)
                tar.addfile(member, buffer)
    return path


def test_what_is_packed_is_read_again(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classes = ["cat", "dog"]
    archives = [write_archive(tmp_path / f"{split}.tar", split, classes, 3) for split in ("train", "val")]
    script.pack(archives, tmp_path / "images.npz", 2, 1)
    assert "6 images of 2 classes" in capsys.readouterr().out
    images = script.read_images(tmp_path / "images.npz", 16)
    assert images.pixels.shape == (6, 3, 16, 16)
    assert images.labels.tolist() == [0, 0, 1, 1, 0, 1]
    assert images.trains.tolist() == [True] * 4 + [False] * 2
    assert abs(int(images.pixels[2, 0, 0, 0]) - 40) <= 2
    with pytest.raises(SystemExit, match="no JPEG"):
        script.pack([], tmp_path / "none.npz", 1, 1)


def test_both_judges_are_right_about_features_that_tell_the_classes(script: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = np.arange(120) % 3
    features = torch.eye(3)[labels] + 0.1 * torch.randn(120, 3, generator=generator)
    trains = np.arange(120) < 60
    images = script.Images(torch.zeros(120, 3, 1, 1), labels, trains)
    assert script.judge(features, images) == {"knn": 100.0, "linear": 100.0}
    lost = script.judge(torch.randn(120, 3, generator=generator), images)
    assert max(lost.values()) < 70
