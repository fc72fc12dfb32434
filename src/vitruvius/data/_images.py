"""A loader of any labelled images, for whoever reads them in a way of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius.data._config import DataConfig
from vitruvius.data._decoding import ImageSet
from vitruvius.data._image_loader import ImageLoader
from vitruvius.data._loader import Loader
from vitruvius.data._order import Order
from vitruvius.data._preprocessing import InputSize, eval_transform, resolve
from vitruvius.data._sources import chosen_ids
from vitruvius.data._tensors import TensorLoader, TensorSet


def images_loader(
    images: ImageSet | TensorSet,
    config: DataConfig,
    *,
    input_size: InputSize,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    only: Tensor | None = None,
) -> Loader:
    """Each of these images once, or only the images `only`, prepared for evaluation as the model wants them.

    `images` is anything with a name, a number of classes, a length, `read(index)` → (PIL image, label) and
    `describe(index)`, decoded by `config.workers` processes; or a `TensorSet`, which stays in memory. Of `config`
    count the batch sizes, `workers`, `broken`, and what overrules the model: `image_size`, `crop_pct` and their like.
    `input_size` is timm's data config of the model, or (channels, height, width).
    """
    pre, ids = resolve(config, input_size), chosen_ids(images, None, only=only)
    size = config.eval_batch_size or config.batch_size
    order = Order(ids, batch_size=size, shuffle=False, rank=rank, world_size=world_size)
    if isinstance(images, TensorSet):
        return TensorLoader(images, order, pre, config, device)
    return ImageLoader(images, order, eval_transform(pre), config, channels=pre.size[0], device=device)
