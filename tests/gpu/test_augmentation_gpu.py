"""Augmentation of batches on a GPU gives what it gives on the CPU, up to the rounding of single levels.

Run by hand:  python scripts/gpu_tests.py tests/gpu/test_augmentation_gpu.py
"""

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from vitruvius._random import image_keys
from vitruvius.data import DataConfig, train_loader
from vitruvius.data.augmentation.pipeline import BatchAugmentation
from vitruvius.data.preprocessing import resolve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SETTINGS = {
    "crop": {"color_jitter": 0.0},
    "padded crop": {"color_jitter": 0.0, "rand_crop": True, "pad": 4, "vflip": 0.5},
    "jitter": {"color_jitter": (0.4, 0.4, 0.4, 0.1), "grayscale_prob": 0.2, "gaussian_blur_prob": 0.3},
    "rand": {"aa": "rand-m9-mstd0.5-inc1", "reprob": 0.25},
    "auto": {"aa": "original", "remode": "rand", "reprob": 0.25, "recount": 2},
    "3a": {"aa": "3a", "rotation": 15.0},
    "augmix": {"aa": "augmix-m5-w4-d2", "aug_splits": 3},
}


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_gpu_augments_as_the_cpu_does(name, size):
    coarse = torch.rand(64, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    images = (interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1) * 255).byte()
    ids = torch.arange(64)
    keys = image_keys(ids, torch.zeros_like(ids), seed=0, epoch=0)
    config = DataConfig(**SETTINGS[name])
    augment = BatchAugmentation(config, resolve(config, (3, 32, 32)))
    expected, found = augment(images, keys), augment(images.cuda(), keys)
    assert found.is_cuda
    levels = 255 * (found.cpu() - expected).abs()
    assert (levels > 1.5).float().mean() < 0.01  # a level that was rounded otherwise may be solarised or equalised
    assert (levels > 0.5).float().mean() < 0.05


def test_a_loader_on_the_gpu_gives_the_epochs_of_the_cpu(tmp_path):
    coarse = torch.rand(96, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    images = (interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1) * 255).byte()
    np.savez(tmp_path / "set.npz", image=images.movedim(1, -1).numpy(), label=np.arange(96) % 10)
    config = DataConfig(
        dataset="npz",
        root=str(tmp_path / "set.npz"),
        cache="auto",
        batch_size=4,
        aa="rand-m9-mstd0.5-inc1",
        reprob=0.25,
    )
    loaders = [train_loader(config, input_size=(3, 32, 32), seed=0, device=device) for device in ("cpu", "cuda")]
    for epoch in (0, 1, 3):  # 1 was begun ahead of time, 2 was begun and is not wanted
        for loader in loaders:
            loader.set_epoch(epoch)
        number = 0
        for (x, y, ids), (found, labels, names) in zip(*(loader.with_ids() for loader in loaders), strict=True):
            assert found.is_cuda
            assert torch.equal(ids, names.cpu())
            assert torch.equal(y, labels.cpu())
            assert (255 * (found.cpu() - x).abs() > 1.5).float().mean() < 0.02
            number += 1
        assert number == 24  # more than a chunk


def test_batches_are_made_without_waiting_for_the_gpu():
    config = DataConfig(aa="rand-m9-mstd0.5-inc1", reprob=0.25)
    augment = BatchAugmentation(config, resolve(config, (3, 32, 32)))
    images = torch.randint(0, 256, (128, 3, 32, 32), dtype=torch.uint8, device="cuda")
    ids = torch.arange(128)
    keys = image_keys(ids, torch.zeros_like(ids), seed=0, epoch=0)
    augment(images, keys)
    torch.cuda.set_sync_debug_mode("error")
    try:
        augment(images, keys)
    finally:
        torch.cuda.set_sync_debug_mode("default")
