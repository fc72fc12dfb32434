"""Pictures as people have them become the pixels that the model was evaluated on."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitruvius._errors import DataError
from vitruvius.data.preprocessing import eval_transform
from vitruvius.look.pictures import decode, prepare, read_pictures

MODEL: dict[str, Any] = {"input_size": (3, 32, 32), "interpolation": "bicubic", "crop_pct": 0.875, "mean": (0.5,) * 3}


def gradient(width: int = 60, height: int = 40) -> Image.Image:
    """Red grows to the right, green downwards."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([255 * x / width, 255 * y / height, 0 * x], -1).astype(np.uint8))


def saved(image: Image.Image, kind: str, **settings: Any) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    file.seek(0)
    return file


JPEG = {"quality": 95}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("PNG", {}), ("JPEG", JPEG), ("JPEG", {"progressive": True, **JPEG}), ("WEBP", {"lossless": True}), ("BMP", {})],
)
def test_every_format_reads_the_same(kind: str, settings: dict[str, Any]) -> None:
    read = np.asarray(decode(saved(gradient(), kind, **settings), "x"), dtype=int)
    assert np.abs(read - np.asarray(gradient(), dtype=int)).max() <= 12


def test_a_gif_shows_its_first_frame() -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    file = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(file, "x").getpixel((5, 5)) == (255, 0, 0)


def test_exif_turns_the_picture() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn by 90 degrees to the right
    turned = decode(saved(gradient(), "JPEG", exif=exif, quality=95), "x")
    assert turned.size == (40, 60)
    expected = np.asarray(gradient().transpose(Image.Transpose.ROTATE_270), dtype=int)
    assert np.abs(np.asarray(turned, dtype=int) - expected).max() <= 12


def test_transparent_parts_are_white_in_every_mode() -> None:
    whole = gradient().convert("RGBA")
    whole.putalpha(0)
    grey = Image.new("LA", (20, 20), (0, 0))
    palette = Image.new("P", (20, 20), 0)
    for file in (saved(whole, "PNG"), saved(grey, "PNG"), saved(palette, "PNG", transparency=0)):
        assert np.asarray(decode(file, "x")).min() == 255


def test_grey_of_8_and_16_bits_keeps_its_brightness() -> None:
    for image in (Image.new("L", (20, 20), 100), Image.fromarray(np.full((20, 20), 100 * 257, dtype=np.uint16))):
        assert decode(saved(image, "PNG"), "x").getpixel((3, 3)) == (100, 100, 100)


def test_cmyk_becomes_rgb() -> None:
    image = Image.new("CMYK", (20, 20), (0, 255, 255, 0))
    red, green, blue = decode(saved(image, "JPEG", quality=95), "x").getpixel((3, 3))
    assert red > 200
    assert max(green, blue) < 60


def test_the_crop_is_that_of_the_evaluation() -> None:
    from vitruvius.data import DataConfig
    from vitruvius.data.preprocessing import resolve

    expected = eval_transform(resolve(DataConfig(), MODEL))(gradient(500, 300))
    assert torch.equal(prepare(gradient(500, 300), MODEL), expected.float() / 255)
    assert prepare(gradient(), {**MODEL, "input_size": (1, 8, 8)}).shape == (1, 8, 8)
    with pytest.raises(DataError, match="channels"):
        prepare(gradient(), {**MODEL, "input_size": (13, 32, 32)})


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (31, 33), (1000, 40)])
def test_any_size_is_brought_to_the_models(size: tuple[int, int]) -> None:
    pixels = prepare(decode(saved(gradient(*size), "PNG"), "x"), MODEL)
    assert pixels.shape == (3, 32, 32)
    assert 0 <= pixels.min() <= pixels.max() <= 1


def test_a_folder_gives_its_pictures_by_name_and_at_most_so_many(tmp_path: Path) -> None:
    for name in ("b.png", "a.PNG", "c.jpeg"):
        gradient().save(tmp_path / name, "PNG")
    (tmp_path / "notes.txt").write_text("no picture")
    assert [picture.name for picture in read_pictures([tmp_path], MODEL)] == ["a.PNG", "b.png", "c.jpeg"]
    assert len(read_pictures([tmp_path], MODEL, images=2)) == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a pipe", "a link to itself", "a folder among files"])
@pytest.mark.parametrize("named", [True, False])
def test_what_is_no_file_is_refused_at_once(kind: str, named: bool, tmp_path: Path) -> None:
    path = tmp_path / "dog.jpg"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link to itself":
        path.symlink_to(path)
    else:
        path.mkdir()
    with pytest.raises(DataError, match=r"dog\.jpg"):
        read_pictures([path if named else tmp_path], MODEL)


def test_pil_images_and_tensors_are_pictures_too() -> None:
    pixels = torch.rand(2, 3, 32, 32)
    names = [picture.name for picture in read_pictures([gradient(), pixels], MODEL)]
    assert names == ["image", "image 0", "image 1"]
    assert torch.equal(read_pictures([pixels[0]], MODEL)[0].pixels, pixels[0])
