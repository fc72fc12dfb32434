"""What holds for every corruption, whatever it does."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image
from torch import Tensor

from vitruvius._errors import ConfigError, DataError
from vitruvius.corruptions.base import BENCHMARK, EXTRA, IMAGENET_C, SEVERITIES, corruptions

CERTAIN = ("brightness", "contrast", "saturate", "pixelate", "jpeg_compression", "defocus_blur", "gaussian_blur")
CERTAIN += ("zoom_blur",)
# what the published constants do not let grow: pale up to 2 and vivid from 3; slow bends, then quick ones; less of the
# image under as much ice; at 32 pixels water, then less mud
UNEVEN = {
    "imagenet": ("saturate", "elastic_transform", "frost"),
    "cifar": ("saturate", "elastic_transform", "frost", "spatter"),
}


def photographs(size: int, count: int = 4) -> Tensor:
    """(count, 3, size, size) pieces of scikit-learn's two photographs."""
    pieces = []
    for number in range(count):
        picture = Image.fromarray(load_sample_image(("china.jpg", "flower.jpg")[number % 2]))
        left = 90 * (number // 2)
        piece = picture.crop((left, 20, left + 400, 420)).resize((size, size), Image.Resampling.BOX)
        pieces.append(torch.frombuffer(bytearray(piece.tobytes()), dtype=torch.uint8).view(size, size, 3))
    return torch.stack(pieces).movedim(-1, 1).float() / 255


def digits(count: int = 6) -> Tensor:
    return torch.from_numpy(load_digits().images[:count]).float()[:, None] / 16


SMALL, DIGITS = photographs(32), digits()


def test_the_nineteen_names_are_registered() -> None:
    assert sorted(corruptions) == sorted(IMAGENET_C)
    assert (len(BENCHMARK), len(EXTRA)) == (15, 4)


@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize("name", IMAGENET_C)
def test_shape_type_and_range_are_kept_for_photographs_and_digits(name: str, severity: int) -> None:
    for x in (SMALL, DIGITS, SMALL[:1, :, :21, :30].double()):
        moved = corruptions[name](severity=severity).apply(x)
        assert (moved.shape, moved.dtype, moved.device) == (x.shape, x.dtype, x.device)
        assert 0 <= moved.min() <= moved.max() <= 1
        torch.testing.assert_close(moved * 255, (moved * 255).round(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", IMAGENET_C)
def test_the_images_given_are_not_touched(name: str) -> None:
    x = SMALL.clone()
    corruptions[name](severity=4).apply(x)
    assert torch.equal(x, SMALL)


@pytest.mark.parametrize("name", [name for name in IMAGENET_C if name != "saturate"])
def test_digits_are_disturbed_and_still_there(name: str) -> None:
    for severity in SEVERITIES[-1:]:
        moved = corruptions[name](severity=severity).apply(DIGITS, ids=torch.arange(len(DIGITS)))
        assert (moved - DIGITS).abs().mean() > 1e-3
        both = torch.stack((moved.flatten(), DIGITS.flatten()))
        assert torch.corrcoef(both)[0, 1] > 0.4


@pytest.mark.parametrize("name", IMAGENET_C)
def test_an_image_is_disturbed_alike_in_every_batch(name: str) -> None:
    corruption, ids = corruptions[name](severity=3), torch.tensor([5, 17, 2, 900])
    together = corruption.apply(SMALL, ids=ids)
    alone = torch.cat([corruption.apply(SMALL[i : i + 1], ids=ids[i : i + 1]) for i in (3, 2, 1, 0)]).flip(0)
    assert torch.equal(together, alone)
    assert torch.equal(corruption.apply(SMALL), torch.cat([corruption.apply(part) for part in SMALL.split(3)]))


@pytest.mark.parametrize("name", [name for name in IMAGENET_C if name not in CERTAIN])
def test_chance_depends_on_id_seed_and_severity(name: str) -> None:
    x, ids = SMALL[:1].expand(2, -1, -1, -1), torch.tensor([1, 2])
    first = corruptions[name](severity=5, seed=1).apply(x, ids=ids)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, corruptions[name](severity=5, seed=2).apply(x, ids=ids))
    assert torch.equal(first, corruptions[name](severity=5, seed=1).apply(x, ids=ids))


@pytest.mark.parametrize("name", CERTAIN)
def test_corruptions_without_chance_do_not_look_at_ids(name: str) -> None:
    corruption = corruptions[name](severity=5)
    assert torch.equal(corruption.apply(SMALL, ids=torch.arange(4)), corruption.apply(SMALL, ids=torch.arange(4) + 9))


@pytest.mark.parametrize("name", IMAGENET_C)
def test_the_number_of_threads_does_not_matter(name: str) -> None:
    threads, corruption = torch.get_num_threads(), corruptions[name](severity=4)
    try:
        torch.set_num_threads(1)
        one = corruption.apply(SMALL)
        torch.set_num_threads(2)
        assert torch.equal(one, corruption.apply(SMALL))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("scale", ["imagenet", "cifar"])
@pytest.mark.parametrize("name", IMAGENET_C)
def test_severity_takes_images_further_away(name: str, scale: str) -> None:
    photograph = photographs(66) if scale == "imagenet" else SMALL
    x = photograph if name in CERTAIN else photograph.repeat(4 if scale == "imagenet" else 10, 1, 1, 1)
    made = [corruptions[name](severity=severity, scale=scale) for severity in SEVERITIES]
    far = [(corruption.apply(x, ids=torch.arange(len(x))) - x).abs().mean().item() for corruption in made]
    if name not in UNEVEN[scale]:
        assert all(later > 0.95 * earlier for earlier, later in itertools.pairwise(far))
        assert far[4] > 1.2 * far[0]
    assert min(far) > 1e-4


@pytest.mark.parametrize("name", IMAGENET_C)
def test_auto_means_the_small_table_up_to_64_pixels(name: str) -> None:
    corruption = corruptions[name](severity=2)
    small, large = torch.zeros(1, 3, 64, 80), torch.zeros(1, 3, 65, 80)
    assert corruption.constants(small) == dataclasses.replace(corruption, scale="cifar").constants(large)
    assert corruption.constants(large) == dataclasses.replace(corruption, scale="imagenet").constants(small)
    assert len(type(corruption).imagenet) == len(type(corruption).cifar) == 5


def test_levels_are_cut_only_if_asked() -> None:
    x = SMALL[:1]
    fine, coarse = (corruptions["gaussian_blur"](severity=5, round8=round8).apply(x) for round8 in (False, True))
    assert torch.equal(coarse, (fine * 255 + 1e-3).floor() / 255)
    assert not torch.equal(fine, coarse)


def test_white_stays_white_under_every_blur() -> None:
    for name in ("defocus_blur", "gaussian_blur", "glass_blur", "motion_blur", "zoom_blur", "pixelate"):
        for severity in SEVERITIES:
            assert corruptions[name](severity=severity, round8=False).apply(torch.ones(1, 3, 70, 66)).min() > 1 - 1e-5


def test_frost_takes_textures_from_a_folder(tmp_path: Path) -> None:
    Image.new("RGB", (300, 200), (10, 20, 250)).save(tmp_path / "frost1.png")
    moved = corruptions["frost"](severity=5, textures=str(tmp_path), round8=False).apply(SMALL)
    blue = torch.tensor([10, 20, 250]).view(3, 1, 1) / 255
    torch.testing.assert_close(moved, (0.75 * SMALL + 0.45 * blue).clamp(0, 1))


def test_a_folder_without_textures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images of frost in"):
        corruptions["frost"](severity=1, textures=str(tmp_path)).apply(SMALL)
    (tmp_path / "frost1.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"frost1\.png cannot be read as an image"):
        corruptions["frost"](severity=1, textures=str(tmp_path)).apply(SMALL)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "divide 8-bit images by 255"),
        (torch.zeros(3, 8, 8), r"need \(B, 1 or 3, height, width\)"),
        (torch.zeros(1, 4, 8, 8), r"need \(B, 1 or 3, height, width\)"),
        (torch.zeros(1, 3, 3, 8), "at least 4×4"),
        (torch.full((1, 3, 8, 8), 2.0), "pixels reach from 2 to 2"),
        (torch.full((1, 3, 8, 8), torch.nan), "NaN pixels"),
    ],
)
def test_what_is_no_batch_of_pixels_is_refused(x: Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words):
        corruptions["fog"](severity=1).apply(x)


def test_no_images_give_no_images() -> None:
    assert corruptions["fog"](severity=1).apply(torch.zeros(0, 3, 32, 32)).shape == (0, 3, 32, 32)


@pytest.mark.parametrize("severity", [0, 6, 2.5, "3"])
def test_severities_outside_one_to_five_are_refused(severity: object) -> None:
    with pytest.raises(ConfigError, match="expected a whole number from 1 to 5"):
        corruptions["snow"](severity=severity)


@pytest.mark.parametrize("name", IMAGENET_C)
def test_the_large_constants_do_not_break_the_smallest_images(name: str) -> None:
    moved = corruptions[name](severity=5, scale="imagenet").apply(SMALL[:2, :, :4, :5])
    assert moved.isfinite().all()
