"""torchvision's data sets, read from tiny files in their own formats."""

from __future__ import annotations

import hashlib
import inspect
import json
import pickle
import sys
import types

import numpy as np
import pytest
import torch
import torchvision.datasets
from pictures import write_image
from PIL import Image

from vitruvius._errors import DataError
from vitruvius.data import DataConfig, eval_loader, train_loader
from vitruvius.data.classes import read_class_map
from vitruvius.data.sources.torchvision import SETS, open_torchvision

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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_split": "trian"}, "no split 'trian'"),
        ({}, r"data\.download=true"),
        ({"root": None}, r"data\.root is not set"),
        ({"dataset": "torch/cifr10"}, "did you mean 'cifar10'"),
    ],
)
def test_what_cannot_be_opened_is_explained(settings, message, tmp_path):
    with pytest.raises(DataError, match=message):
        train_loader(
            DataConfig(**{"dataset": "torch/cifar10", "root": str(tmp_path), **settings}), input_size=SIZE, seed=0
        )


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


def test_flowers_are_read_with_their_own_splits(tmp_path, monkeypatch):
    from scipy.io import savemat

    base = tmp_path / "flowers-102"
    for number in range(1, 8):
        write_image(base / "jpg" / f"image_{number:05d}.jpg", number)
    savemat(base / "imagelabels.mat", {"labels": np.array([[5, 102, 1, 1, 2, 3, 4]])})
    savemat(
        base / "setid.mat", {"trnid": np.array([[2, 3]]), "valid": np.array([[1, 7]]), "tstid": np.array([[4, 5, 6]])}
    )
    sums = {
        key: (name, hashlib.md5((base / name).read_bytes()).hexdigest())
        for key, name in (("label", "imagelabels.mat"), ("setid", "setid.mat"))
    }
    kind = torchvision.datasets.Flowers102
    monkeypatch.setattr(kind, "_file_dict", {**kind._file_dict, **sums})
    flowers = config(tmp_path, dataset="torch/flowers102", eval_batch_size=8)
    assert [loader_labels(flowers, split) for split in ("validation", "val", "test")] == [[4, 3], [4, 3], [0, 1, 2]]
    assert loader_labels(flowers, "train") == [101, 0]
    assert eval_loader(flowers, input_size=SIZE).num_classes == 102


def loader_labels(data, split):
    return [label for _, labels in eval_loader(data, input_size=SIZE, split=split) for label in labels.tolist()]


@pytest.fixture
def caltech(tmp_path):
    """Two classes of 33 and 31 images, and the background that is no class."""
    folder = tmp_path / "caltech101" / "101_ObjectCategories"
    for name, count in (("BACKGROUND_Google", 1), ("crab", 33), ("wrench", 31)):
        for number in range(1, count + 1):
            write_image(folder / name / f"image_{number:04d}.jpg", number)
    (tmp_path / "caltech101" / "Annotations").mkdir()
    return tmp_path


def test_caltech_is_split_for_ever_into_thirty_images_a_class_and_the_rest(caltech):
    data = config(caltech, dataset="torch/caltech101", eval_batch_size=64)
    assert loader_labels(data, "train") == [0] * 30 + [1] * 30
    assert loader_labels(data, "validation") == loader_labels(data, "test") == [0] * 3 + [1]
    parts = [eval_loader(data, input_size=SIZE, split=split) for split in ("train", "test")]
    rows = [set(part.images.rows) for part in parts]
    assert not rows[0] & rows[1]
    assert rows[1] == {8, 22, 29, 61}  # pinned: these images must never move to the other side
    assert parts[0].num_classes == 2
    with pytest.raises(DataError, match="no split 'all'"):
        loader_labels(data, "all")


@pytest.fixture
def inaturalist(tmp_path):
    kinds = ("Animalia_A_B_C_D_E_e", "Animalia_A_B_C_D_E_f", "Plantae_K_L_M_N_O_p")
    for version, count in (("2021_train", 3), ("2021_train_mini", 1), ("2021_valid", 2)):
        for number, kind in enumerate(kinds):
            for i in range(count):
                write_image(tmp_path / version / f"{number:05d}_{kind}" / f"{9 - i}.jpg", i)
    return tmp_path


def test_inaturalist_is_read_by_version_and_by_rank(inaturalist):
    def data(**settings):
        return config(inaturalist, dataset="torch/inaturalist", eval_batch_size=16, **settings)

    assert loader_labels(data(), "validation") == [0, 0, 1, 1, 2, 2]
    assert loader_labels(data(), "train") == [0] * 3 + [1] * 3 + [2] * 3
    assert loader_labels(data(), "2021_train_mini") == [0, 1, 2]
    assert loader_labels(data(), "kingdom/validation") == [0, 0, 0, 0, 1, 1]
    counts = [eval_loader(data(), input_size=SIZE, split=split).num_classes for split in ("val", "kingdom/val")]
    assert counts == [3, 2]
    files = [name for _, name in eval_loader(data(), input_size=SIZE).images.dataset.index[:2]]
    assert files == ["8.jpg", "9.jpg"]  # in the order of their names, whatever the disk's
    with pytest.raises(DataError, match="one label per image"):
        loader_labels(data(), "kingdom_order/validation")


def test_classes_are_chosen_by_name_and_numbered_in_the_order_of_the_list(cifar, tmp_path):
    everything = loader_labels(config(cifar), "test")
    wanted = sorted(set(everything), reverse=True)[:2]
    (tmp_path / "classes.txt").write_text("".join(f"class {i}\n" for i in wanted))
    data = config(cifar, classes=str(tmp_path / "classes.txt"))
    assert loader_labels(data, "test") == [wanted.index(label) for label in everything if label in wanted]
    assert eval_loader(data, input_size=SIZE).num_classes == 2
    (tmp_path / "classes.txt").write_text("class 1\nunicorn\n")
    with pytest.raises(DataError, match="among them unicorn"):
        loader_labels(data, "test")


UNSPLIT = {"eurosat": "eurosat/2750/{}", "caltech256": "caltech256/256_ObjectCategories/{}"}
SPLIT = {"country211": "country211/{split}/{}", "rendered_sst2": "rendered-sst2/{split}/{}"}


@pytest.mark.parametrize("name", [*UNSPLIT, *SPLIT])
def test_more_sets_of_torchvision_are_read_from_their_folders(name, tmp_path):
    classes = {"caltech256": ("001.ak47", "002.flag"), "rendered_sst2": ("negative", "positive")}.get(name, ("a", "b"))
    validation = {"country211": "valid", "rendered_sst2": "valid"}.get(name, "")
    ending = {"rendered_sst2": "png"}.get(name, "jpg")
    for split in ("train", validation, "test"):
        for number, label in enumerate(classes, 1):
            folder = tmp_path / {**UNSPLIT, **SPLIT}[name].format(label, split=split)
            folder.mkdir(parents=True, exist_ok=True)
            for image in range(1, 6):
                write_image(folder / f"{number:03d}_{image:04d}.{ending}", image, size=(32, 32))
    settings = config(tmp_path, dataset=f"torch/{name}", eval_batch_size=64)
    loader = eval_loader(settings, input_size=SIZE)
    assert loader.num_classes == 2
    ((images, labels, _),) = loader.with_ids() if len(loader) else (([], [], []),)
    expected = {"eurosat": 2}.get(name, 10)
    if name != "caltech256":  # five images of a class are all for training there
        assert len(images) == len(labels) == expected
    assert train_loader(settings, input_size=SIZE, seed=0).num_images == {"eurosat": 8}.get(name, 10)


NOT_REACHED = {
    "one channel": "EMNIST USPS SEMEION Omniglot MovingMNIST FER2013",
    "several labels per image, and people of the test split whom training never sees": "CelebA",
    "two images per label": "LFWPairs PhotoTour",
    "no classes but texts, boxes or masks": (
        "SBU Flickr8k Flickr30k CocoCaptions CocoDetection Cityscapes VOCDetection VOCSegmentation SBDataset Kitti "
        "WIDERFace"
    ),
    "videos": "Kinetics HMDB51 UCF101",
    "depth and motion": "Sintel FlyingChairs FlyingThings3D HD1K KittiFlow",
    "not a data set of its own": (
        "DatasetFolder ImageFolder VisionDataset FakeData LSUNClass wrap_dataset_for_transforms_v2"
    ),
}
OF_TIMM = {"CIFAR10", "CIFAR100", "MNIST", "KMNIST", "FashionMNIST", "QMNIST", "INaturalist", "Places365", "ImageNet"}


def test_every_classification_set_of_torchvision_with_colours_has_a_name():
    reached = {known.kind for known in SETS.values() if known.kind is not None} | OF_TIMM
    others = {name for names in NOT_REACHED.values() for name in names.split()}
    stereo = {name for name in torchvision.datasets.__all__ if "Stereo" in name or name == "InStereo2k"}
    assert set(torchvision.datasets.__all__) == reached | others | stereo
    assert not reached & others


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("name", sorted(set(SETS) - {"lsun"}))
def test_torchvision_s_own_classes_take_what_they_are_given(name, split, tmp_path):
    with pytest.raises(DataError) as caught:  # no file is there, which is all that may be wrong
        open_torchvision(config(tmp_path, dataset=f"torch/{name}"), split, (3, 32, 32))
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeError | OSError), cause
    assert "Unknown value" not in str(cause)


def test_clevr_counts_objects_from_three_to_ten(tmp_path):
    base = tmp_path / "clevr" / "CLEVR_v1.0"
    for split, counts in (("train", (3, 5)), ("val", (10, 4, 3))):
        (base / "images" / split).mkdir(parents=True)
        (base / "scenes").mkdir(exist_ok=True)
        scenes = []
        for number, count in enumerate(counts):
            file = f"CLEVR_{split}_{number:06d}.png"
            write_image(base / "images" / split / file, number, size=(32, 32))
            scenes.append({"image_filename": file, "objects": [{}] * count})
        (base / "scenes" / f"CLEVR_{split}_scenes.json").write_text(json.dumps({"scenes": scenes}))
    settings = config(tmp_path, dataset="torch/clevr", eval_batch_size=8)
    loader = eval_loader(settings, input_size=SIZE)
    assert loader.num_classes == 8
    assert sorted(loader_labels(settings, "validation")) == [0, 1, 7]
    assert train_loader(settings, input_size=SIZE, seed=0).num_images == 2


def test_lsun_is_opened_by_its_own_words(tmp_path, monkeypatch):
    signature = inspect.signature(torchvision.datasets.LSUN.__init__)
    asked = []

    class Scenes:
        classes = ("bedroom_val", "bridge_val")

        def __init__(self, *args, **kwargs):
            asked.append(signature.bind(self, *args, **kwargs).arguments["classes"])

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return Image.new("RGB", (32, 32)), index % 2

    monkeypatch.setattr(torchvision.datasets, "LSUN", Scenes)
    monkeypatch.setitem(sys.modules, "lmdb", types.ModuleType("lmdb"))
    data = config(tmp_path, dataset="torch/lsun")
    assert loader_labels(data, "validation") == [0, 1, 0, 1]
    assert train_loader(data, input_size=SIZE, seed=0).num_classes == 2
    assert asked == ["val", "train"]
    with pytest.raises(DataError, match="cannot download LSUN"):
        loader_labels(config(tmp_path, dataset="torch/lsun", download=True), "validation")
    with pytest.raises(DataError, match="no split 'trian'"):
        loader_labels(data, "trian")


def test_caltech_is_numbered_as_tensorflow_does_where_a_model_wants_it(caltech):
    data = config(caltech, dataset="torch/caltech101", class_map="caltech-102", eval_batch_size=64)
    loader = eval_loader(data, input_size=SIZE)
    assert loader.num_classes == 102
    names = {number: name for name, number in read_class_map("caltech-102", caltech).items()}
    called = {names[label] for _, labels, _ in loader.with_ids() for label in labels.tolist()}
    assert called <= {folder.name for folder in (caltech / "caltech101" / "101_ObjectCategories").iterdir()}
