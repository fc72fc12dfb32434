"""Shared by all tests: the tiny models (see families.py) as fixtures, and fonts that are quick to embed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from timm.layers.weight_init import _trunc_normal_
from torch import Tensor, nn

from families import FAMILIES, Family
from vitruvius._style import SETTINGS


@pytest.fixture(scope="session", autouse=True)
def _quick() -> Iterator[None]:
    """What is slow and changes no number: a subset of a TrueType font takes half a second per figure, and drawing the
    weights of a large model without numbers a second."""

    def draw(tensor: Tensor, *numbers: float) -> Tensor:
        return tensor if tensor.is_meta else _trunc_normal_(tensor, *numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS, "pdf.fonttype", 3)
        patch.setattr("timm.layers.weight_init._trunc_normal_", draw)
        yield


@pytest.fixture(params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    """Each family in turn: `model, x = family.randomised()`."""
    made: Family = request.param
    return made


@pytest.fixture
def tiny_vit() -> tuple[nn.Module, Tensor]:
    """A two-block ViT on 32 x 32 images with every number randomised, in eval mode, and two images."""
    return FAMILIES[0].randomised()
