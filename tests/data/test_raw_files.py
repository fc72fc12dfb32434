"""Raw bytes of images with labels beside them: read in place, by workers, beside other sets; what is refused."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import torch

from vitruvius._errors import DataError
from vitruvius._files import save_tensors
from vitruvius.data import DataConfig, eval_loader, train_loader
from vitruvius.data.base import open_data
from vitruvius.data.loading import held_out

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (12, 6, 8, 3), dtype=np.uint8)
LABELS = np.arange(12) % 4
SIZE = (3, 6, 8)


def write(folder, pixels=PIXELS, labels=LABELS):
    """As published: bytes one after the other, and a numpy file of labels."""
    (folder / "ddpm_sorted_images.bin").write_bytes(np.ascontiguousarray(pixels).tobytes())
    np.save(folder / "ddpm_sorted_labels.npy", labels)
    return str(folder / "ddpm_sorted_images.bin")


def config(root, **settings):
    return DataConfig(**{"dataset": "bin/6x8x3", "root": root, "workers": 0, "batch_size": 4, **settings})


def loaded(root, input_size=SIZE, **settings):
    loader = eval_loader(config(root, crop_pct=1.0, **settings), input_size=input_size)
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels), loader


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64])
def test_images_and_labels_come_back_in_order(tmp_path, kind):
    images, labels, loader = loaded(write(tmp_path, labels=LABELS.astype(kind)))
    assert torch.equal((images * 255).round().byte(), torch.from_numpy(PIXELS).movedim(-1, 1))
    assert labels.tolist() == LABELS.tolist()
    assert (loader.num_images, loader.num_classes, loader.name) == (12, 4, "bin/6x8x3/validation")


def test_grey_images_are_read(tmp_path):
    images, _, _ = loaded(write(tmp_path, PIXELS[..., :1]), (1, 6, 8), dataset="bin/6x8x1")
    assert torch.equal((images[:, 0] * 255).round().byte(), torch.from_numpy(PIXELS[..., 0].copy()))


def test_worker_processes_see_the_same_images(tmp_path):
    root = write(tmp_path)
    alone, helped = (
        list(train_loader(config(root, workers=workers), input_size=SIZE, seed=1).with_ids()) for workers in (0, 1)
    )
    assert len(alone) == 3
    for one, two in zip(alone, helped, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_copy_for_another_process_carries_paths_and_no_images(tmp_path):
    pixels = np.zeros((4000, 6, 8, 3), np.uint8)
    pixels[-1] = PIXELS[0]
    data = open_data(config(write(tmp_path, pixels, np.arange(4000) % 4)), "train", SIZE)
    sent = pickle.dumps(data)
    assert len(sent) < 1000
    image, label = pickle.loads(sent).read(3999)
    assert np.array_equal(np.asarray(image), PIXELS[0])
    assert label == 3


def test_what_is_done_to_an_image_is_not_done_to_the_file(tmp_path):
    data = open_data(config(write(tmp_path)), "train", SIZE)
    data.read(0)[0].putpixel((0, 0), (1, 2, 3))
    assert np.array_equal(np.asarray(data.read(0)[0]), PIXELS[0])


@pytest.mark.skipif(os.name == "nt", reason="a hole in a file takes no space elsewhere")
def test_a_set_of_the_published_size_is_opened_without_being_read(tmp_path):
    number, last = 15_402_688, RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    path = tmp_path / "cifar_ddpm_improvedddpm_sorted_images.bin"
    with path.open("wb") as file:  # a hole of 47 GB, then one image
        file.seek((number - 1) * 3072)
        file.write(last.tobytes())
    labels = np.zeros(number, np.uint8)
    labels[-1] = 9
    np.save(tmp_path / "cifar_ddpm_improvedddpm_sorted_labels.npy", labels)
    settings = config(str(path), dataset="bin/32x32x3", crop_pct=1.0)
    loader = eval_loader(settings, input_size=(3, 32, 32), only=torch.tensor([number - 1]))
    ((images, found),) = loader
    assert torch.equal((images[0] * 255).round().byte(), torch.from_numpy(last).movedim(-1, 0))
    assert (found.tolist(), loader.num_classes) == ([9], 10)
    path.unlink()


def test_half_of_every_batch_comes_from_the_file(folder, tmp_path):
    raw = write(tmp_path, np.full((9, 6, 8, 3), 200, np.uint8), np.arange(9) % 3)
    mix = {"dataset": "bin/6x8x3", "root": raw, "fraction": 0.5}
    first = {"dataset": "folder", "root": str(folder), "batch_size": 6, "no_aug": True, "mix": mix}
    seen = [list(train_loader(DataConfig(**first, workers=w), input_size=SIZE, seed=0).with_ids()) for w in (0, 1)]
    for (images, labels, ids), again in zip(*seen, strict=True):
        synthetic = ids >= 15
        assert int(synthetic.sum()) == 3
        assert ((images[synthetic] * 255).round() == 200).all()
        assert torch.equal(labels[synthetic], (ids[synthetic] - 15) % 3)
        assert torch.equal(images, again[0])


def test_a_part_of_the_file_is_cached_beside_tensors_in_memory(tmp_path):
    save_tensors(tmp_path / "real.safetensors", {"images": torch.zeros(8, 3, 6, 8), "labels": torch.arange(8) % 4}, {})
    mix = {"dataset": "bin/6x8x3", "root": write(tmp_path), "fraction": 0.25, "num_samples": 5}
    first = {"dataset": "tensors", "root": str(tmp_path / "real.safetensors"), "batch_size": 4, "crop_pct": 1.0}
    loader = train_loader(DataConfig(**first, workers=0, cache="memory", hflip=0.0, mix=mix), input_size=SIZE, seed=0)
    for images, _, ids in loader.with_ids():
        (place,) = (ids >= 8).nonzero()[:, 0].tolist()
        expected = torch.from_numpy(PIXELS[ids[place] - 8]).movedim(-1, 0)
        assert torch.equal((images[place] * 255).round().byte(), expected)


def test_a_part_can_be_held_out(tmp_path):
    assert len(held_out(config(write(tmp_path)), 0.25)) == 3


@pytest.mark.parametrize(
    ("pixels", "labels", "settings", "message"),
    [
        (PIXELS.ravel()[:-5], LABELS, {}, r"has 1,723 bytes; 12 images of 6x8x3.*have 1,728: 5 bytes are missing"),
        (
            PIXELS,
            LABELS[:11],
            {},
            r"11 images of 6x8x3, one for each label in ddpm_sorted_labels\.npy.*144 bytes are too",
        ),
        (
            PIXELS,
            LABELS,
            {"dataset": "bin/8x8x3"},
            r"12 images of 8x8x3.*have 2,304.*correct the size in data\.dataset",
        ),
        (PIXELS, LABELS, {"num_classes": 3}, r"image 3 has the label 3, expected 0 to 2, as data\.num_classes says"),
        (PIXELS, LABELS - 1, {}, r"image 0 has the label -1, expected 0 or more"),
        (PIXELS, LABELS / 2, {}, r"holds float64 \(12,\), expected at least one whole number"),
        (PIXELS, np.eye(12, dtype=int), {}, r"holds int64 \(12, 12\), expected"),
        (PIXELS[:0], LABELS[:0], {}, r"holds int64 \(0,\), expected at least one"),
        (PIXELS, np.array([{}] * 12), {}, r"cannot read the labels in .*ddpm_sorted_labels\.npy"),
        (PIXELS, LABELS, {"dataset": "bin/32"}, "'bin/32' does not say how large an image is; .*as in bin/32x32x3"),
        (PIXELS, LABELS, {"dataset": "bin"}, r"no data set named 'bin'.*Known: .*bin/…"),
        (PIXELS, LABELS, {"root": None}, r"data\.root is not set; it must name the file of raw images"),
    ],
)
def test_files_that_do_not_belong_together_are_explained(tmp_path, pixels, labels, settings, message):
    root = write(tmp_path, pixels, labels)
    with pytest.raises(DataError, match=message):
        loaded(**{"root": root, **settings})


def test_a_file_that_is_missing_or_misnamed_is_named(tmp_path):
    root = write(tmp_path)
    (tmp_path / "ddpm_sorted_labels.npy").unlink()
    with pytest.raises(DataError, match=r"no file .*ddpm_sorted_labels\.npy here"):
        loaded(root)
    (tmp_path / "pictures.bin").touch()
    with pytest.raises(DataError, match=r"pictures\.bin must be called …images\.bin"):
        loaded(str(tmp_path / "pictures.bin"))


def test_labels_beyond_the_classes_of_the_first_set_are_refused(folder, tmp_path):
    mix = {"dataset": "bin/6x8x3", "root": write(tmp_path), "fraction": 0.5}
    with pytest.raises(DataError, match=r"bin/6x8x3/train has 4 classes, folder/train 3"):
        train_loader(DataConfig(dataset="folder", root=str(folder), batch_size=4, mix=mix), input_size=SIZE, seed=0)
