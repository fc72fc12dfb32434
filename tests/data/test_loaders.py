"""The same images whatever the number of workers, from any batch on, and nothing drawn from global generators."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from pictures import same

from vitruvius.data import DataConfig, eval_loader, train_loader
from vitruvius.data.loader import ImageLoader, Loader

AUGMENTED = {"aa": "rand-m9-mstd0.5-inc1", "reprob": 0.5, "hflip": 0.5, "aug_repeats": 2}


@pytest.fixture(params=["digits", "digits through PIL", "fake", "folder", "folder in memory", "folder in batches"])
def config(request, folder):
    settings = {
        "digits": {"dataset": "digits", "train_num_samples": 40, "val_num_samples": 30, "reprob": 0.5},
        "digits through PIL": {"dataset": "digits", "train_num_samples": 40, "val_num_samples": 30, **AUGMENTED},
        "fake": {"dataset": "fake", "train_num_samples": 40, "val_num_samples": 30, "hflip": 0.5, "pad": 2},
        "folder": {"dataset": "folder", "root": str(folder), **AUGMENTED},
        "folder in memory": {"dataset": "folder", "root": str(folder), "cache": "memory", "pad": 2, "reprob": 0.5},
        "folder in batches": {"dataset": "folder", "root": str(folder), "cache": "auto", **AUGMENTED},
    }
    return DataConfig(**{"batch_size": 4, "workers": 0, **settings[request.param]})


def train(config, **settings) -> Loader:
    return train_loader(config, **{"input_size": (3, 16, 16), "seed": 7, **settings})


def listed(loader):
    return list(loader.with_ids())


def test_an_epoch_repeats_and_the_next_one_differs(config):
    loader = train(config)
    first = listed(loader)
    assert same(first, listed(loader))
    assert same(first, listed(train(config)))
    loader.set_epoch(1)
    assert not same(first, listed(loader))
    loader.set_epoch(0)
    assert same(first, listed(loader))
    assert not same(first, listed(train(config, seed=8)))


def test_an_epoch_can_be_resumed_at_any_batch(config):
    loader = train(config)
    loader.set_epoch(2)
    whole = listed(loader)
    assert len(whole) == len(loader)
    for start in range(len(whole) + 1):
        again = train(config)
        again.set_epoch(2, start_batch=start)
        assert len(again) == len(whole)
        assert same(whole[start:], listed(again))


def test_skipped_batches_are_not_decoded(folder, monkeypatch):
    loader = train(DataConfig(dataset="folder", root=str(folder), workers=0, batch_size=4))
    assert isinstance(loader, ImageLoader)
    read, numbers = loader.images.read, []
    monkeypatch.setattr(loader.images, "read", lambda index: numbers.append(index) or read(index))
    loader.set_epoch(0, start_batch=2)
    (batch,) = listed(loader)
    assert numbers == batch[2].tolist()


def test_two_processes_see_together_the_images_of_one(config):
    one = listed(train(config))
    half = [
        listed(train_loader(replace(config, batch_size=2), input_size=(3, 16, 16), seed=7, rank=r, world_size=2))
        for r in (0, 1)
    ]
    for whole, *parts in zip(one, *half, strict=True):
        images = torch.cat([part[0] for part in parts])
        ids = torch.cat([part[2] for part in parts])
        assert sorted(ids.tolist()) == sorted(whole[2].tolist())
        found = (images[:, None] == whole[0]).flatten(2).all(-1)  # each image of the parts is one of the whole
        assert found.any(0).all()
        assert found.any(1).all()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_counts_each_image_once_over_all_processes(config, world_size):
    whole = {int(i): image for images, _, ids in listed(evaluate(config)) for image, i in zip(images, ids, strict=True)}
    seen = []
    for rank in range(world_size):
        loader = evaluate(config, rank=rank, world_size=world_size)
        batches = listed(loader)
        assert len(batches) == len(loader)
        assert loader.num_images == len(whole)
        for images, _, ids in batches:
            seen += ids.tolist()
            assert all(torch.equal(image, whole[int(i)]) for image, i in zip(images, ids, strict=True))
    assert sorted(seen) == sorted(whole)


def evaluate(config, **settings):
    return eval_loader(config, input_size=(3, 16, 16), **settings)


def test_global_generators_are_left_alone(config):
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    listed(train(config))
    listed(evaluate(config))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


def test_workers_change_nothing(folder):
    settings = {"dataset": "folder", "root": str(folder), "batch_size": 4, **AUGMENTED}
    expected, loader = train(DataConfig(workers=0, **settings)), train(DataConfig(workers=2, **settings))
    for epoch, start in ((0, 0), (1, 1)):  # the second time with the workers of the first
        for one in (expected, loader):
            one.set_epoch(epoch, start_batch=start)
        assert same(listed(expected), listed(loader))


def test_workers_draw_nothing_from_the_global_generator(folder):
    loader = train(DataConfig(dataset="folder", root=str(folder), batch_size=4, workers=1))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    listed(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_fake_images_have_the_models_shape_and_the_recipes_classes():
    config = DataConfig(dataset="fake", num_classes=7, val_num_samples=20)
    loader = eval_loader(config, input_size={"input_size": (3, 12, 20)})
    ((images, labels),) = loader
    assert images.shape == (20, 3, 12, 20)
    assert labels.tolist() == [i % 7 for i in range(20)]
    assert loader.num_classes == 7
    assert images.std() > 0.2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_batches_on_an_accelerator_equal_those_on_the_cpu(config):
    place = torch.accelerator.current_accelerator()
    for here, there in zip(listed(train(config)), listed(train(config, device=place)), strict=True):
        assert there[0].device.type == place.type
        torch.testing.assert_close(there[0].cpu(), here[0], atol=1e-5, rtol=0)
        assert torch.equal(there[1].cpu(), here[1])
        assert torch.equal(there[2], here[2])
