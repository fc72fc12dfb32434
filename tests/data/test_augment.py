"""Shift, flip and erase on batches, each against a slow loop or against timm."""

from __future__ import annotations

import math

import pytest
import torch
from timm.data.random_erasing import RandomErasing

from vitruvius._random import image_keys, seeded, uniform
from vitruvius.data.augmentation.erasing import Erase, erase, flip, shift, truncated_normal


def batch(number=16, size=(3, 12, 10)):
    images = torch.rand(number, *size, generator=torch.Generator().manual_seed(0))
    return images, image_keys(torch.arange(number), torch.zeros(number, dtype=torch.int64), seed=0, epoch=0)


def test_shift_is_padding_and_cropping_image_by_image():
    images, keys = batch()
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    offsets = (uniform(keys, 1, 2) * 5).long()
    assert offsets.unique().tolist() == [0, 1, 2, 3, 4]
    slow = [image[:, r : r + 12, c : c + 10] for image, (r, c) in zip(padded, offsets.tolist(), strict=True)]
    assert torch.equal(shift(images, keys, pad=2), torch.stack(slow))


def test_certain_flips_flip_and_impossible_ones_do_not():
    images, keys = batch()
    assert torch.equal(flip(images, keys, hflip=1.0, vflip=0.0), images.flip(-1))
    assert torch.equal(flip(images, keys, hflip=0.0, vflip=1.0), images.flip(-2))
    assert torch.equal(flip(images, keys, hflip=0.0, vflip=0.0), images)


def test_flips_happen_as_often_as_asked_and_independently():
    images, keys = batch(2000, (1, 2, 2))
    mirrored = (flip(images, keys, hflip=0.3, vflip=0.0) != images).flatten(1).any(1)
    upturned = (flip(images, keys, hflip=0.0, vflip=0.3) != images).flatten(1).any(1)
    assert abs(mirrored.float().mean() - 0.3) < 0.04
    assert abs((mirrored & upturned).float().mean() - 0.09) < 0.03


def slow_box(luck, height, width, count):
    """timm's rule, written out: the first of ten boxes that fits."""
    for attempt in range(10):
        u = luck[4 * attempt : 4 * attempt + 4]
        area = (0.02 + (1 / 3 - 0.02) * u[0]) * height * width / count
        aspect = math.exp(math.log(0.3) + (math.log(1 / 0.3) - math.log(0.3)) * u[1])
        tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if tall < height and wide < width:
            top, left = int(u[2] * (height - tall + 1)), int(u[3] * (width - wide + 1))
            return slice(top, top + tall), slice(left, left + wide)
    return slice(0, 0), slice(0, 0)


@pytest.mark.parametrize("count", [1, 3])
def test_black_boxes_are_where_a_slow_loop_puts_them(count):
    images, keys = batch(64)
    luck = uniform(keys, 4, 2)
    expected = images.clone()
    for i in range(len(images)):
        if luck[i, 0] < 0.7:
            boxes = 1 + int(luck[i, 1] * count)
            for number in range(boxes):
                rows, columns = slow_box(uniform(keys[i : i + 1], 5 + 2 * number, 40)[0].tolist(), 12, 10, boxes)
                expected[i, :, rows, columns] = 0
    erased = erase(images, keys, probability=0.7, mode="const", count=count)
    assert torch.equal(erased, expected)
    assert not torch.equal(erased, images)


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_erased_images_are_still_pixels(mode):
    images, keys = batch(64)
    erased = erase(images, keys, probability=1.0, mode=mode, count=3)
    changed = (erased != images).any(1)  # (B, H, W)
    assert erased.min() >= 0
    assert erased.max() <= 1
    assert changed.flatten(1).any(1).all()
    values = [erased[i, 0][changed[i]].unique().numel() for i in range(64)]
    assert (max(values) > 10) == (mode == "pixel")
    assert (max(values) == 1) == (mode == "const")


@pytest.mark.parametrize("count", [1, 3])
def test_erasing_in_a_worker_draws_timms_boxes(count):
    """With the same seed, image by image."""
    images = torch.full((40, 3, 24, 20), 200, dtype=torch.uint8)
    for key, image in enumerate(images):
        with seeded(key):
            expected = RandomErasing(0.6, mode="const", max_count=count, device="cpu")(image.clone())
        with seeded(key):
            assert torch.equal(Erase(probability=0.6, mode="const", count=count)(image), expected)
        assert (image == 200).all()


@pytest.mark.parametrize("mode", ["rand", "pixel"])
def test_noise_of_a_worker_has_the_same_distribution_as_that_of_batches(mode):
    images, keys = torch.full((300, 3, 16, 16), 2.0), image_keys(torch.arange(300), torch.arange(300), seed=0, epoch=0)
    batches = erase(images, keys, probability=1.0, mode=mode, count=1)
    marked = torch.full((300, 3, 16, 16), 7, dtype=torch.uint8)
    with seeded(1):
        workers = torch.stack([Erase(probability=1.0, mode=mode, count=1)(image) for image in marked])
    a, b = batches[batches != 2], workers[workers != 7] / 255
    assert abs(a.mean() - b.mean()) < 0.03
    assert abs(a.std() - b.std()) < 0.02


def test_erasing_does_not_depend_on_the_company_in_the_batch():
    images, keys = batch(8)
    whole = erase(images, keys, probability=0.8, mode="pixel", count=2)
    alone = [erase(images[i : i + 1], keys[i : i + 1], probability=0.8, mode="pixel", count=2) for i in range(8)]
    assert torch.equal(whole, torch.cat(alone))


def test_noise_is_normal_truncated_to_the_unit_interval():
    u = (torch.arange(100_000) + 0.5).double() / 100_000
    cumulated = torch.special.ndtr(4 * (truncated_normal(u.float()).double() - 0.5))
    low, high = torch.special.ndtr(torch.tensor([-2.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close((cumulated - low) / (high - low), u, atol=1e-5, rtol=0)
    assert truncated_normal(torch.zeros(1)).item() == pytest.approx(0, abs=1e-6)
