"""The embedded digits: real images, a split for ever, pixels, and a loader without workers."""

from __future__ import annotations

import pytest
import torch
from pictures import everything
from sklearn.datasets import load_digits

from vitruvius._errors import ConfigError, DataError
from vitruvius.data import DataConfig, eval_loader, train_loader
from vitruvius.data.loading import held_out
from vitruvius.data.sources.digits import _all_digits

SIZE = (3, 8, 8)


def plain(split, **settings):
    return eval_loader(DataConfig(**settings), input_size=SIZE, split=split)


def test_the_split_is_1437_to_360_with_36_of_each_digit():
    train, validation = plain("train"), plain("validation")
    assert (train.num_images, validation.num_images) == (1437, 360)
    assert everything(validation)[1].bincount().tolist() == [36] * 10
    assert train.num_classes == 10
    assert (train.name, validation.name) == ("digits/train", "digits/validation")


def test_the_two_parts_are_scikit_learns_images_each_once_in_order():
    original = torch.from_numpy(load_digits().images).float() / 16
    found = []
    for split in ("train", "validation"):
        images, labels, ids = everything(plain(split))
        assert torch.equal(ids, torch.arange(len(ids)))
        assert torch.equal(images[:, 0], images[:, 1])
        same = (images[:, :1] == original).flatten(2).all(-1)  # (n, 1797)
        position = same.int().argmax(1)
        assert torch.equal(labels, torch.from_numpy(load_digits().target)[position])
        assert (position.diff() > 0).all()
        found.append(position)
    assert sorted(torch.cat(found).tolist()) == list(range(1797))


def test_the_split_never_changes():
    """Pinned, as scikit-learn's numbers: results of two years are compared on the same 360 images."""
    validation = _all_digits()[2].nonzero()[:, 0]
    assert validation[:12].tolist() == [4, 7, 9, 10, 12, 16, 20, 23, 24, 25, 39, 43]
    assert validation.sum() == 323914


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_upscaled_digits_stay_in_the_unit_interval(interpolation):
    config = DataConfig(image_size=20, interpolation=interpolation)
    images, _, _ = everything(eval_loader(config, input_size=SIZE))
    assert images.shape == (360, 3, 20, 20)
    assert images.min() >= 0
    assert images.max() <= 1


def test_an_interpolation_that_tensors_lack_is_refused():
    with pytest.raises(ConfigError, match="cannot be resized by 'lanczos'"):
        everything(eval_loader(DataConfig(interpolation="lanczos"), input_size=(3, 16, 16)))


def test_one_channel_if_the_model_has_one():
    images, _, _ = everything(eval_loader(DataConfig(), input_size=(1, 8, 8)))
    assert images.shape == (360, 1, 8, 8)
    images, _, _ = everything(eval_loader(DataConfig(in_chans=1), input_size=SIZE))
    assert images.shape == (360, 1, 8, 8)


def test_training_shifts_by_at_most_one_pixel_and_never_flips():
    loader = train_loader(DataConfig(), input_size=SIZE, seed=0)
    originals, _, _ = everything(plain("train"))
    padded = torch.nn.functional.pad(originals, (1, 1, 1, 1))
    images, _, ids = everything(loader)
    shifts = torch.stack([padded[ids][:, :, r : r + 8, c : c + 8] for r in range(3) for c in range(3)], 1)
    equal = (images[:, None] == shifts).flatten(2).all(-1)  # (n, 9)
    assert equal.any(1).all()
    assert (equal.float().mean(0) > 0.07).all()  # every shift occurs, about one time in nine


def test_no_aug_gives_the_images_as_they_are():
    images, labels, ids = everything(train_loader(DataConfig(no_aug=True), input_size=SIZE, seed=0))
    originals, all_labels, _ = everything(plain("train"))
    assert torch.equal(images, originals[ids])
    assert torch.equal(labels, all_labels[ids])


def test_augmentations_of_pil_images_work_on_digits_too_and_add_nothing_unasked():
    few = {"workers": 0, "batch_size": 50, "train_num_samples": 100}
    images, _, ids = everything(train_loader(DataConfig(rotation=1e-9, **few), input_size=SIZE, seed=0))
    originals, _, _ = everything(plain("train"))
    torch.testing.assert_close(images, originals[ids], atol=0.5 / 255 + 1e-6, rtol=0)
    turned, _, _ = everything(train_loader(DataConfig(aa="rand-m9", **few), input_size=SIZE, seed=0))
    assert (turned - images).abs().mean() > 0.02


def test_an_unknown_split_is_named():
    with pytest.raises(DataError, match="digits has no split 'test'; choose 'train' or 'validation'"):
        plain("test")


def test_held_out_images_are_excluded_from_training_and_can_be_evaluated():
    config = DataConfig(batch_size=1)
    chosen = held_out(config, 0.1, seed=3)
    assert torch.equal(chosen, held_out(config, 0.1, seed=3))
    assert not torch.equal(chosen, held_out(config, 0.1, seed=4))
    assert len(chosen) == 144
    kept = train_loader(config, input_size=SIZE, seed=0, exclude=chosen)
    apart = eval_loader(config, input_size=SIZE, split="train", only=chosen)
    assert (kept.num_images, apart.num_images) == (1437 - 144, 144)
    assert sorted(everything(kept)[2].tolist() + everything(apart)[2].tolist()) == list(range(1437))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1e-9])
def test_an_impossible_fraction_is_refused(fraction):
    with pytest.raises(DataError, match="cannot hold out"):
        held_out(DataConfig(), fraction)


def test_a_limit_uses_a_fixed_random_choice():
    config = DataConfig(train_num_samples=100, val_num_samples=50, batch_size=10)
    validation = eval_loader(config, input_size=SIZE)
    ids = everything(validation)[2]
    assert validation.num_images == 50
    assert torch.equal(ids, everything(eval_loader(config, input_size=SIZE))[2])
    assert ids[-1] > 100  # not simply the first ones
    assert train_loader(config, input_size=SIZE, seed=1).num_images == 100


def test_training_images_looked_at_as_validation_images_are_training_images():
    looked_at = eval_loader(DataConfig(val_split="train"), input_size=SIZE)
    assert looked_at.num_images == 1437
