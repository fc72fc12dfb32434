"""What timm's own tests ask of a model holds for a rewired one: the questions of scripts/timm_expectations.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from operating import ONE_EACH

from families import FAMILIES, Family
from vitruvius.surgery import rewire

ROOT = Path(__file__).parents[2]


def load_script() -> ModuleType:
    path = ROOT / "scripts" / "timm_expectations.py"
    spec = importlib.util.spec_from_file_location("timm_expectations", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.mark.long
@pytest.mark.parametrize("family", ONE_EACH, ids=str)
def test_a_rewired_model_answers_as_a_bare_one(family: Family) -> None:
    for name, question in script.QUESTIONS.items():
        assert script.ask(question, family, "softmax") == script.ask(question, family, None), name


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
def test_torch_script_does_not_compile_a_rewired_model_as_the_page_says() -> None:
    model, _ = next(family for family in ONE_EACH if family.name == "vit").randomised()
    torch.jit.script(model)
    with pytest.raises((RuntimeError, ValueError)):
        torch.jit.script(rewire(model, "softmax"))


def test_the_page_has_a_row_for_every_family() -> None:
    page = (ROOT / "docs" / "timm_expectations.md").read_text(encoding="utf-8")
    for family in FAMILIES:
        assert f"\n| {family.name} |" in page, f"{family.name} is missing: run scripts/timm_expectations.py"
