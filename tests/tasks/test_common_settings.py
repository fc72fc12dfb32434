"""Adversarial tasks inherit their settings: which each has, and how mistakes in a recipe are named."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hardened import small

from vitruvius._config import bind
from vitruvius._errors import ConfigError
from vitruvius.tasks import tasks

TASKS = ["adversarial", "trades", "mart", "fast", "robust_distillation"]
DECIDED = {
    "trades": ["log_clean"],
    "mart": ["log_clean", "binary"],
    "fast": ["attack", "coupled"],
    "robust_distillation": ["log_clean"],
}
NEEDED: dict[str, dict[str, Any]] = {"robust_distillation": {"teacher": "a"}}


@pytest.mark.parametrize("name", TASKS)
def test_the_model_is_the_only_argument_without_a_name(name: str) -> None:
    first, *rest = inspect.signature(tasks[name]).parameters.values()
    assert first.name == "model"
    assert first.kind is first.POSITIONAL_OR_KEYWORD
    assert all(p.kind is p.KEYWORD_ONLY for p in rest)


@pytest.mark.parametrize(("name", "setting"), [(name, one) for name, some in DECIDED.items() for one in some])
def test_a_setting_the_task_decides_itself_is_refused(name: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"task: unknown key '{name}.{setting}'"):
        bind(name, tasks[name], {"eps": 0.1, **NEEDED.get(name, {}), setting: False}, where="task")
    with pytest.raises(TypeError, match=setting):
        tasks[name](small(), eps=0.1, **NEEDED.get(name, {}), **{setting: False})


@pytest.mark.parametrize("name", TASKS)
def test_inherited_settings_are_checked_against_their_types(name: str) -> None:
    settings = {"eps": 1, "schedule": {"use": "linear"}, "statistics": ["adversarial"], **NEEDED.get(name, {})}
    bound = bind(name, tasks[name], settings, where="task")
    assert bound["statistics"] == ("adversarial",)
    assert isinstance(bound["eps"], float)
    with pytest.raises(ConfigError, match=rf"{name}.eps = 'far', expected a number"):
        bind(name, tasks[name], {**settings, "eps": "far"}, where="task")
    with pytest.raises(ConfigError, match=rf"{name}.attack_mode = 'evil', expected one of eval, train"):
        bind(name, tasks[name], {**settings, "attack_mode": "evil"}, where="task")
    with pytest.raises(ConfigError, match=rf"{name}.eps is missing"):
        bind(name, tasks[name], {}, where="task")


@pytest.mark.parametrize("name", ["adversarial", "trades", "mart", "fast"])
def test_a_task_is_compared_hashed_and_printed_as_a_module(name: str) -> None:
    one, other = tasks[name](small(), eps=0.1), tasks[name](small(), eps=0.1)
    assert len({one, other}) == 2
    assert "(trainable_module): Passes(" in repr(one)
