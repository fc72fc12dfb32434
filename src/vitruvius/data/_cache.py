"""Images decoded once and kept as one uint8 tensor: prepared for the model, or as they are where batches are augmented.

`data.cache: auto` keeps images in memory only if that changes nothing but the speed: they have one size, their
augmentation can be done in batches, and they need at most `LIMIT` bytes. The limit does not depend on the machine, so
that a run that is resumed elsewhere makes the same choice.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor
from torchvision.transforms import functional as TF

from vitruvius._errors import ConfigError, DataError
from vitruvius.data._config import DataConfig
from vitruvius.data._image_loader import UNREADABLE, ImageLoader, ImageSet
from vitruvius.data._order import Order
from vitruvius.data._preprocessing import Preprocessing, Transform, eval_transform, needs_pil, train_transform
from vitruvius.data._tensors import TensorSet
from vitruvius.data.augmentation.pipeline import BatchAugmentation
from vitruvius.data.sources._jpeg import Decode, Decoded, EncodedImages, choose_decoder, decode_in_batches

logger = logging.getLogger(__name__)

LIMIT = 4 * 2**30  # bytes of decoded images that `auto` keeps
_LOOKS = 8  # images whose sizes are compared before all are decoded
Size = tuple[int, int, int]  # channels, height, width


class SizesDiffer(DataError):
    """Images of several sizes cannot be one tensor."""


def cached(
    data: TensorSet | ImageSet, ids: Tensor, pre: Preprocessing, config: DataConfig, *, training: bool
) -> tuple[TensorSet | ImageSet, Tensor]:
    """The images in memory if the recipe wants them there, and the ids of those that could be decoded."""
    if config.cache == "none" or isinstance(data, TensorSet):
        return data, ids
    if not training:
        tensors = _prepared(data, ids, pre, config, eval_transform(pre))
    elif config.no_aug:
        tensors = None
        if config.cache == "memory":
            tensors = _prepared(data, ids, pre, config, train_transform(config, pre))
    elif config.cache == "auto":
        tensors = _decoded_if_it_changes_nothing(data, ids, pre, config)
    elif needs_pil(config):
        BatchAugmentation(config, pre)  # what cannot be done in batches is said before anything is decoded
        tensors = _decoded(data, ids, pre, config)
    else:
        tensors = _prepared(data, ids, pre, config, eval_transform(pre))
    if tensors is None:
        return data, ids
    assert tensors.rows is not None
    return tensors, ids[tensors.rows[ids] >= 0]


def _prepared(
    data: ImageSet, ids: Tensor, pre: Preprocessing, config: DataConfig, transform: Transform
) -> TensorSet | None:
    """Images resized and cropped once and for all; None where `auto` finds them too large."""
    if config.cache == "auto" and len(ids) * math.prod(pre.size) > LIMIT:
        return None
    return _decode_all(data, ids, pre.size, transform, config, decoded=False)


def _decoded_if_it_changes_nothing(
    data: ImageSet, ids: Tensor, pre: Preprocessing, config: DataConfig
) -> TensorSet | None:
    try:
        BatchAugmentation(config, pre)
        return _decoded(data, ids, pre, config)
    except (ConfigError, SizesDiffer) as reason:
        logger.debug("data.cache=auto: images of %s are augmented one by one: %s", data.name, reason)
        return None


def _decoded(data: ImageSet, ids: Tensor, pre: Preprocessing, config: DataConfig) -> TensorSet:
    """Images as they are, all of one size."""
    size = (pre.size[0], *_common_size(data, ids))
    need = len(ids) * math.prod(size)
    if config.cache == "auto" and need > LIMIT:
        raise SizesDiffer(f"they need {need / 2**30:.1f} GiB, more than the {LIMIT / 2**30:.0f} that auto keeps.")
    return _decode_all(data, ids, size, _AsItIs(data.name, size[1:]), config, decoded=True)


class _AsItIs:
    """A PIL image → uint8 (C, H, W); another size than expected is an error."""

    def __init__(self, name: str, size: tuple[int, int]) -> None:
        self.name, self.size = name, size

    def __call__(self, image: object) -> Tensor:
        pixels: Tensor = TF.pil_to_tensor(image)
        if tuple(pixels.shape[1:]) != self.size:
            raise _sizes_differ(self.name)
        return pixels


def _common_size(data: ImageSet, ids: Tensor) -> tuple[int, int]:
    """Height and width of a few images, which must agree."""
    sizes = set()
    for index in ids[:: max(1, len(ids) // _LOOKS)].tolist():
        try:
            image, _ = data.read(index)
        except UNREADABLE:
            continue  # met again, and named, when all are decoded
        sizes.add((image.height, image.width))
    if len(sizes) != 1:
        raise _sizes_differ(data.name)
    return sizes.pop()


def _sizes_differ(name: str) -> SizesDiffer:
    return SizesDiffer(
        f"the images of {name} have several sizes; in memory they can be padded, flipped, erased and mixed after they "
        "are resized as for evaluation, but scale, ratio, color_jitter, aa, rotation and the like need data.cache=none."
    )


def _decode_all(
    data: ImageSet, ids: Tensor, size: Size, transform: Transform, config: DataConfig, *, decoded: bool
) -> TensorSet:
    """The images `ids` of a data set as tensors; the broken ones, if skipped, are missing and listed."""
    _check_memory(len(ids), size, data.name)
    rows = torch.full((len(data),), -1)
    images = torch.empty((len(ids), *size), dtype=torch.uint8)
    labels = torch.zeros(len(ids), dtype=torch.int64)
    filled = 0
    by_gpu = choose_decoder(config.decoder, data, size[0]) if decoded else None
    for batch in _by_gpu(data, ids, size, by_gpu):
        filled = _put(batch, images, labels, rows, filled)
    if filled:
        left = ids[rows[ids] < 0]
        logger.debug("%s: %d image(s) decoded by the GPU, %d left to Pillow", data.name, filled, len(left))
    else:
        left = ids
    order = Order(left, batch_size=256, shuffle=False)
    loader = ImageLoader(data, order, transform, config, channels=size[0], device="cpu", raw=True)
    for batch_images, batch_labels, batch_ids in loader.with_ids():
        filled = _put(Decoded(batch_images, batch_labels, batch_ids), images, labels, rows, filled)
    return TensorSet(
        name=data.name,
        images=images[:filled],
        labels=labels[:filled],
        num_classes=data.num_classes,
        hflip=0.5,
        rows=rows,
        broken=tuple(loader.broken),
        decoded=decoded,
    )


def _by_gpu(data: ImageSet, ids: Tensor, size: Size, decode: Decode | None) -> Iterator[Decoded]:
    if decode is not None:
        assert isinstance(data, EncodedImages)
        yield from decode_in_batches(data, ids, size, decode)


def _put(batch: Decoded, images: Tensor, labels: Tensor, rows: Tensor, filled: int) -> int:
    """Put a batch behind those that are there; how many there are now."""
    here = slice(filled, filled + len(batch.images))
    images[here] = batch.images
    labels[here] = batch.labels
    rows[batch.ids] = torch.arange(here.start, here.stop)
    return here.stop


def _check_memory(number: int, size: Size, name: str) -> None:
    need = number * math.prod(size)
    if not hasattr(os, "sysconf"):
        return  # Windows does not say
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > 0.8 * have:
        raise DataError(
            f"{name} needs {need / 2**30:.0f} GiB in memory, this machine has {have / 2**30:.0f}; use data.cache=none."
        )
