"""Corruptions against imagecorruptions-imaug 1.1.5: stored outputs and statistics always, the package where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vitruvius._files import load_tensors
from vitruvius.corruptions.base import IMAGENET_C, SEVERITIES, corruptions

GOLDEN, _ = load_tensors(Path(__file__).parents[1] / "golden" / "corruptions.safetensors")
IMAGE = GOLDEN["image"]  # (72, 76, 3) uint8
CERTAIN = [name for name in IMAGENET_C if name in GOLDEN]
TOLERANCE = {  # levels, and shares: how far mean and deviation may lie apart, over 32 draws where there is chance
    **dict.fromkeys((name for name in IMAGENET_C if f"{name}.statistics" in GOLDEN), (0.5, 0.03)),
    **dict.fromkeys(CERTAIN, (0.25, 0.0)),
    "motion_blur": (1.5, 0.03), "snow": (3.0, 0.03), "fog": (6.0, 0.03), "spatter": (1.5, 0.03),
    "frost": (8.0, 0.1),  # drawn, while the package has photographs
}  # fmt: skip


def corrupted(name: str, severity: int, draws: int = 1, **settings: Any) -> Tensor:
    """(draws, 70, 72, 3) levels."""
    pixels = IMAGE.movedim(-1, 0).float()[None].expand(draws, -1, -1, -1) / 255
    moved = corruptions[name](severity=severity, **settings).apply(pixels, ids=torch.arange(draws))
    return (moved * 255).round().movedim(1, -1)


def assert_near(name: str, ours: Tensor, theirs: Tensor) -> None:
    difference = (ours - theirs.float()).abs()
    if name == "jpeg_compression":  # libjpeg's cosines are whole numbers: now and then a coefficient rounds otherwise
        assert difference.mean() < 0.5
        assert (difference > 1).float().mean() < 0.06
    else:
        assert difference.max() <= 1
        assert difference.mean() < 0.25


@pytest.mark.parametrize("name", CERTAIN)
def test_corruptions_without_chance_give_the_stored_pixels(name: str) -> None:
    assert_near(name, corrupted(name, 5)[0], GOLDEN[name])


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", TOLERANCE)
def test_corruptions_have_the_stored_statistics(name: str, severity: int) -> None:
    difference = corrupted(name, severity, draws=1 if name in CERTAIN else 32) - IMAGE
    found = torch.stack([difference.mean(), difference.std(correction=0), difference.abs().mean()])
    levels, share = TOLERANCE[name]
    stored = GOLDEN[f"{name}.statistics"][severity - 1].float()
    torch.testing.assert_close(found, stored, atol=levels, rtol=share)


@pytest.fixture(scope="module")
def package() -> Any:
    return pytest.importorskip("imagecorruptions", reason="imagecorruptions-imaug 1.1.5 is not installed")


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", CERTAIN)
def test_corruptions_without_chance_equal_those_of_the_package(name: str, severity: int, package: Any) -> None:
    theirs = package.corrupt(IMAGE.numpy(), severity=severity, corruption_name=name)
    assert_near(name, corrupted(name, severity)[0], torch.from_numpy(theirs.copy()))


def test_photographs_of_frost_give_the_strength_of_the_package(package: Any) -> None:
    folder = str(Path(package.__file__).parent / "frost")
    difference = corrupted("frost", 3, draws=64, textures=folder) - IMAGE
    stored = GOLDEN["frost.statistics"][2].float()
    torch.testing.assert_close(difference.abs().mean(), stored[2], atol=10, rtol=0)
