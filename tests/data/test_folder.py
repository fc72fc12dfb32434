"""Image folders: right labels, stable ids, and a clear word when something is missing or broken."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import everything, write_image
from PIL import Image

from vitruvius._errors import ConfigError, DataError
from vitruvius._random import seeded
from vitruvius.data import DataConfig, eval_loader, train_loader
from vitruvius.data.identity import identity_of
from vitruvius.data.preprocessing import posterize, resolve, train_transform

SIZE = {"input_size": (3, 16, 16), "interpolation": "bicubic", "crop_pct": 1.0}


def config(root, **settings):
    return DataConfig(**{"dataset": "folder", "root": str(root), "workers": 0, "batch_size": 4, **settings})


def evaluate(root, **settings):
    return eval_loader(config(root, **settings), input_size=SIZE)


def test_images_come_in_order_with_their_labels(folder):
    images, labels, ids = everything(evaluate(folder))
    assert images.shape == (9, 3, 16, 16)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert ids.tolist() == list(range(9))
    assert evaluate(folder).num_classes == 3


def test_pixels_are_the_files_pixels(folder):
    """20 × 16 pixels at size 16: the centre, unchanged."""
    images, _, _ = everything(evaluate(folder))
    with Image.open(folder / "val" / "bee" / "1.png") as file:
        expected = torch.from_numpy(np.array(file))[:, 2:18].movedim(-1, 0) / 255
    assert torch.equal(images[4], expected)


HEAVY = {
    "aa": "rand-m9-mstd0.5-inc1",
    "reprob": 1.0,
    "recount": 2,
    "train_interpolation": "bicubic",
    "color_jitter": 0.4,
    "rotation": 10.0,
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        HEAVY,
        {**HEAVY, "remode": "rand"},
        {"aa": "3a", "color_jitter": 0.3},
        {"aa": "augmix-m5-w4-d2"},
        {"aa": "original"},
        {"rand_crop": True, "pad": 4},
        {"pad": 2, "train_crop_mode": "rkrr"},
        {"no_aug": True, "reprob": 1.0},
        {"grayscale_prob": 0.5, "color_jitter_prob": 0.5},
    ],
    ids=lambda settings: "-".join(settings) or "default",
)
def test_augmented_images_are_pixels(folder, settings):
    loader = train_loader(config(folder, **settings), input_size=SIZE, seed=0)
    for images, labels in loader:
        assert images.dtype == torch.float32
        assert images.shape == (4, 3, 16, 16)
        assert labels.dtype == torch.int64
        assert images.min() >= 0
        assert images.max() <= 1
        assert images.max() > 0.2  # neither normalised nor divided twice


@pytest.mark.parametrize("bits", range(9))
def test_posterizing_keeps_the_highest_bits(bits):
    grey = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    expected = np.arange(256) // 2 ** (8 - bits) * 2 ** (8 - bits)
    assert np.array_equal(np.array(posterize(grey, bits)).ravel(), expected)


@pytest.mark.parametrize("policy", ["rand-m10-n8-inc1", "rand-m0-n8", "v0", "augmix-m10"])
def test_no_policy_breaks_on_posterizing_to_nothing(policy):
    """Pillow 13 refuses to keep 0 bits; timm's strongest levels ask for it."""
    settings = DataConfig(aa=policy, scale=(1.0, 1.0), ratio=(1.0, 1.0))
    transform = train_transform(settings, resolve(settings, SIZE))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    for key in range(60):
        with seeded(key):
            assert transform(image).dtype == torch.uint8


def test_bicubic_enlargement_of_black_and_white_does_not_overshoot(tmp_path):
    board = (np.indices((4, 4)).sum(0) % 2 * 255).astype(np.uint8)
    for name in ("a", "b"):
        (tmp_path / "val" / name).mkdir(parents=True)
        Image.fromarray(board).save(tmp_path / "val" / name / "board.png")
    images, _, _ = everything(evaluate(tmp_path, image_size=31))
    assert (images.min(), images.max()) == (0, 1)


def test_one_channel_for_grey_models(folder):
    images, _, _ = everything(eval_loader(config(folder), input_size=(1, 16, 16)))
    assert images.shape == (9, 1, 16, 16)


def test_labels_follow_the_training_folder_when_validation_lacks_a_class(folder):
    shutil.rmtree(folder / "val" / "bee")
    loader = evaluate(folder)
    assert everything(loader)[1].tolist() == [0, 0, 0, 2, 2, 2]
    assert loader.num_classes == 3


def test_a_class_unknown_to_the_training_folder_is_an_error(folder):
    write_image(folder / "val" / "dog" / "0.png", 0)
    with pytest.raises(DataError, match="classes that the training folder lacks: dog"):
        evaluate(folder)


def test_a_class_map_chooses_and_numbers_the_classes(folder):
    (folder / "classes.txt").write_text("cat\nzebra\nant\n")
    loader = evaluate(folder, class_map="classes.txt", num_classes=3)
    assert everything(loader)[1].tolist() == [2, 2, 2, 0, 0, 0]
    (folder / "others.txt").write_text("zebra\n")
    with pytest.raises(DataError, match=r"others\.txt names none of the folders"):
        evaluate(folder, class_map="others.txt")
    with pytest.raises(DataError, match=r"class map none\.txt is neither"):
        evaluate(folder, class_map="none.txt")


def test_the_classes_lie_directly_in_the_root_if_the_split_is_a_dot(folder):
    assert everything(evaluate(folder / "val", val_split="."))[1].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match=r"data\.root .*nowhere does not exist"):
        evaluate(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"data\.root is not set"):
        eval_loader(DataConfig(dataset="folder"), input_size=SIZE)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file is a file"):
        evaluate(tmp_path / "file")


def test_validation_never_falls_back_to_the_training_images(folder):
    shutil.rmtree(folder / "val")
    with pytest.raises(DataError, match=r"no folder for the split 'validation' .*tried validation, val, valid"):
        evaluate(folder)


def test_images_are_expected_in_one_folder_per_class(tmp_path):
    (tmp_path / "val" / "ant").mkdir(parents=True)
    (tmp_path / "val" / "ant" / "notes.txt").write_text("no image")
    with pytest.raises(DataError, match=r"no images in .*val; expected one subfolder per class"):
        evaluate(tmp_path)
    write_image(tmp_path / "val" / "0.png", 0)
    with pytest.raises(DataError, match="lie in no class; put them into one subfolder per class"):
        evaluate(tmp_path)


def test_a_wrong_number_of_classes_is_an_error(folder):
    for number in (2, 4):
        with pytest.raises(DataError, match=rf"has 3 classes, data\.num_classes says {number}"):
            evaluate(folder, num_classes=number)
    assert evaluate(folder, num_classes=3).num_classes == 3


def break_images(folder):
    """A truncated file, a text file and an empty one, by their place in the split."""
    whole = (folder / "val" / "ant" / "1.png").read_bytes()
    (folder / "val" / "ant" / "1.png").write_bytes(whole[: len(whole) // 2])
    (folder / "val" / "bee" / "0.png").write_text("I am no image")
    (folder / "val" / "cat" / "2.png").write_bytes(b"")
    return ["ant/1.png", "bee/0.png", "cat/2.png"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_an_error_that_names_the_file(folder, workers):
    break_images(folder)
    with pytest.raises(DataError, match=r"ant/1\.png cannot be decoded .*data\.broken=skip") as caught:
        everything(evaluate(folder, workers=workers))
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_broken_images_are_skipped_with_a_list_and_the_others_keep_their_ids(folder, caplog, cache):
    before, labels, _ = everything(evaluate(folder))
    broken = break_images(folder)
    loader = evaluate(folder, broken="skip", cache=cache)
    with caplog.at_level(logging.WARNING):
        images, kept_labels, ids = everything(loader)
        everything(loader)
    assert ids.tolist() == [0, 2, 4, 5, 6, 7]
    assert torch.equal(images, before[ids])
    assert torch.equal(kept_labels, labels[ids])
    assert [name[-9:] for name in loader.broken] == broken
    if cache == "none":
        assert caplog.text.count("skipped 3 broken image(s) of folder/validation") == 1


def test_a_batch_of_broken_images_only_is_left_out(folder):
    for i in range(3):
        (folder / "val" / "ant" / f"{i}.png").write_bytes(b"x")
    loader = evaluate(folder, broken="skip", batch_size=3)
    assert everything(loader)[2].tolist() == [3, 4, 5, 6, 7, 8]


def test_images_in_memory_are_those_of_the_files(folder):
    for a, b in zip(everything(evaluate(folder)), everything(evaluate(folder, cache="memory")), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cache", ["memory", "auto"])
def test_training_images_without_augmentation_do_not_depend_on_the_cache(folder, cache):
    settings = {"no_aug": True, "crop_pct": 0.5, "batch_size": 15}
    plain, kept = (
        everything(train_loader(config(folder, cache=one, **settings), input_size=SIZE, seed=0))
        for one in ("none", cache)
    )
    for a, b in zip(plain, kept, strict=True):
        assert torch.equal(a, b)


def test_images_in_memory_are_flipped_and_erased_in_training(folder):
    settings = {"cache": "memory", "batch_size": 15}
    plain = everything(train_loader(config(folder, hflip=0.0, **settings), input_size=SIZE, seed=0))
    flipped = everything(train_loader(config(folder, **settings), input_size=SIZE, seed=0))
    assert torch.equal(plain[2], flipped[2])
    mirrored = (flipped[0] == plain[0].flip(-1)).flatten(1).all(1)
    same = (flipped[0] == plain[0]).flatten(1).all(1)
    assert (mirrored ^ same).all()
    assert mirrored.any()
    assert same.any()


def test_a_set_too_large_for_memory_is_refused(folder):
    with pytest.raises(DataError, match=r"GiB in memory, this machine has"):
        evaluate(folder, cache="memory", image_size=10**6)


def test_loaders_of_files_can_be_sent_to_spawned_workers(folder):
    loader = train_loader(config(folder, **HEAVY), input_size=SIZE, seed=0)
    dataset = pickle.loads(pickle.dumps(loader._loader.dataset))
    assert torch.equal(dataset[(3, 99)].image, loader._loader.dataset[(3, 99)].image)


@pytest.mark.parametrize("name", ["folders", "folder/x", "hfds"], ids=lambda name: name.replace("/", "-"))
def test_an_unknown_data_set_is_named_with_what_is_known(name, tmp_path):
    with pytest.raises(DataError, match=r"no data set named '.*Known: "):
        eval_loader(DataConfig(dataset=name, root=str(tmp_path)), input_size=SIZE)


def test_an_unknown_policy_of_augmentation_is_refused(folder):
    with pytest.raises(ConfigError, match=r"timm cannot make the training transform.*data\.aa"):
        train_loader(config(folder, aa="nonsense"), input_size=SIZE, seed=0)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes on this system")
def test_what_is_no_file_is_a_broken_image_and_nobody_waits_for_it(folder):
    os.mkfifo(folder / "val" / "cat" / "pipe.png")
    (folder / "val" / "cat" / "loop.png").symlink_to(folder / "val" / "cat" / "loop.png")
    (folder / "val" / "loop").symlink_to(folder / "val" / "loop")
    with pytest.raises(DataError, match=r"(pipe|loop)\.png cannot be decoded"):
        list(evaluate(folder))
    loader = evaluate(folder, broken="skip")
    assert sum(len(labels) for _, labels in loader) == len(loader.order.ids) - 2
    assert [Path(name).name for name in loader.broken] == ["loop.png", "pipe.png"]
    assert identity_of(loader)["images"]
