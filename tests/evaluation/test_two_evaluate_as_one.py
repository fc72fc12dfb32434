"""Two processes evaluate as one: the same rows, bit for bit, for batch norms, ViT and CaiT, clean and attacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from judging import assert_same_rows, rows
from torch import nn

from two_processes import in_two_processes
from vitruvius._processes import process_group
from vitruvius.attacks.pgd import PGD
from vitruvius.data import DataConfig, eval_loader
from vitruvius.evaluation import evaluate
from vitruvius.models import create_model

DATA = DataConfig(val_num_samples=24, batch_size=4, image_size=16)  # whole batches in one process and in two
ATTACK = PGD(eps=4 / 255, steps=3)
CAIT = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "depth_token_only": 1, "num_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "batch norms": ("test_resnet", {}),
    "vit": ("vitruvius/vit_digits", {"depth": 1, "embed_dim": 24, "img_size": 16, "init": "skip"}),
    "cait": ("cait_xxs24_224", {**CAIT, "attention": "softmax"}),
}


def made(kind: str) -> nn.Module:
    name, settings = MODELS[kind]
    return create_model(name, num_classes=10, seed=0, **settings).eval()


def _evaluate(rank: int, kind: str, folder: str) -> None:
    with process_group("cpu") as process:
        mine = eval_loader(DATA, input_size=(3, 16, 16), rank=process.rank, world_size=process.world_size)
        evaluate(made(kind), mine, [ATTACK], folder=folder, process=process)


@pytest.mark.parametrize("kind", list(MODELS))
def test_two_processes_give_the_rows_of_one_bit_for_bit(kind: str, tmp_path: Path) -> None:
    in_two_processes(_evaluate, kind, str(tmp_path / "two"))
    _evaluate(0, kind, str(tmp_path / "one"))
    assert {len(columns["id"]) for columns in rows(tmp_path / "one").values()} == {24}
    assert_same_rows(tmp_path / "two", tmp_path / "one")
