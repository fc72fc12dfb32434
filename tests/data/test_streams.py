"""Streams: every image once in evaluation, nothing lost unnoticed, the same again after a restart."""

from __future__ import annotations

import importlib
import io
import json
import logging
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from pictures import same

from own_formats import Reader, picture
from vitruvius._errors import ConfigError, DataError, MissingExtra
from vitruvius.data import DataConfig, eval_loader, train_loader
from vitruvius.data.base import data_sources
from vitruvius.data.loading import held_out
from vitruvius.data.preprocessing import eval_transform, resolve, train_transform
from vitruvius.data.sources.streams import Share, Stream, StreamLoader

SIZE = {"input_size": (3, 8, 8), "interpolation": "bilinear", "crop_pct": 1.0}


def stream(reader):
    return Stream(name="wds/test/validation", reader=reader, num_classes=3)


def evaluate(number=11, rank=0, world_size=1, lost=(), **settings):
    config = DataConfig(dataset="wds/test", batch_size=4, **{"workers": 0, **settings})
    share = Share(training=False, rank=rank, world_size=world_size)
    transform = eval_transform(resolve(config, SIZE))
    return StreamLoader(stream(Reader(number, lost=lost)), share, transform, config, "cpu")


def train(number=24, rank=0, world_size=1, seed=0, **settings):
    config = DataConfig(dataset="wds/test", batch_size=4, reprob=0.5, **{"workers": 0, **settings})
    share = Share(training=True, seed=seed, rank=rank, world_size=world_size)
    transform = train_transform(config, resolve(config, SIZE))
    return StreamLoader(stream(Reader(number, training=True)), share, transform, config, "cpu")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_reads_each_image_once_in_all_processes_together(world_size, workers):
    seen = []
    for rank in range(world_size):
        loader = evaluate(rank=rank, world_size=world_size, workers=workers)
        batches = list(loader.with_ids())
        assert len(batches) == len(loader)
        for images, labels, ids in batches:
            for image, label, number in zip(images, labels, ids.tolist(), strict=True):
                pixels = torch.from_numpy(np.array(picture(number))).movedim(-1, 0) / 255
                assert torch.equal(image, pixels)
                assert label == number % 3
            seen += ids.tolist()
    assert sorted(seen) == list(range(11))


def test_images_that_a_reader_drops_are_an_error_or_a_warning(caplog):
    with pytest.raises(DataError, match=r"wds/test/validation lacks 2 of its images; .*data\.broken=skip"):
        list(evaluate(lost=(3, 4)))
    with caplog.at_level(logging.WARNING):
        assert sum(len(labels) for _, labels in evaluate(lost=(3, 4), broken="skip")) == 9
    assert "lacks 2 of its images" in caplog.text


def test_training_batches_repeat_by_epoch_and_can_be_resumed():
    loader = train()
    loader.set_epoch(1)
    whole = list(loader.with_ids())
    assert len(whole) == len(loader) == 6
    for images, _, _ in whole:
        assert images.min() >= 0
        assert images.max() <= 1
    again = train()
    again.set_epoch(1, start_batch=4)
    assert same(list(again.with_ids()), whole[4:])
    again.set_epoch(2)
    assert not same(list(again.with_ids()), whole)


def test_training_processes_read_different_images():
    parts = [train(rank=rank, world_size=2, no_aug=True) for rank in (0, 1)]
    assert [len(part) for part in parts] == [3, 3]
    images = torch.cat([image for part in parts for image, _ in part])
    assert len(images.flatten(1).unique(dim=0)) == 24
    ids = torch.cat([ids for part in parts for _, _, ids in part.with_ids()])
    assert len(ids.unique()) == 24


def test_training_with_workers_repeats(folder):
    first, second = (list(train(workers=2, seed=3).with_ids()) for _ in range(2))
    assert len(first) == 6
    assert same(first, second)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    list(train())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("dataset", "package", "extra"),
    [
        ("tfds/cifar10", "tensorflow_datasets", "tfds"),
        ("wds/imagenet", "webdataset", "wds"),
        ("hfds/cifar10", "datasets", "hf"),
        ("hfids/cifar10", "datasets", "hf"),
    ],
)
def test_a_missing_package_is_one_line(dataset, package, extra, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    assert dataset.partition("/")[0] in data_sources  # whose files are imported
    monkeypatch.setattr(importlib, "import_module", absent)
    config = DataConfig(dataset=dataset, root=".")
    for load in (lambda: eval_loader(config, input_size=SIZE), lambda: train_loader(config, input_size=SIZE, seed=0)):
        with pytest.raises(MissingExtra, match=rf"^{package} is not installed; run: pip install .*\[{extra}\]'$"):
            load()


def test_single_images_of_a_stream_cannot_be_chosen():
    config = DataConfig(dataset="wds/imagenet", root="/nowhere")
    with pytest.raises(DataError, match="neither chosen nor left out"):
        eval_loader(config, input_size=SIZE, only=torch.arange(3))
    with pytest.raises(DataError, match="neither chosen nor left out"):
        train_loader(config, input_size=SIZE, seed=0, exclude=torch.arange(3))
    with pytest.raises(ConfigError, match="nothing can be held out"):
        held_out(config, 0.1)


@pytest.mark.filterwarnings("default")
def test_webdataset_shards_are_read(tmp_path):
    pytest.importorskip("webdataset")
    info = {"name": "validation", "num_samples": 6, "filenames": [], "shard_lengths": []}
    for shard in range(2):
        with tarfile.open(tmp_path / f"val-{shard}.tar", "w") as file:
            for i in range(3):
                number, buffer = 3 * shard + i, io.BytesIO()
                picture(number).save(buffer, "png")
                for suffix, data in (("png", buffer.getvalue()), ("cls", str(number % 3).encode())):
                    member = tarfile.TarInfo(f"{number:04d}.{suffix}")
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
        info["filenames"].append(f"val-{shard}.tar")
        info["shard_lengths"].append(3)
    (tmp_path / "_info.json").write_text(json.dumps({"splits": {"validation": info}}))
    config = DataConfig(dataset="wds/test", root=str(tmp_path), num_classes=3, workers=0, eval_batch_size=6)
    ((images, labels, ids),) = eval_loader(config, input_size=SIZE).with_ids()
    assert ids.tolist() == list(range(6))
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert torch.equal(images[4], torch.from_numpy(np.array(picture(4))).movedim(-1, 0) / 255)


@pytest.mark.filterwarnings("default")
def test_hugging_face_folders_are_read(folder):
    pytest.importorskip("datasets")
    config = DataConfig(dataset=f"hfds/{folder}", root=str(folder / "cache"), workers=0, eval_batch_size=9)
    loader = eval_loader(config, input_size=SIZE)
    ((images, labels, ids),) = loader.with_ids()
    assert loader.num_classes == 3
    assert sorted(labels.tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert ids.tolist() == list(range(9))
    assert images.max() <= 1


@pytest.fixture
def parquet(tmp_path):
    """A data set as the hub keeps it: parquet files with images and named labels, training in two of them."""
    datasets = pytest.importorskip("datasets", reason="the extra `hf` is not installed: no Hugging Face data sets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    files = {
        "train-00000-of-00002": range(5),
        "train-00001-of-00002": range(5, 10),
        "validation-00000-of-00001": range(7),
    }
    place = tmp_path / "set" / "data"
    place.mkdir(parents=True)
    for name, numbers in files.items():
        columns = {"image": [picture(number) for number in numbers], "label": [number % 3 for number in numbers]}
        datasets.Dataset.from_dict(columns, features=features).to_parquet(place / f"{name}.parquet")
    return tmp_path / "set"


@pytest.mark.filterwarnings("default")
def test_streamed_hugging_face_sets_are_read_with_the_current_datasets(parquet):
    settings = {"dataset": f"hfids/{parquet}", "root": str(parquet / "cache"), "workers": 0, "batch_size": 2}
    config = DataConfig(**settings, eval_batch_size=4, train_num_samples=10, val_num_samples=7)
    loader = eval_loader(config, input_size=SIZE)
    batches = list(loader.with_ids())
    assert loader.num_classes == 3  # the set names them
    assert torch.cat([labels for _, labels, _ in batches]).tolist() == [number % 3 for number in range(7)]
    assert torch.cat([ids for *_, ids in batches]).tolist() == list(range(7))
    assert torch.equal(batches[0][0][2], torch.from_numpy(np.array(picture(2))).movedim(-1, 0) / 255)
    training = train_loader(config, input_size=SIZE, seed=0)
    assert len(training) == 5
    first = torch.cat([labels for _, labels in training])
    assert sorted(first.tolist()) == sorted(number % 3 for number in range(10))
    assert torch.equal(first, torch.cat([labels for _, labels in training]))
    training.set_epoch(1)
    assert len(list(training)) == 5


@pytest.mark.filterwarnings("default")
def test_two_processes_share_a_streamed_set_and_its_files_limit_the_workers(parquet):
    settings = {"dataset": f"hfids/{parquet}", "root": str(parquet / "cache"), "workers": 8, "batch_size": 1}
    config = DataConfig(**settings, train_num_samples=10, val_num_samples=7)
    assert train_loader(config, input_size=SIZE, seed=0).workers <= 2
    assert train_loader(config, input_size=SIZE, seed=0, rank=1, world_size=2).workers == 1
    alone = replace(config, workers=0)
    shares = [train_loader(alone, input_size=SIZE, seed=0, rank=rank, world_size=2) for rank in range(2)]
    images = [image for loader in shares for batch, _ in loader for image in batch]
    assert len({image.numpy().tobytes() for image in images}) == 10


@pytest.mark.filterwarnings("default")
def test_what_is_wrong_with_a_streamed_set_is_said(parquet):
    settings = {"dataset": f"hfids/{parquet}", "root": str(parquet / "cache"), "workers": 0}
    with pytest.raises(DataError, match=r"does not say how many images validation holds; say data\.val_num_samples"):
        eval_loader(DataConfig(**settings), input_size=SIZE)
    with pytest.raises(DataError, match=r"cannot open hfids/.* \(tset\)"):
        eval_loader(DataConfig(**settings, val_num_samples=7), input_size=SIZE, split="tset")
    with pytest.raises(DataError, match="cannot number the classes"):
        eval_loader(DataConfig(**settings, class_map="imagenet-1k"), input_size=SIZE)
