"""Numpy archives of images: layouts, splits, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitruvius._errors import DataError
from vitruvius.data import DataConfig, eval_loader, train_loader

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 2, 1, 0])


def loaded(path, split=None, **settings):
    loader = eval_loader(DataConfig(dataset="npz", root=str(path), **settings), input_size=(3, 8, 8), split=split)
    ((images, labels),) = loader
    return images, labels, loader


@pytest.mark.parametrize(
    ("names", "pixels"),
    [
        (("image", "label"), PIXELS),
        (("images", "labels"), PIXELS.transpose(0, 3, 1, 2)),
        (("image", "label"), (PIXELS / 255).astype(np.float32)),
    ],
    ids=["published", "channels first", "floats"],
)
def test_images_and_labels_come_back(tmp_path, names, pixels):
    np.savez(tmp_path / "set.npz", **{names[0]: pixels, names[1]: LABELS})
    images, labels, loader = loaded(tmp_path / "set.npz")
    torch.testing.assert_close(images, torch.from_numpy(PIXELS).movedim(-1, 1) / 255)
    assert labels.tolist() == LABELS.tolist()
    assert loader.num_classes == 3


def test_labels_in_a_column_and_grey_images_are_read(tmp_path):
    np.savez_compressed(tmp_path / "set.npz", image=PIXELS[..., 0], label=LABELS[:, None].astype(np.uint8))
    images, labels, _ = loaded(tmp_path / "set.npz")
    assert torch.equal(images[:, 1], images[:, 0])
    assert labels.tolist() == LABELS.tolist()


def test_splits_are_told_apart_by_the_names_of_the_arrays(tmp_path):
    arrays = {"x_train": PIXELS[:4], "y_train": LABELS[:4], "x_test": PIXELS[4:], "y_test": LABELS[4:]}
    np.savez(tmp_path / "set.npz", **arrays)
    assert loaded(tmp_path / "set.npz")[1].tolist() == LABELS[4:].tolist()
    assert loaded(tmp_path / "set.npz", split="test")[1].tolist() == LABELS[4:].tolist()
    config = DataConfig(dataset="npz", root=str(tmp_path / "set.npz"), batch_size=4)
    assert train_loader(config, input_size=(3, 8, 8), seed=0).num_images == 4


def test_more_classes_may_be_announced_than_appear_but_not_fewer(tmp_path):
    np.savez(tmp_path / "set.npz", image=PIXELS, label=LABELS)
    assert loaded(tmp_path / "set.npz", num_classes=10)[2].num_classes == 10
    with pytest.raises(DataError, match=r"has 3 classes, data\.num_classes says 2"):
        loaded(tmp_path / "set.npz", num_classes=2)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"picture": PIXELS}, "holds picture; expected the arrays image and label, or x_validation and y_validation"),
        ({"image": PIXELS, "label": LABELS + 0.5}, "labels have dtype float64"),
        ({"image": PIXELS, "label": LABELS[:5]}, "holds 6 images and 5 labels"),
        ({"image": PIXELS[..., :2], "label": LABELS}, r"images \(6, 8, 8, 2\), expected \(N, H, W, C\)"),
        ({"image": PIXELS.astype(np.int64), "label": LABELS}, "images are torch.int64, expected uint8"),
        ({"image": PIXELS.astype(np.float32), "label": LABELS}, "expected uint8, or floats from 0 to 1"),
        ({"image": np.array([{}] * 6), "label": LABELS}, "cannot read the images"),
    ],
)
def test_a_wrong_archive_is_explained(tmp_path, arrays, message):
    np.savez(tmp_path / "set.npz", **arrays)
    with pytest.raises(DataError, match=message):
        loaded(tmp_path / "set.npz")


def test_a_file_that_is_no_archive_is_explained(tmp_path):
    (tmp_path / "set.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"cannot read the images in .*set\.npz"):
        loaded(tmp_path / "set.npz")
    with pytest.raises(DataError, match=r"data\.root is not set"):
        eval_loader(DataConfig(dataset="npz"), input_size=(3, 8, 8))
