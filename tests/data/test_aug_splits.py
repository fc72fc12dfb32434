"""AugMix's splits: clean images first, then the same images augmented anew, split by split, as timm's collate does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pictures import same
from timm.data import AugMixDataset, create_transform
from timm.data.loader import fast_collate

from vitruvius._errors import ConfigError
from vitruvius._random import seeded
from vitruvius.data import DataConfig, train_loader

SIZE = (3, 16, 16)
AUGMIX = {"aa": "augmix-m5-w4-d2", "aug_splits": 3}


def config(folder, **settings):
    return DataConfig(**{"dataset": "folder", "root": str(folder), "batch_size": 4, "workers": 0, **AUGMIX, **settings})


def batches(config, epoch=0, start=0, **settings):
    loader = train_loader(config, **{"input_size": SIZE, "seed": 1, **settings})
    loader.set_epoch(epoch, start_batch=start)
    return list(loader.with_ids())


class Plain(torch.utils.data.Dataset):
    """What timm's AugMixDataset wraps: image and label under the base transform."""

    def __init__(self, images, transform):
        self.images, self.transform = images, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, label = self.images.read(index)
        return self.transform(image.convert("RGB")), label


def test_the_splits_are_those_of_timm_under_the_same_luck(folder):
    loader = train_loader(config(folder), input_size=SIZE, seed=1)
    images, labels, ids = next(iter(loader.with_ids()))
    parts = create_transform(
        SIZE, is_training=True, color_jitter=0.4, auto_augment=AUGMIX["aa"], interpolation="random",
        use_prefetcher=True, separate=True,
    )  # fmt: skip
    theirs = AugMixDataset(Plain(loader.images, parts), num_splits=3)
    _, keys = loader.order.epoch(0)
    samples = []
    for index, key in zip(ids[:4].tolist(), keys[:4].tolist(), strict=True):
        with seeded(key):
            views, label = theirs[index]
            samples.append((views, label))
    expected, expected_labels = fast_collate(samples)
    assert torch.equal(images, expected.float() / 255)
    assert torch.equal(labels, expected_labels)
    assert ids.tolist() == ids[:4].tolist() * 3


def test_the_clean_split_is_cropped_and_flipped_but_neither_recoloured_nor_erased(folder):
    plain = config(folder, aa=None, color_jitter=0.0, aug_splits=0)
    split = config(folder, reprob=1.0, rotation=30)
    for (clean, labels, ids), (images, all_labels, all_ids) in zip(batches(plain), batches(split), strict=True):
        assert images.shape == (12, *SIZE)
        assert torch.equal(images[:4], clean)
        assert torch.equal(all_labels, labels.repeat(3))
        assert torch.equal(all_ids, ids.repeat(3))
        for view in (images[4:8], images[8:]):
            assert all(not torch.equal(one, other) for one, other in zip(view, clean, strict=True))
        assert not torch.equal(images[4:8], images[8:])


def test_an_epoch_repeats_and_resumes_with_any_number_of_workers(folder):
    whole = batches(config(folder))
    for again in (batches(config(folder, workers=1)), batches(config(folder), start=0)):
        assert same(whole, again)
    (last,) = batches(config(folder), start=2)
    assert torch.equal(last[0], whole[2][0])


def test_digits_take_part_through_pil():
    settings = {"batch_size": 4, "workers": 0, "train_num_samples": 8, **AUGMIX}
    images, labels, _ = batches(DataConfig(**settings))[0]
    assert images.shape == (12, *SIZE)
    assert torch.equal(labels, labels[:4].repeat(3))


def test_mixed_sets_keep_the_layout(folder, tmp_path):
    np.savez(tmp_path / "other.npz", image=np.full((4, 16, 16, 3), 70, np.uint8), label=np.arange(4) % 3)
    mix = {"dataset": "npz", "root": str(tmp_path / "other.npz"), "fraction": 0.5}
    for images, labels, ids in batches(config(folder, mix=mix)):
        assert images.shape == (12, *SIZE)
        assert torch.equal(ids, ids[:4].repeat(3))
        assert torch.equal(labels, labels[:4].repeat(3))
        synthetic = ids[:4] >= 15
        assert int(synthetic.sum()) == 2
        assert torch.equal(images[:4][synthetic], torch.full((2, *SIZE), 70 / 255))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aug_splits": 1}, r"data\.aug_splits"),
        ({"no_aug": True}, "no_aug forbids it"),
        ({"mixup": 0.8}, "does not go with mixup"),
        ({"aa": None, "color_jitter": 0.0}, "all splits are alike"),
    ],
)
def test_what_makes_no_sense_with_splits_is_refused(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        batches(config(folder, **settings))
