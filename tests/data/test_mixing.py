"""Synthetic images beside real ones: counts, order, resuming, several processes, and equal treatment."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from pictures import same, write_image

from vitruvius._errors import ConfigError, DataError
from vitruvius._files import save_tensors
from vitruvius.data import DataConfig, eval_loader, train_loader
from vitruvius.data.loading import held_out
from vitruvius.data.order import Endless

SIZE = (3, 8, 8)
REAL, SYNTHETIC = 40, 7  # synthetic images come round again within an epoch


@pytest.fixture
def root(tmp_path):
    """Two sets of flat pictures: the grey level of an image is its id; the second set is brighter than the first."""
    for name, number, base in (("real", REAL, 0), ("ddpm", SYNTHETIC, 100)):
        levels = torch.arange(base, base + number, dtype=torch.uint8)
        images = levels[:, None, None, None].expand(-1, 3, 8, 8).contiguous()
        save_tensors(
            tmp_path / f"{name}.safetensors",
            {"images": images, "labels": torch.arange(number) % 5},
            {"num_classes": "5"},
        )
        np.savez(tmp_path / f"{name}.npz", image=images.movedim(1, -1).numpy(), label=np.arange(number) % 5)
    return tmp_path


def config(root, /, *, mix=None, **settings):
    second = {"dataset": "npz", "root": str(root / "ddpm.npz"), "fraction": 0.7, **(mix or {})}
    first = {"dataset": "tensors", "root": str(root / "real.safetensors"), "batch_size": 10, "workers": 0}
    return DataConfig(**{**first, "mix": second, **settings})


def batches(config, epoch=0, start=0, **settings):
    loader = train_loader(config, **{"input_size": SIZE, "seed": 3, **settings})
    loader.set_epoch(epoch, start_batch=start)
    found = list(loader.with_ids())
    assert len(found) == len(loader) - start
    return found


def levels(images):
    return (images[:, 0, 0, 0] * 255).round().long()


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.7])
def test_every_batch_has_exactly_its_share_and_ids_tell_the_sets_apart(root, fraction):
    for images, labels, ids in batches(config(root, mix={"fraction": fraction})):
        synthetic = ids >= REAL
        assert int(synthetic.sum()) == round(fraction * 10)
        expected = torch.where(synthetic, ids - REAL + 100, ids)
        assert torch.equal(levels(images), expected)
        assert torch.equal(labels, torch.where(synthetic, ids - REAL, ids) % 5)


def test_the_sets_are_shuffled_into_each_other(root):
    first_halves = [int((ids[:5] >= REAL).sum()) for _, _, ids in batches(config(root, mix={"fraction": 0.5}))]
    assert len(set(first_halves)) > 1


def test_an_epoch_is_as_long_as_the_real_set_unless_the_recipe_says(root):
    assert len(batches(config(root))) == REAL // 10
    assert len(batches(config(root, mix={"epoch_images": 95}))) == 9


def test_all_images_of_a_set_are_used_equally_often_over_epochs(root):
    seen = Counter()
    for epoch in range(10):  # 10 epochs of 4 batches: 120 real images = 3 rounds of 40, 280 synthetic = 40 rounds of 7
        seen.update(i for _, _, ids in batches(config(root), epoch) for i in ids.tolist())
    assert {seen[i] for i in range(REAL)} == {3}
    assert {seen[i] for i in range(REAL, REAL + SYNTHETIC)} == {40}


def test_an_epoch_repeats_resumes_at_any_batch_and_the_next_differs(root):
    whole = batches(config(root, pad=2, reprob=0.5), epoch=1)
    for start in range(5):
        assert same(whole[start:], batches(config(root, pad=2, reprob=0.5), epoch=1, start=start))
    assert not same(whole, batches(config(root, pad=2, reprob=0.5), epoch=2))


def test_two_processes_see_together_the_images_of_one(root):
    one = batches(config(root, mix={"fraction": 0.6}))
    half = config(root, mix={"fraction": 0.6}, batch_size=5)
    two = [batches(half, rank=rank, world_size=2) for rank in (0, 1)]
    for whole, *parts in zip(one, *two, strict=True):
        assert sorted(whole[2].tolist()) == sorted(torch.cat([part[2] for part in parts]).tolist())
        for part in parts:
            assert int((part[2] >= REAL).sum()) == 3


def test_an_image_that_comes_again_in_an_epoch_is_augmented_anew():
    order = Endless(torch.arange(4), batch_size=8, batches=2, seed=0)
    ids, keys = order.epoch(0)
    assert ids[:4].sort().values.tolist() == ids[4:8].sort().values.tolist() == [0, 1, 2, 3]
    assert len(set(keys.tolist())) == 16


def test_held_out_images_are_of_the_real_set_alone(root):
    apart = held_out(config(root), 0.25)
    loader = train_loader(config(root), input_size=SIZE, seed=0, exclude=apart)
    seen = {
        i
        for epoch in range(12)
        for _, _, ids in (loader.set_epoch(epoch), *loader.with_ids())[1:]
        for i in ids.tolist()
    }
    assert not seen & set(apart.tolist())
    assert len(seen) == REAL - len(apart) + SYNTHETIC
    assert eval_loader(config(root), input_size=SIZE).num_images == REAL


def test_only_some_images_of_the_second_set_are_used(root):
    seen = {i for _, _, ids in batches(config(root, mix={"num_samples": 3})) for i in ids.tolist() if i >= REAL}
    assert len(seen) == 3


def test_pictures_of_a_folder_are_mixed_with_an_archive_and_both_are_augmented_alike(folder, root):
    second = {"dataset": "npz", "root": str(root / "ddpm.npz"), "fraction": 0.5, "num_samples": 2}
    settings = {
        "dataset": "folder",
        "root": str(folder),
        "batch_size": 6,
        "workers": 0,
        "color_jitter": 0.9,
        "num_classes": 3,
    }
    np.savez(root / "three.npz", image=np.full((4, 16, 20, 3), 99, np.uint8), label=np.arange(4) % 3)
    second["root"] = str(root / "three.npz")
    got = batches(DataConfig(**settings, mix=second))
    assert same(got, batches(DataConfig(**settings, mix=second)))
    for images, _, ids in got:
        assert images.shape == (6, *SIZE)
        brightness = levels(images[ids >= 15])
        assert len(brightness) == 3
        assert (brightness - 99).abs().max() > 3  # the jitter of photographs has reached the archive's images


def test_a_broken_picture_costs_only_itself(folder, root):
    write_image(folder / "train" / "ant" / "0.png", 0)
    for path in (folder / "train" / "bee").iterdir():
        path.write_bytes(b"no picture")
    np.savez(root / "three.npz", image=np.zeros((4, 16, 20, 3), np.uint8), label=np.arange(4) % 3)
    mix = {"dataset": "npz", "root": str(root / "three.npz"), "fraction": 0.5}
    settings = {"dataset": "folder", "root": str(folder), "batch_size": 2, "workers": 0, "broken": "skip"}
    loader = train_loader(DataConfig(**settings, mix=mix), input_size=SIZE, seed=0)
    found = [len(ids) for epoch in (0, 1) for _, _, ids in (loader.set_epoch(epoch), *loader.with_ids())[1:]]
    assert len(found) == 2 * len(loader)
    assert sorted(set(found)) == [1, 2]
    assert len(loader.broken) == 5


def test_a_batch_of_broken_pictures_of_both_sets_is_left_out_but_keeps_its_number(folder):
    for path in (folder / "train").rglob("*.png"):
        path.write_bytes(b"no picture")
    mix = {"dataset": "folder", "root": str(folder), "fraction": 0.5}
    settings = {"dataset": "folder", "root": str(folder), "batch_size": 2, "workers": 0, "broken": "skip"}
    loader = train_loader(DataConfig(**settings, mix=mix), input_size=SIZE, seed=0)
    assert list(loader.with_ids()) == []
    assert [len(ids) for _, _, ids in loader.every_batch()] == [0] * len(loader)


@pytest.mark.parametrize(
    ("mix", "settings", "message"),
    [
        ({"fraction": 1.5}, {}, r"data\.mix\.fraction = 1\.5"),
        ({"fracton": 0.5}, {}, r"data\.mix\.fracton"),
        ({"num_samples": 0}, {}, r"data\.mix\.num_samples = 0"),
        ({"fraction": 0.01}, {}, r"0\.01 of a batch of 10 leaves nothing of one of the two"),
        ({"epoch_images": 9}, {}, "9 images do not fill one batch of 10"),
        ({"dataset": "tfds/cifar10"}, {}, "is a stream"),
        ({"root": "nowhere.npz"}, {}, "nowhere.npz does not exist"),
        ({}, {"aug_repeats": 3}, r"data\.aug_repeats .* does not go with data\.mix"),
        (
            {"dataset": "digits", "root": None},
            {"num_classes": 5, "dataset": "fake", "root": None},
            "10 classes, fake/train 5",
        ),
    ],
)
def test_what_cannot_be_mixed_is_said(root, mix, settings, message):
    with pytest.raises((ConfigError, DataError), match=message):
        batches(config(root, mix=mix, **settings))


def test_folders_that_number_their_classes_otherwise_are_refused(folder, tmp_path):
    for name in ("bee", "cat"):
        write_image(tmp_path / "other" / "train" / name / "0.png", 0)
    mix = {"dataset": "folder", "root": str(tmp_path / "other"), "fraction": 0.5}
    with pytest.raises(DataError, match=r"numbers its classes otherwise than folder/train; .*data\.mix\.class_map"):
        batches(DataConfig(dataset="folder", root=str(folder), batch_size=4, workers=0, mix=mix))
    (tmp_path / "map.txt").write_text("ant\nbee\ncat\n")
    mix["class_map"] = str(tmp_path / "map.txt")
    assert batches(DataConfig(dataset="folder", root=str(folder), batch_size=4, workers=0, mix=mix))


def test_pictures_on_disk_do_not_go_with_tensors_until_they_are_cached(folder, root):
    mix = {"dataset": "folder", "root": str(folder)}
    with pytest.raises(DataError, match=r"tensors/train is in memory, folder/train is not; set data\.cache"):
        batches(config(root, mix=mix))
    assert batches(config(root, mix=mix, cache="memory"))
