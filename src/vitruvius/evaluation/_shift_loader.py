"""Loaders for the images of a shift: prepared as the model wants them, not cropped if they are cropped already."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from vitruvius._processes import Process
from vitruvius.data import DataConfig, InputSize, Loader, TensorSet, images_loader
from vitruvius.shifts import ArrayImages, Images


def shift_loader(
    images: Images, ids: Tensor, config: DataConfig, input_size: InputSize, process: Process, *, cropped: bool
) -> Loader:
    """The images `ids`, each once, dealt out to the processes."""
    if cropped and config.crop_pct is None:
        config = dataclasses.replace(config, crop_pct=1.0)
    return images_loader(
        _held(images) if isinstance(images, ArrayImages) else images,
        config,
        input_size=input_size,
        rank=process.rank,
        world_size=process.world_size,
        device=process.device,
        only=ids,
    )


def chosen(images: Images, limit: int | None) -> Tensor:
    """Ids of all images, or of as many as wanted: those with the smallest keys, so the same files in every part."""
    if limit is None or limit >= len(images):
        return torch.arange(len(images))
    return images.keys.argsort(stable=True)[:limit].sort().values


def _held(images: ArrayImages) -> TensorSet:
    return TensorSet(name=images.name, images=images.pixels, labels=images.labels, num_classes=images.num_classes)
