"""benchmarks/cpu.py: its sections give rows, and what is not installed leaves a dash."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vitruvius.cli.about import BENCHES

FILE = Path(__file__).parents[2] / "benchmarks" / "cpu.py"


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_a_cpu", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module)
    tiny = functools.partial(sys.modules["autoattack_cpu"].vit, 8, 1, 2, size=8)
    monkeypatch.setattr(module, "VITS", dict.fromkeys(module.VITS, (tiny, 8, 1)))
    monkeypatch.setattr(module, "there", lambda name: False)
    return module


@pytest.mark.parametrize("section", ["attention", "rpc", "attacks"])
def test_a_section_gives_ratios_and_dashes_for_what_is_not_installed(cpu: ModuleType, section: str) -> None:
    rows = list(cpu.SECTIONS[section](0.0))
    assert rows
    for row in rows:
        assert row.cells().count("|") == 7
        assert ("not installed" in row.note) == (section == "attacks") == (" – | – | – |" in row.cells())


def test_every_word_of_bench_names_a_benchmark() -> None:
    for command in BENCHES.values():
        assert FILE.with_name(f"{command[0]}.py").exists(), command


def test_works_are_timed_by_turns_after_a_warm_up(cpu: ModuleType) -> None:
    calls: list[str] = []
    ours, theirs = cpu.by_turns(0, lambda: calls.append("ours"), lambda: calls.append("theirs"), least=2)
    assert calls == ["ours", "theirs"] * 3
    assert min(ours, theirs) >= 0
    assert cpu.Row("x", 0.5, 2.0, "≥ 1").cells() == "| x | 500 ms | 2000 ms | 4.00 | ≥ 1 |  |"


def test_autoattack_runs_beside_nobody(cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "original", lambda *_: None)
    make, size, _ = cpu.VITS["DeiT-Tiny, 224 px"]
    model, x = make(), cpu.images(2, size)
    effort = {"steps": 2, "targets": 1, "queries": 3}
    (row,) = cpu.attacked(model, x, model(x).argmax(1), "tiny", 1e-6, effort, {"exact": "≥ 1"})
    assert row.other is None
    assert row.note == "2 robust; original –"


def test_autoattack_says_which_images_differ_from_the_original(
    cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "original", lambda *_: lambda model, x, y: [True, False])
    model, x = cpu.VITS["DeiT-Tiny, 224 px"][0](), cpu.images(2, 8)
    effort = {"steps": 2, "targets": 1, "queries": 3}
    (row,) = cpu.attacked(model, x, model(x).argmax(1), "tiny", 1e-6, effort, {"exact": ""})
    assert row.note == "2 robust; original 1, 1 differ"
    bench = sys.modules["autoattack_cpu"]
    found = {"original": {"seconds": 3.0, "robust": [True, False]}, "exact": {"seconds": 2.0, "robust": [False, True]}}
    assert bench.cell(found, "exact") == "2.0, 1.50, 1, 1 + 1 ([0] + [1])"
    assert bench.cell(found, "original") == "3.0, 1"
