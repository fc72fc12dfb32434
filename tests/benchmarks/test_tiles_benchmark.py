"""The benchmarks of tiles and of targets by gradient: they run in miniature, keep to their time and compare rightly."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_of_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield loaded("tiles", monkeypatch)
    for name in ("_measuring", "sparse_cpu"):
        sys.modules.pop(name, None)


@pytest.fixture
def malt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return loaded("malt", monkeypatch)


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, results: Path, *words: str) -> list[dict[str, object]]:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--tiny", "--results", str(results), *words])
    module.main()
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_tiles_are_compared_with_dense_attention_alone_and_in_a_model(
    tiles: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(tiles, monkeypatch, tmp_path / "rows.jsonl")
    assert [(row["what"], row["way"]) for row in rows] == [
        ("attention", tiles.DENSE), ("attention", "sparse_softmax"), ("attention", "SDPA with the mask as bias"),
        ("model", tiles.DENSE), ("model", "sparse_softmax"), ("model", "mask → softmax"),
    ]  # fmt: skip
    assert all(row["error"] < 1e-5 for row in rows)  # type: ignore[operator]
    assert all(row["removed"] == pytest.approx(0.8, abs=1e-3) for row in rows)
    assert "| model: sparse_softmax | 101 | 2 |" in capsys.readouterr().out


def test_no_row_of_tiles_begins_after_the_time_is_over(
    tiles: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(tiles, monkeypatch, tmp_path / "rows.jsonl", "--seconds", "0")
    assert len(rows) == 1
    assert "the time is over" in capsys.readouterr().out


def test_a_way_that_fails_leaves_the_others_their_turn(
    tiles: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiles, "build_core", lambda *_: torch.nn.Identity())
    rows = run(tiles, monkeypatch, tmp_path / "rows.jsonl", "--only", "attention")
    assert ["failed" in row for row in rows] == [False, True, False]
    assert "AttributeError" in capsys.readouterr().out


def test_targets_are_compared_on_the_images_that_the_first_stage_leaves(
    malt: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["--count", "6", "--batch", "4", "--steps", "2", "--candidates", "3", "--eps", "1"]
    rows = run(malt, monkeypatch, tmp_path / "rows.jsonl", *words)
    assert [(row["way"], row["images"]) for row in rows] == [
        (way, images)
        for images in (4, 6)
        for way in ("apgd-t, targets=9", "apgd-malt, targets=1", "apgd-malt, targets=3", "apgd-malt, targets=9")
    ]
    last = rows[-1]
    assert 0 < last["robust"] <= last["after_apgd_ce"] <= 6  # type: ignore[operator]
    one = rows[-3]
    assert one["gradients"] == one["after_apgd_ce"] * (3 + 3)  # type: ignore[operator]  # candidates, steps + 1


def test_images_that_one_way_alone_breaks_are_counted(malt: ModuleType) -> None:
    row = malt.Row(0.5, "some way")
    apgd_t, this = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    row.add(malt.Found(images=5, left=3, seconds=1.5, gradients=7, robust=this, robust_apgd_t=apgd_t))
    row.add(malt.Found(images=5, left=3, seconds=1.0, gradients=1, robust=apgd_t, robust_apgd_t=apgd_t))
    assert (row.images, row.robust, row.gradients, row.seconds) == (10, 4, 8, 2.5)
    assert (row.only_this_breaks, row.only_apgd_t_breaks) == (1, 1)
