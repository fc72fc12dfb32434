"""Corruptions of CIFAR-sized images against slow loops, scipy and Pillow, with CIFAR-10-C's constants typed again."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from PIL import Image
from scipy import ndimage, stats
from torch import Tensor

from vitruvius._random import Dice
from vitruvius.corruptions.base import SEVERITIES, corruptions
from vitruvius.corruptions.blurs import motion, wander
from vitruvius.corruptions.elastic_transform import affine_places
from vitruvius.corruptions.filters import correlate, disk, gaussian, sample
from vitruvius.corruptions.fog import plasma
from vitruvius.corruptions.frost import cloud, feathers, streaks
from vitruvius.corruptions.jpeg_compression import by_arithmetic
from vitruvius.corruptions.noise import poisson
from vitruvius.corruptions.spatter import FAR, distances, equalised


def picture(height: int = 32, width: int = 32, channels: int = 3) -> Tensor:
    """(1, C, H, W): a smooth scene with edges, at 8-bit levels."""
    rows, columns = torch.meshgrid(torch.linspace(0, 6, height), torch.linspace(0, 5, width), indexing="ij")
    planes = [0.5 + 0.4 * (rows * (1 + c) / 2 + columns).sin() * (columns > 1.5 + c / 2) for c in range(channels)]
    return (torch.stack(planes)[None] * 255).round() / 255


def levels(x: Tensor) -> np.ndarray:
    """(H, W, C) uint8 of one image."""
    return (x[0] * 255).round().byte().movedim(0, -1).numpy()


def result(name: str, severity: int, x: Tensor) -> np.ndarray:
    return levels(corruptions[name](severity=severity, scale="cifar").apply(x)).astype(int)


def assert_within_one_level(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - np.floor(np.clip(wanted, 0, 255) + 1e-3)).max() <= 1


@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_blur_is_scipys(severity: int) -> None:
    x, sigma = picture(), (0.4, 0.6, 0.7, 0.8, 1)[severity - 1]
    wanted = ndimage.gaussian_filter(levels(x).astype(float), (sigma, sigma, 0), mode="nearest")
    assert_within_one_level(result("gaussian_blur", severity, x), wanted)


@pytest.mark.parametrize("sigma", [0.3, 2.0, 40.0])
def test_gaussian_filter_is_scipys_even_when_wider_than_the_image(sigma: float) -> None:
    x = picture(9, 13)
    for border, mode in {"nearest": "nearest", "reflect": "reflect", "reflect_101": "mirror"}.items():
        wanted = ndimage.gaussian_filter(x.double().numpy(), (0, 0, sigma, sigma), mode=mode, truncate=3)
        found = gaussian(x, sigma, border=border, truncate=3)
        torch.testing.assert_close(found, torch.from_numpy(wanted).float(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_defocus_blur_is_a_correlation_with_a_disk(severity: int) -> None:
    x, (radius, sigma) = picture(), ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[severity - 1]
    line = np.arange(-8, 9)
    flat = (line[:, None] ** 2 + line**2 <= radius**2).astype(float)
    soft = np.exp(-0.5 * (np.arange(-1, 2) / sigma) ** 2)
    kernel = ndimage.correlate(flat / flat.sum(), np.outer(soft, soft) / soft.sum() ** 2, mode="mirror")
    wanted = ndimage.correlate(levels(x).astype(float), kernel[..., None], mode="mirror")
    assert_within_one_level(result("defocus_blur", severity, x), wanted)


def test_a_lopsided_kernel_is_not_turned_over() -> None:
    x, kernel = picture(11, 8), torch.rand(5, 5, generator=torch.Generator().manual_seed(0))
    wanted = ndimage.correlate(x.double().numpy(), kernel.double().numpy()[None, None], mode="mirror")
    torch.testing.assert_close(correlate(x, kernel), torch.from_numpy(wanted).float(), atol=1e-5, rtol=0)


def test_a_disk_has_the_area_of_its_radius() -> None:
    kernel = disk(10, 0.5, torch.float32, torch.device("cpu"))
    assert kernel.shape == (21, 21)
    assert kernel.sum().item() == pytest.approx(1, abs=0.03)
    assert 1 / kernel.max().item() == pytest.approx(math.pi * 100, rel=0.02)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_zoom_blur_is_scipys(severity: int) -> None:
    x, stop = picture(), (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1]
    image = levels(x).astype(float)
    total, factors = image.copy(), np.arange(1, stop, 0.01)
    for factor in factors:
        kept = math.ceil(32 / factor)
        top = (32 - kept) // 2
        large = ndimage.zoom(image[top : top + kept, top : top + kept], (factor, factor, 1), order=1)
        trim = (large.shape[0] - 32) // 2
        total += large[trim : trim + 32, trim : trim + 32]
    assert_within_one_level(result("zoom_blur", severity, x), total / (len(factors) + 1))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_brightness_and_saturation_are_those_of_hsv(severity: int) -> None:
    x = picture()
    hsv = rgb_to_hsv(levels(x) / 255)
    light = (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]
    brighter = hsv_to_rgb(np.stack([hsv[..., 0], hsv[..., 1], np.clip(hsv[..., 2] + light, 0, 1)], -1))
    assert_within_one_level(result("brightness", severity, x), 255 * brighter)
    factor, more = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))[severity - 1]
    stronger = hsv_to_rgb(np.stack([hsv[..., 0], np.clip(hsv[..., 1] * factor + more, 0, 1), hsv[..., 2]], -1))
    assert_within_one_level(result("saturate", severity, x), 255 * stronger)


def test_black_becomes_grey_in_more_light() -> None:
    assert corruptions["brightness"](severity=5, round8=False).apply(torch.zeros(1, 3, 4, 4)).unique().item() == (
        pytest.approx(0.3)
    )


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_is_what_is_left_of_the_distance_to_the_mean(severity: int) -> None:
    x, left = picture(), (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1]
    image = levels(x).astype(float)
    mean = image.mean((0, 1))
    assert_within_one_level(result("contrast", severity, x), (image - mean) * left + mean)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_pixelate_is_pillows(severity: int) -> None:
    x, left = picture(), (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1]
    small = Image.fromarray(levels(x)).resize((int(32 * left),) * 2, Image.Resampling.BOX)
    wanted = np.asarray(small.resize((32, 32), Image.Resampling.BOX))
    assert (result("pixelate", severity, x) == wanted).all()


@pytest.mark.parametrize("shape", [(32, 32), (8, 8), (37, 50), (4, 5)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_jpeg_is_libjpegs(severity: int, channels: int, shape: tuple[int, int]) -> None:
    x, quality = picture(*shape, channels), (80, 65, 58, 50, 40)[severity - 1]
    file = io.BytesIO()
    Image.fromarray(levels(x).squeeze()).save(file, "JPEG", quality=quality)
    wanted = np.asarray(Image.open(file)).reshape(*shape, channels)
    assert (result("jpeg_compression", severity, x) == wanted).all()
    arithmetic = by_arithmetic(torch.from_numpy(levels(x)).movedim(-1, 0)[None].float(), quality)
    difference = np.abs(arithmetic[0].movedim(0, -1).numpy() - wanted)
    assert difference.mean() < 0.7  # a coefficient in a hundred rounds otherwise than libjpeg's whole-number cosines
    assert (difference > 2).mean() < 0.1


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_glass_is_the_loop_over_pixels(reach: int) -> None:
    x, dice = torch.rand(3, 3, 15, 13, generator=torch.Generator().manual_seed(0)), Dice(torch.arange(3))
    offset = dice.integers("wander", 2 * reach, (2, 15, 13)) - reach
    wanted = x.clone()
    for image in range(3):
        for row in range(15 - reach, reach, -1):
            for column in range(13 - reach, reach, -1):
                down, right = offset[image, :, row, column].tolist()
                wanted[image, :, row, column] = wanted[image, :, row + down, column + right]
    assert torch.equal(wander(x, offset, reach), wanted)


@pytest.mark.parametrize("size", [(12, 10), (80, 60)])
def test_motion_is_a_sum_of_shifted_images(size: tuple[int, int]) -> None:
    x, angle = picture(*size).expand(2, -1, -1, -1), torch.tensor([-100.0, 30.0])
    weights = [math.exp(-0.5 * (i / 2.5) ** 2) for i in range(13)]
    wanted = torch.zeros_like(x)
    for image, degrees in enumerate(angle.tolist()):
        for i, weight in enumerate(weights):
            down = math.ceil(i * math.sin(math.radians(degrees)) - 0.5)
            right = math.ceil(i * math.cos(math.radians(degrees)) - 0.5)
            rows, columns = (np.arange(n) + by for n, by in zip(size, (down, right), strict=True))
            there = x[image][:, rows.clip(0, size[0] - 1)][..., columns.clip(0, size[1] - 1)]
            wanted[image] += weight / sum(weights) * there
    torch.testing.assert_close(motion(x, 6, 2.5, angle), wanted)


@pytest.mark.parametrize("photons", [3, 60, 500])
def test_photons_are_poisson_numbers(photons: int) -> None:
    dice = Dice(torch.arange(1))
    for level in (0, 1, 100, 255):
        u = dice.uniform("photons", (20000,), level)
        counts = poisson(torch.full_like(u, level).long(), u, photons)
        assert (counts.numpy() == np.maximum(stats.poisson(level / 255 * photons).ppf(u.double().numpy()), 0)).all()


def test_plasma_fills_the_unit_interval_and_repeats_at_its_edges() -> None:
    heights = plasma(Dice(torch.arange(4)), 64, 2.0)
    assert heights.amin((1, 2)).tolist() == [0] * 4
    assert heights.amax((1, 2)).tolist() == [1] * 4
    inside, across = (heights[:, 1:] - heights[:, :-1]).abs().mean(), (heights[:, 0] - heights[:, -1]).abs().mean()
    assert across < 3 * inside
    rough = plasma(Dice(torch.arange(4)), 64, 1.4)
    assert (rough[:, 1:] - rough[:, :-1]).abs().mean() > 2 * inside


def test_elastic_displacement_is_scipys_lookup() -> None:
    x = picture(16, 20)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(20.0), indexing="ij")
    rows, columns = rows + 7 * columns.sin(), columns - 9 * rows.cos()
    for border, mode in {"reflect": "reflect", "reflect_101": "mirror"}.items():
        wanted = [ndimage.map_coordinates(plane, [rows, columns], order=1, mode=mode) for plane in x[0].numpy()]
        found = sample(x, rows[None], columns[None], border=border)
        torch.testing.assert_close(found[0], torch.from_numpy(np.stack(wanted)), atol=1e-5, rtol=0)


def test_the_affine_map_carries_three_corners_where_they_are_asked_to_go() -> None:
    moves = torch.tensor([[[1.0, 2.0], [-2.0, 0.5], [0.0, 3.0]], [[0.0, 0.0]] * 3], dtype=torch.float64)
    rows, columns = affine_places(torch.zeros(2, 3, 24, 24), moves)
    assert torch.equal(rows[1], torch.arange(24.0)[:, None].expand(24, 24))
    assert torch.equal(columns[1], torch.arange(24.0).expand(24, 24))
    assert rows[0, 12 + 8 + 1, 12 + 8 + 2].item() == pytest.approx(12 + 8, abs=1e-5)
    assert columns[0, 12 + 8 + 1, 12 + 8 + 2].item() == pytest.approx(12 + 8, abs=1e-5)
    assert columns[0, 12 - 8, 12 - 8 + 3].item() == pytest.approx(12 - 8, abs=1e-5)


def test_distances_are_euclidean_up_to_their_end() -> None:
    edge = torch.rand(2, 1, 30, 33, generator=torch.Generator().manual_seed(0)) < 0.01
    wanted = np.stack([ndimage.distance_transform_edt(~plane) for plane in edge[:, 0].numpy()])
    found = distances(edge)[:, 0].clamp(max=FAR)
    torch.testing.assert_close(found, torch.from_numpy(wanted).float().clamp(max=FAR))


def test_equalised_levels_follow_their_rank() -> None:
    x = torch.tensor([0.0, 0, 1, 1, 1, 1, 7, 9]).view(1, 1, 2, 4)
    assert equalised(x).flatten().tolist() == [0, 0, 170, 170, 170, 170, 212, 255]


DICE = Dice(torch.arange(3), 0, "frost 1")


def test_needles_lie_off_the_axis_of_the_nearest_seed() -> None:
    wide, size = 5.0, (9, 12)
    aims, aim, shade = feathers(DICE, size, wide)
    seeds = DICE.uniform("seeds", (4, 4, 5)).double()
    for image, h, w in ((0, 0, 0), (1, 8, 11), (2, 4, 7), (0, 3, 10)):
        here = np.array([h / wide + 1, w / wide + 1])
        places = [np.array([i, j]) + seeds[image, :2, i, j].numpy() for i in range(4) for j in range(5)]
        apart = [float(np.linalg.norm(here - place)) for place in places]
        nearest = int(np.argmin(apart))
        axis = 2 * math.pi * float(seeds[image, 2].flatten()[nearest])
        down, right = here - places[nearest]
        side = math.copysign(1, right * math.sin(axis) - down * math.cos(axis))
        assert float(aims[aim[image, 0, h, w]]) == pytest.approx(axis - side * math.pi / 3.5, abs=1e-5)
        light = float(seeds[image, 3].flatten()[nearest])
        assert float(shade[image, 0, h, w]) == pytest.approx(light - 0.7 * apart[nearest], abs=1e-5)


def test_streaks_are_sums_along_a_line_that_goes_on_at_the_other_side() -> None:
    aims = torch.tensor([0.3, 2.0, 4.5])
    aim = DICE.integers("aim", 3, (1, 6, 7)).int()
    found = streaks(DICE, aims, aim, 3)
    noise = DICE.uniform("needles", (1, 6, 7))
    for image, h, w in ((0, 0, 0), (1, 5, 6), (2, 3, 2)):
        angle = float(aims[aim[image, 0, h, w]])
        steps = [(round(k * math.sin(angle)), round(k * math.cos(angle))) for k in range(-3, 4)]
        line = [float(noise[image, 0, (h + down) % 6, (w + right) % 7]) for down, right in steps]
        assert float(found[image, 0, h, w]) == pytest.approx(sum(line), abs=1e-5)


def test_clouds_are_a_bicubic_enlargement() -> None:
    noise = DICE.uniform("clouds", (1, 6, 7))
    large = torch.nn.functional.interpolate(noise, size=[24, 28], mode="bicubic", align_corners=False)
    torch.testing.assert_close(cloud(DICE, (10, 14), 4.0), large[..., 4:14, 4:18])


@pytest.mark.parametrize("name", list(corruptions))
def test_images_corrupted_few_at_a_time_are_those_corrupted_together(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.cat([picture(), picture().flip(-1), picture().flip(-2)])
    corruption, ids = corruptions[name](severity=3), torch.tensor([4, 9, 11])
    together = corruption.apply(x, ids=ids)
    monkeypatch.setattr("vitruvius.corruptions.base.CACHED", 1)
    alone = corruption.apply(x, ids=ids)
    torch.testing.assert_close(alone, together, rtol=0, atol=1 / 255 + 1e-6)
    assert (alone == together).float().mean() > 0.999
