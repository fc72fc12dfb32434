"""One step of Auto-PGD can be followed in few files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitruvius
from vitruvius._random import Dice
from vitruvius.attacks import APGD, APGDTargeted

PACKAGE = Path(vitruvius.__file__).parent


class Tracing(nn.Module):
    """Notes the package's files in which a function runs between its second and its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)
        self.calls = 0
        self.files: set[Path] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        sys.setprofile({2: self._note}.get(self.calls))
        return self.linear(x.flatten(1))

    def _note(self, frame: Any, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            self.files.add(path.relative_to(PACKAGE))


ATTACKS = [APGD(eps=1e-4), APGD(eps=1e-3, norm="l1"), APGDTargeted(eps=1e-4)]


@pytest.mark.parametrize("attack", ATTACKS, ids=["apgd", "apgd l1", "apgd_targeted"])
def test_one_step_of_auto_pgd_is_followed_in_at_most_six_files(attack: APGD) -> None:
    torch.manual_seed(0)
    model, x = Tracing().eval(), torch.rand(2, 3, 2, 2)
    with torch.no_grad():
        y = model.linear(x.flatten(1)).argmax(1)
    try:
        attack.search(model, x, y, Dice(torch.arange(2)))
    finally:
        sys.setprofile(None)
    assert model.calls > 3
    assert 3 <= len(model.files) <= 6, sorted(map(str, model.files))
