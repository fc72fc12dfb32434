"""JPEGs decoded in batches by the GPU (nvJPEG, through torchvision), for images that are kept in memory as they are.

nvJPEG rounds its cosine transform and enlarges its colours otherwise than Pillow's libjpeg: pixels differ by a few of
255 levels, so it is used only where a recipe says so (`data.decoder`). What it cannot decode is left to the workers.
B images of a batch
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torchvision.io
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius._processes import choose_device

logger = logging.getLogger(__name__)

BATCH = 256
READERS = 8  # threads that read files
BEGINNING = b"\xff\xd8"  # of every JPEG
Decode = Callable[[list[Tensor]], list[Tensor]]  # bytes of files, (length,) uint8 each → (C, H, W) uint8 each


@runtime_checkable
class EncodedImages(Protocol):
    """Images whose files can be read without decoding them."""

    def read_bytes(self, index: int) -> tuple[bytes, int]:
        """The file of an image and its label. `index` counts from 0."""
        ...


class Decoded(NamedTuple):
    """What the GPU made of a batch: images (B, C, H, W) uint8 on the CPU, labels (B,) and ids (B,)."""

    images: Tensor
    labels: Tensor
    ids: Tensor


def choose_decoder(wanted: Literal["pillow", "nvjpeg", "auto"], data: object, channels: int) -> Decode | None:
    """The GPU's decoder for these images; None: Pillow's, and for `auto` the reason goes into the log.

    `wanted` is `data.decoder`; `data` the set of images; `channels` what the model takes.
    """
    if wanted == "pillow":
        return None
    reason = _obstacle(data, channels)
    if not reason:
        return _on_gpu
    if wanted == "nvjpeg":
        raise ConfigError(f"data.decoder = nvjpeg: {reason}. Write auto, or pillow.")
    logger.debug("data.decoder=auto: Pillow decodes: %s", reason)
    return None


def _obstacle(data: object, channels: int) -> str:
    """Why the GPU cannot decode these images; empty where it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not hasattr(torchvision.io, "decode_jpeg"):
        return f"torchvision {torchvision.__version__} has no decode_jpeg"
    if not isinstance(data, EncodedImages):
        return "these images are not files"
    if channels != 3:
        return f"the model takes {channels} channel(s), and JPEGs are decoded to 3"
    return ""


def _on_gpu(files: list[Tensor]) -> list[Tensor]:
    decode: Any = torchvision.io.decode_jpeg
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision 0.29 says that it will go
        images: list[Tensor] = decode(files, mode=torchvision.io.ImageReadMode.RGB, device=choose_device())
    return images


def decode_in_batches(data: EncodedImages, ids: Tensor, size: tuple[int, ...], decode: Decode) -> Iterator[Decoded]:
    """Batches of those images that the GPU can decode to this size; the others are left out.

    `data` gives the files of the images `ids`; `size` is (C, H, W); `decode` what `choose_decoder` chose.
    """
    with ThreadPoolExecutor(READERS) as readers:
        for part in ids.split(BATCH):
            files = list(readers.map(lambda index: _read(data, index), part.tolist()))
            found = _decode(files, size, decode)
            if found:
                places, images = list(found), torch.stack(list(found.values()))
                yield Decoded(images.cpu(), torch.tensor([files[place][1] for place in places]), part[places])


def _decode(files: list[tuple[bytes, int]], size: tuple[int, ...], decode: Decode) -> dict[int, Tensor]:
    """Images of this size by their place among the files."""
    places = [place for place, (file, _) in enumerate(files) if file.startswith(BEGINNING)]
    images = _each([torch.frombuffer(bytearray(files[place][0]), dtype=torch.uint8) for place in places], decode)
    found = {}
    for place, image in zip(places, images, strict=True):
        if image is not None and tuple(image.shape) == tuple(size):
            found[place] = image
    return found


def _read(data: EncodedImages, index: int) -> tuple[bytes, int]:
    """A file and its label; nothing where it cannot be read, which the workers meet again and name."""
    try:
        return data.read_bytes(index)
    except OSError:
        return b"", -1


def _each(files: list[Tensor], decode: Decode) -> list[Tensor | None]:
    """The images, together if that works: one file that cannot be decoded makes a whole batch fail."""
    if not files:
        return []
    try:
        return list(decode(files))
    except RuntimeError:
        return [_alone(file, decode) for file in files]


def _alone(file: Tensor, decode: Decode) -> Tensor | None:
    try:
        return decode([file])[0]
    except RuntimeError:
        return None
