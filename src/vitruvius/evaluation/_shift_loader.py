"""Loaders for the images of a shift: prepared as the model wants them, not cropped if they are cropped already."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from vitruvius._processes import Process
from vitruvius.data import DataConfig, Loader
from vitruvius.data._image_loader import ImageLoader
from vitruvius.data._order import Order
from vitruvius.data._preprocessing import InputSize, eval_transform, resolve
from vitruvius.data._tensors import TensorLoader, TensorSet
from vitruvius.shifts import ArrayImages, Images


def shift_loader(
    images: Images, ids: Tensor, config: DataConfig, input_size: InputSize, process: Process, *, cropped: bool
) -> Loader:
    """The images `ids`, each once, dealt out to the processes."""
    if cropped and config.crop_pct is None:
        config = dataclasses.replace(config, crop_pct=1.0)
    pre = resolve(config, input_size)
    size = config.eval_batch_size or config.batch_size
    order = Order(ids, batch_size=size, shuffle=False, rank=process.rank, world_size=process.world_size)
    if isinstance(images, ArrayImages):
        held = TensorSet(name=images.name, images=images.pixels, labels=images.labels, num_classes=images.num_classes)
        return TensorLoader(held, order, pre, config, process.device)
    return ImageLoader(images, order, eval_transform(pre), config, channels=pre.size[0], device=process.device)


def chosen(images: Images, limit: int | None) -> Tensor:
    """Ids of all images, or of as many as wanted: those with the smallest keys, so the same files in every part."""
    if limit is None or limit >= len(images):
        return torch.arange(len(images))
    return images.keys.argsort(stable=True)[:limit].sort().values
