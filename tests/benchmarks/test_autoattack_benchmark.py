"""The benchmark of standard AutoAttack: it trains, attacks by every way, and compares image by image."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitruvius.attacks.autoattack import AutoAttack

FILE = Path(__file__).parents[2] / "benchmarks" / "autoattack_standard.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_autoattack", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_ways_are_compared_image_by_image(benchmark: ModuleType) -> None:
    rows = {
        "original": (8.0, torch.tensor([True, True, False, False])),
        "exact": (2.0, torch.tensor([True, False, False, True])),
    }
    assert benchmark.compare(rows, "exact") == {
        "seconds": 2.0, "robust": 2, "times": 4.0, "only_ours_breaks": 1, "only_the_original_breaks": 1,
    }  # fmt: skip
    assert benchmark.compare({"exact": rows["exact"]}, "exact") == {"seconds": 2.0, "robust": 2}


def test_a_problem_is_trained_once_and_attacked_by_every_way(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return x

    def brief(**settings: Any) -> AutoAttack:
        return AutoAttack(version="custom", attacks=("pgd:steps=1",), **settings)

    monkeypatch.setattr(benchmark, "original", lambda problem: nothing)
    monkeypatch.setattr(benchmark, "AutoAttack", brief)
    results = tmp_path / "rows.jsonl"
    later = time.perf_counter() + 1000
    options = argparse.Namespace(data=None, ways=["exact", "auto"], results=results, deadline=later)
    for _ in range(2):
        benchmark.measure("vit", benchmark.TINY["vit"], tmp_path / "run", options)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["way"] for row in rows] == ["training", "original", "exact", "auto"] * 2
    assert rows[4]["clean"] == rows[0]["clean"]
    assert all(row["only_the_original_breaks"] == 0 for row in rows if "times" in row)
    options.deadline = 0.0
    benchmark.measure("vit", benchmark.TINY["vit"], tmp_path / "run", options)
    late = [json.loads(line) for line in results.read_text().splitlines()][8:]
    assert [row.get("left_out") for row in late] == [None, *["the time was over"] * 3]
