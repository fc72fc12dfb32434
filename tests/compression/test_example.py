"""The example goes the whole way, here with few images and one sparsity."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "compress_digits.py"
FEW = ["train.epochs=1", "train.warmup_epochs=0", "data.train_num_samples=160", "data.val_num_samples=50"]


def test_the_example_ends_with_numbers_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("compress_digits", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "SPARSITIES", (0.9,))
    monkeypatch.setattr(example, "STARTS", ["svd"])
    monkeypatch.setattr(example, "RANK", 6)
    results = example.compress(tmp_path, FEW, FEW)
    assert results["low_rank"]["svd"][0] == results["dense"]  # all heads kept: nothing changes
    assert json.loads((tmp_path / "results.json").read_text())["masked"]["0.9"] == list(results["masked"][0.9])
    assert (tmp_path / "accuracy.png").exists()
    assert (tmp_path / "masks-90.png").exists()
