"""A small model, a few digits and two threats to judge it by."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.pgd import PGD
from vitruvius.data import DataConfig, eval_loader
from vitruvius.evaluation import load_ledger
from vitruvius.models import PixelModel, create_model

DATA = DataConfig(val_num_samples=22, batch_size=6)
THREATS = (PGD(eps=8 / 255, steps=2), FGSM(eps=4 / 255))


def model(seed: int = 0, **settings: Any) -> PixelModel:
    return create_model(
        "vitruvius/vit_digits", **{"depth": 1, "embed_dim": 24, "init": "skip", "seed": seed} | settings
    )


def loader(**settings: Any) -> Any:
    """22 digits in four batches, the last one smaller."""
    return eval_loader(DATA, input_size=(3, 8, 8), **settings)


class Stop(Exception):
    """The plug is pulled."""


def stopped_after(patch: pytest.MonkeyPatch, module: ModuleType, name: str, calls: int, images: int) -> list[int]:
    """Let a function of a module be called so often, then pull the plug; how many images it was asked about.

    `images` says which of its arguments those are.
    """
    asked: list[int] = []
    function = getattr(module, name)

    def called(*arguments: Any) -> Any:
        if len(asked) == calls:
            raise Stop
        asked.append(len(arguments[images]))
        return function(*arguments)

    patch.setattr(module, name, called)
    return asked


def assert_same_rows(one: Path, other: Path, *, atol: float = 0.0) -> None:
    """Two finished ledgers have the same columns in the same order, all but the seconds."""
    ours, theirs = rows(one), rows(other)
    assert ours.keys() == theirs.keys()
    for threat, columns in ours.items():
        assert list(columns) == list(theirs[threat])
        for name, column in columns.items():
            torch.testing.assert_close(column, theirs[threat][name], rtol=0, atol=atol, msg=f"{threat}/{name}")


def rows(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The finished ledger, without what a clock measured."""
    ledger = load_ledger(folder / "ledger.safetensors")
    return {
        threat: {name: column for name, column in columns.items() if name != "seconds"}
        for threat, columns in sorted(ledger.items())
    }
