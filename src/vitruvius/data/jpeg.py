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
from typing import Any, Literal

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius._processes import choose_device

logger = logging.getLogger(__name__)

BATCH = 256
READERS = 8  # threads that read files
BEGINNING = b"\xff\xd8"  # of every JPEG
Decode = Callable[[list[Tensor]], list[Tensor]]  # bytes of files, (length,) uint8 each → (C, H, W) uint8 each


def choose_decoder(wanted: Literal["pillow", "nvjpeg", "auto"], data: object, channels: int) -> Decode | None:
    """The GPU's decoder for these images; None: Pillow's, and for `auto` the reason goes into the log.

    wanted: `data.decoder`.
    data: the set of images; files are read by its `read_bytes(index)` → (bytes, label).
    channels: what the model takes.
    """
    if wanted == "pillow":
        return None
    reason = _why_not(data, channels)
    if not reason:
        return _on_gpu
    if wanted == "nvjpeg":
        raise ConfigError(f"data.decoder = nvjpeg: {reason}. Write auto, or pillow.")
    logger.debug("data.decoder=auto: Pillow decodes: %s", reason)
    return None


def _why_not(data: object, channels: int) -> str:
    """Why the GPU cannot decode these images; empty where it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    import torchvision.io

    if not hasattr(torchvision.io, "decode_jpeg"):
        return f"torchvision {torchvision.__version__} has no decode_jpeg"
    if not hasattr(data, "read_bytes"):
        return "these images are not files"
    if channels != 3:
        return f"the model takes {channels} channel(s), and JPEGs are decoded to 3"
    return ""


def _on_gpu(files: list[Tensor]) -> list[Tensor]:
    import torchvision.io

    decode: Any = torchvision.io.decode_jpeg
    with warnings.catch_warnings(action="ignore"):  # torchvision 0.29 says that it will go
        images: list[Tensor] = decode(files, mode=torchvision.io.ImageReadMode.RGB, device=choose_device())
    return images


def decode_in_batches(
    data: Any, ids: Tensor, size: tuple[int, ...], decode: Decode
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(images (B, C, H, W) uint8, labels, ids) of those that the GPU can decode to this size; others are left out."""
    with ThreadPoolExecutor(READERS) as readers:
        for part in ids.split(BATCH):
            files = list(readers.map(lambda index: _read(data, index), part.tolist()))
            places = [place for place, (file, _) in enumerate(files) if file.startswith(BEGINNING)]
            encoded = [torch.frombuffer(bytearray(files[place][0]), dtype=torch.uint8) for place in places]
            decoded = {
                place: image
                for place, image in zip(places, _decode(encoded, decode), strict=True)
                if image is not None and tuple(image.shape) == tuple(size)
            }
            if decoded:
                labels = torch.tensor([files[place][1] for place in decoded])
                yield torch.stack(list(decoded.values())).cpu(), labels, part[list(decoded)]


def _read(data: Any, index: int) -> tuple[bytes, int]:
    """A file and its label; nothing where it cannot be read, which the workers meet again and name."""
    try:
        file: tuple[bytes, int] = data.read_bytes(index)
    except OSError:
        return b"", -1
    return file


def _decode(files: list[Tensor], decode: Decode) -> list[Tensor | None]:
    """The images, together if that works: one file that cannot be decoded makes a whole batch fail."""
    try:
        return list(decode(files)) if files else []
    except RuntimeError:
        return [None] if len(files) == 1 else [image for file in files for image in _decode([file], decode)]
