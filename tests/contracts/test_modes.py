"""One check of the model's mode: a model with one block in train mode is refused by everything that judges it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import vitruvius
from vitruvius._errors import ConfigError
from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.evaluation.sanity import Sanity

X = torch.rand(2, 3, 8, 8)
Y = torch.tensor([0, 1])
JUDGES: dict[str, Callable[[nn.Module], Any]] = {
    "evaluate": lambda model: vitruvius.evaluate(model, [(X, Y)]),
    "analyse": lambda model: vitruvius.analyse(model, [X], "norms"),
    "average_maps": lambda model: vitruvius.average_maps(model, [(X, Y)]),
    "AutoAttack": lambda model: AutoAttack(eps=8 / 255)(model, X, Y),
    "Sanity": lambda model: Sanity(eps=8 / 255)(model, X, Y),
}


@pytest.mark.parametrize("judge", JUDGES)
def test_one_block_in_train_mode_is_refused_by_name(judge: str) -> None:
    model = vitruvius.create_model("vitruvius/vit_digits", depth=2, embed_dim=24, init="skip").eval()
    model.model.blocks[1].train()
    with pytest.raises(ConfigError, match=r"'model.blocks.1' of the model is in train mode; call model.eval\(\) first"):
        JUDGES[judge](model)
