"""Shared by all tests: the tiny models (see families.py) as fixtures."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from families import FAMILIES, Family


@pytest.fixture(params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    """Each family in turn: `model, x = family.randomised()`."""
    made: Family = request.param
    return made


@pytest.fixture
def tiny_vit() -> tuple[nn.Module, Tensor]:
    """A two-block ViT on 32 x 32 images with every number randomised, in eval mode, and two images."""
    return FAMILIES[0].randomised()
