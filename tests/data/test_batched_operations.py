"""Batched augmentation, operation by operation, against Pillow, torchvision and timm on single images."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from sklearn.datasets import load_sample_image
from timm.data import auto_augment
from torch import Tensor
from torchvision.transforms import GaussianBlur, InterpolationMode
from torchvision.transforms import functional as TF

from vitruvius.data.augmentation import operations, resampling

MODES = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    "lanczos": Image.Resampling.LANCZOS,
}


def photographs(size: tuple[int, int] = (32, 32)) -> list[Image.Image]:
    """Six pieces of scikit-learn's photographs, a flat one and a noisy one; height and width may differ."""
    pictures = [Image.fromarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]
    boxes = [(0, 0, 420, 420), (200, 100, 400, 300), (100, 50, 164, 114)]
    pieces = [one.crop(box).resize(size[::-1], Image.Resampling.BOX) for one in pictures for box in boxes]
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    return [*pieces, Image.new("RGB", size[::-1], (90, 90, 200)), Image.fromarray(noise)]


def to_batch(images: list[Image.Image]) -> Tensor:
    """(B, C, H, W) levels."""
    arrays = [np.asarray(image) for image in images]
    return (
        torch.stack([torch.from_numpy(array.reshape(*array.shape[:2], -1).copy()) for array in arrays])
        .movedim(-1, 1)
        .float()
    )


def compare(ours: Tensor, theirs: list[Image.Image], *, most: float = 0, share: float = 0) -> None:
    """No pixel differs by more than `most` levels, and at most a `share` of them differs at all."""
    expected = to_batch(theirs)
    difference = (ours - expected).abs()
    assert difference.max() <= most, f"{difference.max()} in images {difference.amax((1, 2, 3)).tolist()}"
    assert (difference > 0).float().mean() <= share


FACTORS = torch.tensor([0.1, 0.46, 1.0, 1.9, 0.7, 1.35, 0.5, 1.6])
COLOUR: dict[str, tuple[Callable[..., Tensor], Callable[..., Image.Image], Tensor]] = {
    "brightness": (operations.brightness, lambda i, f: ImageEnhance.Brightness(i).enhance(f), FACTORS),
    "contrast": (operations.contrast, lambda i, f: ImageEnhance.Contrast(i).enhance(f), FACTORS),
    "colour": (operations.colour, lambda i, f: ImageEnhance.Color(i).enhance(f), FACTORS),
    "sharpness": (operations.sharpness, lambda i, f: ImageEnhance.Sharpness(i).enhance(f), FACTORS),
    "autocontrast": (operations.autocontrast, lambda i, _: ImageOps.autocontrast(i), FACTORS),
    "equalise": (operations.equalise, lambda i, _: ImageOps.equalize(i), FACTORS),
    "invert": (operations.solarise, lambda i, _: ImageOps.invert(i), torch.zeros(8)),
    "solarise": (
        operations.solarise,
        lambda i, t: ImageOps.solarize(i, int(t)),
        torch.tensor([0.0, 25, 128, 200, 255, 256, 77, 13]),
    ),
    "solarise_add": (
        operations.solarise_add,
        lambda i, a: auto_augment.solarize_add(i, int(a)),
        torch.tensor([0.0, 11, 33, 55, 77, 99, 110, 128]),
    ),
    "posterise": (
        operations.posterise,
        lambda i, b: ImageOps.posterize(i, int(b)) if b else Image.new(i.mode, i.size),
        torch.tensor([0.0, 1, 2, 3, 4, 5, 7, 8]),
    ),
}


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", COLOUR)
def test_colour_operations_are_pillows(name: str, mode: str) -> None:
    ours, theirs, strengths = COLOUR[name]
    images = [image.convert(mode) for image in photographs((32, 28))]
    expected = [theirs(image, float(strength)) for image, strength in zip(images, strengths, strict=True)]
    compare(ours(to_batch(images), strengths), expected)


def test_grey_is_pillows() -> None:
    images = photographs()
    compare(operations.grey(to_batch(images)), [image.convert("L") for image in images])


def test_hue_is_torchvisions() -> None:
    images = photographs()
    turns = torch.tensor([-0.5, -0.2, -0.01, 0.0, 0.1, 0.25, 0.4, 0.5])
    expected = [TF.adjust_hue(image, float(turn)) for image, turn in zip(images, turns, strict=True)]
    compare(operations.hue(to_batch(images), turns), expected, most=4, share=0.005)


@pytest.mark.parametrize("name", ["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"])
@pytest.mark.parametrize("size", [(32, 32), (24, 41)])
def test_resized_crops_are_pillows(name: str, size: tuple[int, int]) -> None:
    images = photographs((36, 30))  # taller boxes than the result are shrunk, which Pillow's versions round differently
    box = torch.tensor([[2, 0, 23, 30], [3, 5, 11, 9], [0, 0, 2, 2], [5, 0, 21, 30], [1, 1, 24, 24]])
    box = torch.cat([box, torch.tensor([[10, 3, 7, 21], [0, 0, 23, 29], [8, 8, 19, 17]])])
    expected = [
        image.crop((left, top, left + wide, top + tall)).resize(size[::-1], MODES[name])
        for image, (top, left, tall, wide) in zip(images, box.tolist(), strict=True)
    ]
    kind = resampling.FILTERS[name]
    taps = resampling.taps_of(box, size, (36, 30), [kind])
    straight = torch.zeros(8, 2, dtype=torch.bool)
    kinds = torch.full((8,), kind)
    ours = resampling.resized_crop(to_batch(images), box, kinds, straight, size=size, kinds=[kind], taps=taps)
    compare(ours, expected, most=1, share=0.005)


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_shrinking_is_pillows_up_to_the_order_of_its_two_passes(name: str) -> None:
    images = photographs((80, 64))[:-1]  # noise overshoots, and is cut in between
    box = torch.tensor([[0, 0, 80, 64], [3, 5, 60, 50], [7, 1, 40, 61], [0, 0, 80, 30], [9, 9, 33, 33], [1, 2, 70, 60]])
    box = torch.cat([box, torch.tensor([[0, 0, 80, 64]])])
    expected = [
        image.crop((left, top, left + wide, top + tall)).resize((32, 32), MODES[name])
        for image, (top, left, tall, wide) in zip(images, box.tolist(), strict=True)
    ]
    kind = resampling.FILTERS[name]
    kinds, straight = torch.full((7,), kind), torch.zeros(7, 2, dtype=torch.bool)
    taps = resampling.taps_of(box, (32, 32), (80, 64), [kind])
    ours = resampling.resized_crop(to_batch(images), box, kinds, straight, size=(32, 32), kinds=[kind], taps=taps)
    compare(ours, expected, most=3, share=0.25)


def test_crops_are_mirrored_after_they_are_resized() -> None:
    images = photographs()
    box = torch.tensor([[2, 3, 20, 17]] * 8)
    kinds = torch.tensor([resampling.BILINEAR, resampling.BICUBIC] * 4)
    both = [resampling.BILINEAR, resampling.BICUBIC]
    shared = {"size": (32, 32), "kinds": both, "taps": resampling.taps_of(box, (32, 32), (32, 32), both)}
    plain = resampling.resized_crop(to_batch(images), box, kinds, torch.zeros(8, 2, dtype=torch.bool), **shared)
    mirrored = torch.tensor([[False, True], [True, False], [True, True], [False, False]] * 2)
    turned = resampling.resized_crop(to_batch(images), box, kinds, mirrored, **shared)
    for image, other, (vertical, horizontal) in zip(plain, turned, mirrored.tolist(), strict=True):
        axes = [axis for axis, chosen in ((-2, vertical), (-1, horizontal)) if chosen]
        torch.testing.assert_close(other, image.flip(axes), atol=1, rtol=0)
        assert (other == image.flip(axes)).float().mean() > 0.995


@pytest.mark.parametrize("name", ["nearest", "bilinear", "bicubic"])
def test_affine_maps_are_pillows(name: str) -> None:
    images = photographs((32, 28))
    matrices = [
        (1, 0.2117, 0, 0, 1, 0), (1, -0.2973, 0, 0, 1, 0), (1, 0, 0, 0.1719, 1, 0), (1, 0, 5.37, 0, 1, 0),
        (1, 0, 0, 0, 1, -7.23), (1, 0, -40, 0, 1, 0), (0.9137, 0.1071, 2.01, -0.2011, 1.1093, 1.01), (1, 0, 0, 0, 1, 0),
    ]  # fmt: skip
    fill = (124, 116, 104)
    expected = [
        image.transform(image.size, Image.Transform.AFFINE, matrix, resample=MODES[name], fillcolor=fill)
        for image, matrix in zip(images, matrices, strict=True)
    ]
    ours = resampling.affine(to_batch(images), torch.tensor(matrices), torch.tensor(fill), resampling.FILTERS[name])
    compare(ours, expected, most=1, share=0.002)


@pytest.mark.parametrize("axis", [-1, -2])
def test_maps_along_one_axis_are_the_same_maps(axis: int) -> None:
    x = to_batch(photographs((32, 28)))
    matrix = torch.tensor([[1, 0.21, 3.3, 0, 1, 0]] * 8) if axis == -1 else torch.tensor([[1, 0, 0, -0.3, 1, 2.2]] * 8)
    fill = torch.tensor((124, 116, 104))
    whole = resampling.affine(x, matrix, fill, resampling.BICUBIC)
    torch.testing.assert_close(resampling.affine(x, matrix, fill, resampling.BICUBIC, axis), whole, atol=1, rtol=0)


@pytest.mark.parametrize("name", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(32, 32), (31, 28)])
def test_rotations_are_pillows(name: str, size: tuple[int, int]) -> None:
    images = photographs(size)
    degrees = torch.tensor([-30.0, -11.3, -0.7, 0.0, 2.2, 9.9, 21.4, 30.0])
    expected = [
        image.rotate(float(angle), resample=MODES[name], fillcolor=(124, 116, 104))
        for image, angle in zip(images, degrees, strict=True)
    ]
    matrix = resampling.rotation_matrix(degrees, *size)
    ours = resampling.affine(to_batch(images), matrix, torch.tensor((124, 116, 104)), resampling.FILTERS[name])
    difference = (ours - to_batch(expected)).abs()
    assert (difference > 1).float().mean() < 0.002  # a nearest pixel, or an edge, may fall to the other side
    assert (difference > 0).float().mean() < 0.01


def test_pillows_blur() -> None:
    images = photographs()
    radii = torch.tensor([0.1, 0.3, 0.7, 1.0, 1.3, 1.7, 1.9, 2.0])
    expected = [image.filter(ImageFilter.GaussianBlur(float(r))) for image, r in zip(images, radii, strict=True)]
    compare(operations.pillow_blur(to_batch(images), radii), expected, most=1, share=0.02)


def test_torchvisions_blur() -> None:
    images = photographs()
    sigmas = torch.tensor([0.1, 0.3, 0.7, 1.0, 1.3, 1.7, 1.9, 2.0])
    expected = [GaussianBlur(23, sigma=(float(s), float(s)))(image) for image, s in zip(images, sigmas, strict=True)]
    compare(operations.gaussian_blur(to_batch(images), sigmas, 23), expected, most=1, share=0.01)


def test_pieces_are_cut_out_at_their_own_corners() -> None:
    x = to_batch(photographs())
    top, left = torch.arange(8), torch.arange(8).flip(0)
    upside_down, mirrored = torch.tensor([0, 1] * 4), torch.tensor([0, 0, 1, 1] * 2)
    cut = resampling.crop(x, top, left, (20, 24), upside_down, mirrored)
    for number, piece in enumerate(cut):
        expected = x[number, :, number : number + 20, 7 - number : 31 - number]
        if upside_down[number]:
            expected = expected.flip(-2)
        if mirrored[number]:
            expected = expected.flip(-1)
        assert torch.equal(piece, expected)


def test_interpolations_have_torchvisions_names() -> None:
    assert set(resampling.FILTERS) <= {mode.value for mode in InterpolationMode}
