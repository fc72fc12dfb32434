"""Images decoded once and kept as one uint8 tensor, resized and cropped as for evaluation."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, DataError
from vitruvius.data._config import DataConfig
from vitruvius.data._image_loader import ImageLoader, ImageSet
from vitruvius.data._order import Order
from vitruvius.data._preprocessing import Preprocessing, eval_transform, needs_pil
from vitruvius.data._tensors import TensorSet


def cached(
    data: TensorSet | ImageSet, ids: Tensor, pre: Preprocessing, config: DataConfig, *, training: bool
) -> tuple[TensorSet | ImageSet, Tensor]:
    """The images in memory if the recipe wants them there, and the ids of those that could be decoded."""
    if config.cache != "memory" or isinstance(data, TensorSet):
        return data, ids
    tensors = in_memory(data, ids, pre, config, training=training)
    assert tensors.rows is not None
    return tensors, ids[tensors.rows[ids] >= 0]


def in_memory(data: ImageSet, ids: Tensor, pre: Preprocessing, config: DataConfig, *, training: bool) -> TensorSet:
    """The images `ids` of a data set as tensors; the broken ones, if skipped, are missing and listed."""
    if training and needs_pil(config) and not config.no_aug:
        raise ConfigError(
            "images cached in memory can be padded, flipped, erased and mixed; scale, ratio, color_jitter, aa, "
            "rotation and the like need data.cache=none."
        )
    _check_memory(len(ids), pre, data.name)
    order = Order(ids, batch_size=256, shuffle=False)
    loader = ImageLoader(data, order, eval_transform(pre), config, channels=pre.size[0], device="cpu", raw=True)
    rows = torch.full((len(data),), -1)
    images, labels = torch.empty((len(ids), *pre.size), dtype=torch.uint8), torch.zeros(len(ids), dtype=torch.int64)
    filled = 0
    for batch, batch_labels, batch_ids in loader.with_ids():
        here = slice(filled, filled + len(batch))
        images[here], labels[here] = batch, batch_labels
        rows[batch_ids] = torch.arange(here.start, here.stop)
        filled = here.stop
    return TensorSet(
        name=data.name,
        images=images[:filled],
        labels=labels[:filled],
        num_classes=data.num_classes,
        hflip=0.5,
        rows=rows,
        broken=tuple(loader.broken),
    )


def _check_memory(number: int, pre: Preprocessing, name: str) -> None:
    channels, height, width = pre.size
    need = number * channels * height * width
    if not hasattr(os, "sysconf"):
        return  # Windows does not say
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > 0.8 * have:
        raise DataError(
            f"{name} needs {need / 2**30:.0f} GiB in memory, this machine has {have / 2**30:.0f}; use data.cache=none."
        )
