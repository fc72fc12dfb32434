"""A small model, a few digits and two threats to judge it by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def rows(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The finished ledger, without what a clock measured."""
    ledger = load_ledger(folder / "ledger.safetensors")
    return {
        threat: {name: column for name, column in columns.items() if name != "seconds"}
        for threat, columns in sorted(ledger.items())
    }
