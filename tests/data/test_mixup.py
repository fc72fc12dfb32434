"""Mixup and CutMix: timm's, with a luck of our own."""

from __future__ import annotations

import pytest
import torch
from timm.data import Mixup

from vitruvius._random import seed_of, seeded
from vitruvius.data import DataConfig
from vitruvius.data.augmentation.mixup import make_mixup


def batch(number=8):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(number, 3, 8, 8, generator=generator), torch.arange(number) % 5


def test_nothing_to_mix_is_no_mixer():
    assert make_mixup(DataConfig(), 5) is None


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_it_is_timms_mixup_with_our_seed(mode):
    images, labels = batch()
    config = DataConfig(mixup=0.8, cutmix=1.0, mixup_mode=mode, smoothing=0.2, mixup_prob=0.9, mixup_switch_prob=0.4)
    theirs = Mixup(0.8, 1.0, prob=0.9, switch_prob=0.4, mode=mode, label_smoothing=0.2, num_classes=5)
    mixer = make_mixup(config, 5, seed=3, rank=1)
    for step in range(4):
        with seeded(seed_of(3, 2, step, 1)):
            expected = theirs(images.clone(), labels)
        mixed = mixer(images, labels, epoch=2, step=step)
        assert torch.equal(mixed[0], expected[0])
        assert torch.equal(mixed[1], expected[1])


@pytest.mark.parametrize("settings", [{"mixup": 0.8}, {"cutmix": 1.0}, {"cutmix_minmax": (0.2, 0.8)}], ids=str)
def test_mixed_images_are_pixels_and_soft_labels_sum_to_one(settings):
    images, labels = batch()
    before = images.clone()
    mixer = make_mixup(DataConfig(**settings), 5)
    for step in range(5):
        mixed, soft = mixer(images, labels, epoch=0, step=step)
        assert mixed.min() >= 0
        assert mixed.max() <= 1
        torch.testing.assert_close(soft.sum(1), torch.ones(8))
        assert soft.min() >= 0
    assert torch.equal(images, before)


def test_luck_depends_on_seed_epoch_step_and_process():
    images, labels = batch()
    config = DataConfig(mixup=1.0)

    def mixed(seed=0, rank=0, epoch=0, step=0):
        return make_mixup(config, 5, seed=seed, rank=rank)(images, labels, epoch=epoch, step=step)[0]

    assert torch.equal(mixed(), mixed())
    for other in ({"seed": 1}, {"rank": 1}, {"epoch": 1}, {"step": 1}):
        assert not torch.equal(mixed(), mixed(**other))


def test_an_odd_batch_is_mixed_too():
    images, labels = batch(5)
    mixed, soft = make_mixup(DataConfig(mixup=1.0, smoothing=0.0), 5)(images, labels, epoch=0, step=1)
    assert mixed.shape == images.shape
    share = soft.gather(1, labels[:, None])  # (B, 1) of each label that is its own
    partner = images[[0, 4, 3, 2, 1]]
    torch.testing.assert_close(mixed, images * share[..., None, None] + partner * (1 - share)[..., None, None])


def test_mixing_stops_at_its_last_epoch_and_labels_stay_soft():
    images, labels = batch()
    mixer = make_mixup(DataConfig(mixup=1.0, mixup_off_epoch=3, smoothing=0.1), 5)
    assert not torch.equal(mixer(images, labels, epoch=2, step=0)[0], images)
    mixed, soft = mixer(images, labels, epoch=3, step=0)
    assert torch.equal(mixed, images)
    torch.testing.assert_close(soft, torch.eye(5)[labels] * 0.9 + 0.02)
    assert not torch.equal(mixer(images, labels, epoch=0, step=0)[0], images)
