"""Images decoded once and kept as one uint8 tensor: prepared for the model, or as they are where batches are augmented.

`data.cache: auto` keeps images in memory only if that changes nothing but the speed: they have one size, their
augmentation can be done in batches, and they need at most `LIMIT` bytes. The limit does not depend on the machine, so
that a run that is resumed elsewhere makes the same choice.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, DataError
from vitruvius.data._config import DataConfig
from vitruvius.data.base import UNREADABLE, AnySet, ImageSet, Size, TensorSet
from vitruvius.data.jpeg import choose_decoder, decode_in_batches
from vitruvius.data.loader import BatchWithIds, ImageLoader
from vitruvius.data.order import Order
from vitruvius.data.preprocessing import Preprocessing, Transform, eval_transform, needs_pil, train_transform

logger = logging.getLogger(__name__)

LIMIT = 4 * 2**30  # bytes of decoded images that `auto` keeps
_LOOKS = 8  # images whose sizes are compared before all are decoded


class SizesDiffer(DataError):
    """Images of several sizes cannot be one tensor."""


def cached(
    data: AnySet, ids: Tensor, pre: Preprocessing, config: DataConfig, *, training: bool
) -> tuple[AnySet, Tensor]:
    """The images in memory if the recipe wants them there, and the ids of those that could be decoded."""
    if config.cache == "none" or isinstance(data, TensorSet):
        return data, ids
    tensors: TensorSet | None = None
    auto = config.cache == "auto"
    if training and not config.no_aug and (auto or needs_pil(config)):
        tensors = _as_they_are(data, ids, pre, config)
    elif not auto or not (training or len(ids) * math.prod(pre.size) > LIMIT):
        transform = train_transform(config, pre) if training and config.no_aug else eval_transform(pre)
        tensors = _decode_all(data, ids, pre.size, transform, config)
    if tensors is None:
        return data, ids
    assert tensors.rows is not None
    return tensors, ids[tensors.rows[ids] >= 0]


def _as_they_are(data: ImageSet, ids: Tensor, pre: Preprocessing, config: DataConfig) -> TensorSet | None:
    """Images of one size, to be augmented in batches; None, with the reason in the log, where `auto` cannot."""
    from vitruvius.data.augmentation.pipeline import BatchAugmentation

    try:
        BatchAugmentation(config, pre)  # what cannot be done in batches is said before anything is decoded
        size = (pre.size[0], *_common_size(data, ids))
        need = len(ids) * math.prod(size)
        if config.cache == "auto" and need > LIMIT:
            raise SizesDiffer(f"they need {need / 2**30:.1f} GiB, more than the {LIMIT / 2**30:.0f} that auto keeps.")
        return _decode_all(data, ids, size, partial(_as_it_is, data.name, size), config, decoded=True)
    except (ConfigError, SizesDiffer) as reason:
        if config.cache == "memory":
            raise
        logger.debug("data.cache=auto: images of %s are augmented one by one: %s", data.name, reason)
        return None


def _as_it_is(name: str, size: Size, image: object) -> Tensor:
    """A PIL image → uint8 (C, H, W); another size than expected is an error."""
    from torchvision.transforms import functional

    pixels: Tensor = functional.pil_to_tensor(image)
    if pixels.shape[1:] != size[1:]:
        raise _sizes_differ(name)
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
    data: ImageSet, ids: Tensor, size: Size, transform: Transform, config: DataConfig, *, decoded: bool = False
) -> TensorSet:
    """The images `ids` of a data set as tensors; the broken ones, if skipped, are missing and listed."""
    _check_memory(len(ids) * math.prod(size), data.name)
    rows = torch.full((len(data),), -1)
    images = torch.empty((len(ids), *size), dtype=torch.uint8)
    labels = torch.zeros(len(ids), dtype=torch.int64)
    filled = 0

    def put(batches: Iterable[BatchWithIds]) -> None:
        nonlocal filled
        for batch, their_labels, their_ids in batches:
            here = slice(filled, filled + len(batch))
            images[here], labels[here] = batch, their_labels
            rows[their_ids] = torch.arange(here.start, here.stop)
            filled = here.stop

    decode = choose_decoder(config.decoder, data, size[0]) if decoded else None
    if decode is not None:
        put(decode_in_batches(data, ids, size, decode))
        logger.debug("%s: %d image(s) decoded by the GPU, %d left to Pillow", data.name, filled, len(ids) - filled)
    order = Order(ids[rows[ids] < 0], batch_size=256, shuffle=False)
    loader = ImageLoader(data, order, transform, config, channels=size[0], device="cpu", raw=True)
    put(loader.with_ids())
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


def _check_memory(need: int, name: str) -> None:
    if not hasattr(os, "sysconf"):
        return  # Windows does not say
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > 0.8 * have:
        raise DataError(
            f"{name} needs {need / 2**30:.0f} GiB in memory, this machine has {have / 2**30:.0f}; use data.cache=none."
        )
