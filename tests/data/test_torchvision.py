"""torchvision's data sets, read from tiny files in their own formats."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
import torch
import torchvision.datasets

from vitruvius._errors import DataError
from vitruvius.data import DataConfig, eval_loader, train_loader

SIZE = {"input_size": (3, 32, 32), "interpolation": "bicubic", "crop_pct": 1.0}
NAMES = [f"class {i}" for i in range(10)]


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """CIFAR-10's format: pickled batches with checksums, 6 training images in five files, 4 test images."""
    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()
    rng = np.random.default_rng(0)

    def write(name, content):
        data = pickle.dumps(content)
        (base / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    def batch(count):
        return {"data": rng.integers(0, 256, (count, 3072), dtype=np.uint8), "labels": list(rng.integers(0, 10, count))}

    counts = (2, 1, 1, 1, 1)
    kind = torchvision.datasets.CIFAR10
    lists = [write(f"data_batch_{i + 1}", batch(count)) for i, count in enumerate(counts)]
    monkeypatch.setattr(kind, "train_list", lists)
    monkeypatch.setattr(kind, "test_list", [write("test_batch", batch(4))])
    meta = write("batches.meta", {"label_names": NAMES})
    monkeypatch.setattr(kind, "meta", {"filename": meta[0], "key": "label_names", "md5": meta[1]})
    return tmp_path


def config(root, **settings):
    return DataConfig(**{"dataset": "torch/cifar10", "root": str(root), "workers": 0, "batch_size": 2, **settings})


def test_cifar10_gives_the_pixels_and_labels_of_its_files(cifar):
    loader = eval_loader(config(cifar, eval_batch_size=4), input_size=SIZE)
    ((images, labels, ids),) = loader.with_ids()
    with (cifar / "cifar-10-batches-py" / "test_batch").open("rb") as file:
        content = pickle.load(file)
    assert torch.equal(images, torch.from_numpy(content["data"]).view(4, 3, 32, 32) / 255)
    assert labels.tolist() == content["labels"]
    assert ids.tolist() == [0, 1, 2, 3]
    assert loader.num_classes == 10
    assert loader.name == "torch/cifar10/validation"


def test_cifar10_trains_on_its_training_files(cifar):
    loader = train_loader(config(cifar, rand_crop=True, pad=4, color_jitter=0.25), input_size=SIZE, seed=0)
    assert (loader.num_images, len(loader)) == (6, 3)
    for images, _ in loader:
        assert images.shape == (2, 3, 32, 32)
        assert images.min() >= 0
        assert images.max() <= 1


def test_cifar10_in_memory_is_the_same(cifar):
    for a, b in zip(
        eval_loader(config(cifar), input_size=SIZE).with_ids(),
        eval_loader(config(cifar, cache="memory"), input_size=SIZE).with_ids(),
        strict=True,
    ):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_misspelt_split_is_not_taken_for_the_test_set(cifar):
    with pytest.raises(DataError, match="torch/cifar10 has no split 'trian'; choose train or test"):
        train_loader(config(cifar, train_split="trian"), input_size=SIZE, seed=0)


def test_a_set_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"cannot open torch/cifar10 \(validation\) in .*data\.download=true"):
        eval_loader(config(tmp_path), input_size=SIZE)
    with pytest.raises(DataError, match=r"data\.root is not set"):
        eval_loader(DataConfig(dataset="torch/cifar10"), input_size=SIZE)


def test_a_misspelt_name_gets_a_suggestion(tmp_path):
    with pytest.raises(DataError, match="no torchvision data set 'cifr10'; did you mean 'cifar10'"):
        eval_loader(config(tmp_path, dataset="torch/cifr10"), input_size=SIZE)


def test_svhn_is_read_with_its_own_splits(tmp_path, monkeypatch):
    from scipy.io import savemat

    rng = np.random.default_rng(0)
    lists = {}
    for split, count in (("train", 5), ("test", 3)):
        path = tmp_path / f"{split}_32x32.mat"
        pixels = rng.integers(0, 256, (32, 32, 3, count), dtype=np.uint8)
        savemat(path, {"X": pixels, "y": rng.integers(1, 11, (count, 1))})
        lists[split] = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", lists)
    settings = {"dataset": "torch/svhn", "eval_batch_size": 8}
    loader = eval_loader(config(tmp_path, **settings), input_size=SIZE)
    ((images, _),) = loader
    assert torch.equal(images, torch.from_numpy(pixels).permute(3, 2, 0, 1) / 255)
    assert loader.num_classes == 10
    assert train_loader(config(tmp_path, **settings), input_size=SIZE, seed=0).num_images == 5
