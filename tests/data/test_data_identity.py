"""What a set of images is: other names, sizes, labels or contents are noticed, another place or time is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pictures import write_image

from vitruvius.data import DataConfig, TensorSet, eval_loader, train_loader
from vitruvius.data.base import open_data
from vitruvius.data.identity import changes, digest_of, hash_tensors, identify, identity_of
from vitruvius.data.sources.torchvision import TorchvisionImages

SIZE = (3, 16, 16)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for number in range(6):
            write_image(tmp_path / "data" / split / f"c{number % 2}" / f"{number}.png", number)
    return tmp_path / "data"


def of_folder(root: Path) -> dict[str, str]:
    return identify(open_data(DataConfig(dataset="folder", root=str(root)), "val", SIZE))


def test_a_folder_may_lie_elsewhere(root: Path, tmp_path: Path) -> None:
    before = of_folder(root)
    shutil.copytree(root, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    moved = of_folder(tmp_path / "elsewhere")
    assert changes(before, moved) == []
    assert digest_of(before) == digest_of(moved)


def test_a_file_of_other_bytes_and_the_same_size_is_noticed(root: Path) -> None:
    before = of_folder(root)
    file = root / "val" / "c0" / "2.png"
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    times = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert [said.partition(" ")[0] for said in changes(before, of_folder(root))] == ["contents"]


def test_other_names_sizes_labels_and_numbers_are_noticed(root: Path) -> None:
    before = of_folder(root)
    (root / "val" / "c0" / "2.png").rename(root / "val" / "c0" / "3.png")
    assert "names" in " ".join(changes(before, of_folder(root)))
    (root / "val" / "c0" / "3.png").rename(root / "val" / "c1" / "2.png")
    assert "labels" in " ".join(changes(before, of_folder(root)))
    with (root / "val" / "c0" / "0.png").open("ab") as file:
        file.write(b"x")
    assert "sizes" in " ".join(changes(before, of_folder(root)))
    (root / "val" / "c1" / "2.png").unlink()
    assert changes(before, of_folder(root))[0] == "images were 6, are 5"


def test_images_in_memory_are_hashed_to_the_last_bit() -> None:
    images = torch.rand(5, 3, 4, 4)
    labels = torch.tensor([0, 1, 2, 1, 0])

    def of(images: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor | None = None) -> dict[str, str]:
        return identify(TensorSet(name="x", images=images, labels=labels, num_classes=3), ids)

    before = of(images, labels)
    assert changes(before, of(images.clone(), labels.clone())) == []
    other = images.clone()
    other[3, 1, 2, 0] += 1e-6
    assert [said.partition(" ")[0] for said in changes(before, of(other, labels))] == ["contents"]
    swapped = labels[[1, 0, 2, 3, 4]]  # with the same sum
    assert [said.partition(" ")[0] for said in changes(before, of(images, swapped))] == ["labels"]
    assert changes(of(images, labels, torch.arange(4)), of(images, labels, torch.tensor([0, 1, 2, 4])))


def test_loaders_know_what_they_give_out_whatever_is_cached(root: Path) -> None:
    settings: dict[str, Any] = {"dataset": "folder", "root": str(root), "batch_size": 2, "workers": 0}
    held, read = (
        identity_of(eval_loader(DataConfig(**settings, cache=cache), input_size=SIZE)) for cache in ("memory", "none")
    )
    assert held == read
    assert held["images"] == "6"
    smaller = identity_of(eval_loader(DataConfig(**settings), input_size=(3, 12, 12)))
    assert [said.partition(" ")[0] for said in changes(held, smaller)] == ["preprocessing"]
    mixed = DataConfig(**settings, mix={"dataset": "folder", "root": str(root), "fraction": 0.5})
    both = identity_of(train_loader(mixed, input_size=SIZE, seed=0))
    assert both["images"] == "6 + 6"


def test_of_torchvision_arrays_are_hashed_and_other_sets_looked_at() -> None:
    class Held:
        def __init__(self, pixels: Any, targets: list[int]) -> None:
            self.data = pixels
            self.targets = targets

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("the array is enough")

    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    before = identify(TorchvisionImages(Held(pixels, [0, 1, 2, 0, 1, 2]), "t", 3))
    other = pixels.copy()
    other[5, 3, 3, 2] ^= 1
    now = identify(TorchvisionImages(Held(other, [0, 1, 2, 0, 2, 1]), "t", 3))
    assert [said.partition(" ")[0] for said in changes(before, now)] == ["labels", "contents"]


def test_a_stream_has_a_number_and_a_foreign_loader_nothing() -> None:
    assert identity_of(SimpleNamespace(num_images=7)) == {"images": "7"}
    assert identity_of([]) == {}


def test_a_single_number_out_of_a_wider_table_has_a_hash() -> None:
    label = torch.arange(6).view(2, 3)[:1, 1]  # of one number, with a stride of three
    assert hash_tensors(label) == hash_tensors(torch.tensor([1]))
    assert hash_tensors(label) != hash_tensors(torch.tensor([2]))
