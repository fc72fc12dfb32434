"""Pictures that anybody may bring: decoded in this one place, then cropped as the model wants them.

C channels, h and w rows and columns of the model's input
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from vitruvius._checks import check_count, check_pixels
from vitruvius._errors import DataError
from vitruvius._files import is_url
from vitruvius.data import DataConfig
from vitruvius.data.base import UNREADABLE
from vitruvius.data.preprocessing import eval_transform, resolve

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
KINDS = "JPEG, PNG, WebP, GIF or BMP"
MAX_PIXELS = 64_000_000
MAX_RATIO = 32  # of the longer to the shorter side; the shorter one is brought to the size of the model
MOST = 16  # pictures of a folder


class Picture(NamedTuple):
    """A name, and what the model sees."""

    name: str
    pixels: Tensor  # (C, h, w) in [0, 1]


def read_pictures(sources: Iterable[Any], preprocessing: Any, *, images: int | None = None) -> list[Picture]:
    """Everything that was given, cropped as the model wants it, each under a name of its own.

    sources: files, folders (their pictures by name, at most `images`), PIL images, or pixels (C, h, w) or (n, C, h, w)
        in [0, 1] that are cropped already. preprocessing: timm's data config of the model. images: default MOST.
    """
    if images is not None:
        check_count(images, "--images")
    found: list[tuple[str, Any]] = []
    for source in sources:
        found += list(_items(source, images or MOST))
    if not found:
        raise DataError("there is no picture to look at; name a file, a folder, or data of the model.")
    names: dict[str, int] = {}
    read = []
    for name, item in found:
        names[name] = names.get(name, 0) + 1
        unique = name if names[name] == 1 else f"{name} ({names[name]})"
        if isinstance(item, Path):
            item = decode(item, str(item))
        elif isinstance(item, Image.Image):
            _check_size(item.size, name)
            item = _as_rgb(ImageOps.exif_transpose(item))
        read.append(Picture(unique, item if isinstance(item, Tensor) else prepare(item, preprocessing)))
    return read


def pictures_of(loader: Any) -> list[Picture]:
    """The images of a loader of `vitruvius.data`, already as the model wants them."""
    return [
        Picture(f"{loader.name} {number}", pixels)
        for x, _, ids in loader.with_ids()
        for pixels, number in zip(x.cpu(), ids.tolist(), strict=True)
    ]


def decode(file: Path | io.BytesIO, name: str) -> Image.Image:
    """The picture as people see it: first frame, turned as EXIF says, transparent parts white, 8 bits, RGB.

    `name` is what errors call the file. A file that is none, is damaged, or has too many pixels is a DataError.
    """
    if isinstance(file, Path) and file.exists() and not file.is_file():
        raise DataError(f"{name} is a folder, a pipe or a device, and reading it may wait forever; expected a file.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Pillow warns of is refused below, or harmless
            with Image.open(file, formats=FORMATS) as image:
                _check_size(image.size, name)
                image.load()
                return _as_rgb(ImageOps.exif_transpose(image))
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{name} is not a picture that can be read; expected {KINDS}.") from None
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise DataError(f"{name} cannot be opened: {error.strerror}.") from None
    except Image.DecompressionBombError:
        raise DataError(f"{name} has more than {MAX_PIXELS // 1_000_000} megapixels; make it smaller first.") from None
    except (*UNREADABLE, MemoryError) as error:
        raise DataError(f"{name} is damaged: {' '.join(str(error).split())}. Save or download it again.") from None


def prepare(image: Image.Image, preprocessing: Any) -> Tensor:
    """(C, h, w) in [0, 1]: an RGB `image` resized and cropped as the model was evaluated by its authors."""
    pre = resolve(DataConfig(), preprocessing)
    if pre.size[0] not in (1, 3):
        raise DataError(f"the model takes {pre.size[0]} channels; a picture has 3, or 1 if it is grey.")
    return eval_transform(pre)(image.convert("L" if pre.size[0] == 1 else "RGB")).float() / 255


def _items(source: Any, most: int) -> Iterable[tuple[str, Any]]:
    """Each picture of a source, with its name; what is a path is only looked at."""
    if isinstance(source, Tensor):
        pixels = source[None] if source.ndim == 3 else source
        if pixels.ndim != 4:
            raise DataError(f"an image has shape {tuple(source.shape)}; expected (channels, rows, columns).")
        check_pixels(pixels)
        return [(f"image {number}", each) for number, each in enumerate(pixels)]
    if isinstance(source, Image.Image):
        return [(Path(getattr(source, "filename", "") or "image").name, source)]
    if not isinstance(source, str | Path):
        raise DataError(f"{type(source).__name__} is not a picture; expected a file, a PIL image or a tensor.")
    if is_url(str(source)) or str(source).startswith(("http:", "https:")):
        raise DataError(f"{source} is a URL; save the picture first and name its file, since nothing is downloaded.")
    path = Path(source).expanduser()
    if not path.is_dir():
        return [(path.name, path)]
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
    if not files:
        raise DataError(f"{path} holds no picture; expected {KINDS} files in the folder itself.")
    return [(file.name, file) for file in files[:most]]


def _check_size(size: Sequence[int], name: str) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{name} has {width} × {height} pixels, more than {MAX_PIXELS // 1_000_000} megapixels; make it smaller."
        )
    if not min(size) or max(size) > MAX_RATIO * min(size):
        raise DataError(f"{name} has {width} × {height} pixels, too long and thin to be cropped to a square.")


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        values = np.asarray(image, dtype=np.float64)
        return Image.fromarray((values / 257).round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        whole = image.convert("RGBA")
        white = Image.new("RGBA", whole.size, "white")
        return Image.alpha_composite(white, whole).convert("RGB")
    return image.convert("RGB")


def as_uint8(pixels: Tensor) -> np.ndarray:
    """(C, h, w) in [0, 1] → (3, h, w) uint8, as pages and figures show it."""
    whole = (pixels.detach().float().cpu() * 255).round().clamp(0, 255).byte()
    return whole.expand(3, -1, -1).numpy() if len(whole) in (1, 3) else torch.stack([whole[0]] * 3).numpy()
