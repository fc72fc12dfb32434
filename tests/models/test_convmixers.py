"""ConvMixers under our prefix: the filters asked for, frozen where asked, the same after a reload."""

from __future__ import annotations

import pytest
import torch

import vitruvius
from vitruvius.models import models

SMALL = {"dim": 16, "depth": 2, "kernel_size": 3, "num_classes": 4}


def test_there_are_the_thirteen_of_the_original() -> None:
    assert sum(name.startswith("vitruvius/convmixer") for name in models) == 13


@pytest.mark.parametrize(("kind", "frozen"), [("train", False), ("random", True), ("impulse", True), ("box", True)])
def test_frozen_filters_ask_for_no_gradient(kind: str, frozen: bool) -> None:
    model = vitruvius.create_model(f"vitruvius/convmixer_256_8_3_{kind}", depth=1, num_classes=4)
    depthwise = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d) and m.groups > 1]
    assert depthwise
    assert all(p.requires_grad != frozen for m in depthwise for p in m.parameters())
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 4)


def test_the_same_seed_gives_the_same_filters() -> None:
    one, other = (vitruvius.create_model("vitruvius/convmixer", **SMALL, seed=5) for _ in range(2))
    for key, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[key]), key
