"""The loader that suits a data set for training: slices of tensors where that is enough, else images one by one."""

from __future__ import annotations

import torch

from vitruvius.data._config import DataConfig
from vitruvius.data._image_loader import ImageLoader
from vitruvius.data._order import AnyOrder
from vitruvius.data._preprocessing import Preprocessing, gentle, needs_pil, train_transform
from vitruvius.data._sources import AnySet
from vitruvius.data._tensors import TensorLoader, TensorSet


def make_training_loader(
    data: AnySet, order: AnyOrder, pre: Preprocessing, config: DataConfig, device: torch.device | str
) -> TensorLoader | ImageLoader:
    """Shuffled and augmented; data in memory get only the augmentation that the recipe asks for."""
    if isinstance(data, TensorSet) and stays_in_tensors(data, config):
        return TensorLoader(data, order, pre, config, device)
    config = gentle(config) if isinstance(data, TensorSet) else config
    return make_image_loader(data, order, pre, config, device)


def make_image_loader(
    data: AnySet, order: AnyOrder, pre: Preprocessing, config: DataConfig, device: torch.device | str
) -> ImageLoader:
    """Images one by one through timm's transforms, all of them."""
    return ImageLoader(data, order, train_transform(config, pre), config, channels=pre.size[0], device=device)


def stays_in_tensors(data: AnySet, config: DataConfig) -> bool:
    """Whether whole batches are augmented where they are."""
    return isinstance(data, TensorSet) and (config.no_aug or not needs_pil(config))
