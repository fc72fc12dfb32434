"""Nonsense for everything that reads what people write: it is taken, or refused with a sentence, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from small_run import RECIPE
from vitruvius._config import override
from vitruvius._errors import VitruviusError
from vitruvius._registry import Registry, parse_spec
from vitruvius._yaml import parse_value, read_yaml
from vitruvius.analysis import analyses, explanations
from vitruvius.attacks.base import attacks
from vitruvius.attention import attentions
from vitruvius.compression.rules import rules
from vitruvius.corruptions.base import corruptions
from vitruvius.evaluation.threats import make_threats
from vitruvius.init import inits
from vitruvius.init.filters import filters
from vitruvius.recipe_keys import SECTIONS, find_key, sections
from vitruvius.studies._base import studies
from vitruvius.tasks import tasks
from vitruvius.tasks.inner import schedules
from vitruvius.tracking import trackers
from vitruvius.training import read_recipe
from vitruvius.training.config import as_config

BY_SETTINGS_ALONE: dict[str, Registry[Any]] = {  # their pieces are made of settings and nothing else
    "attacks": attacks,
    "corruptions": corruptions,
    "rules": rules,
    "schedules": schedules,
    "trackers": trackers,
}
WITH_ARGUMENTS: dict[str, Registry[Any]] = {
    "analyses": analyses,
    "attentions": attentions,
    "explanations": explanations,
    "filters": filters,
    "inits": inits,
    "studies": studies,
    "tasks": tasks,
}
quick = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**30, -(10**30), 2**63]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.sampled_from(["pgd", "adamw", "8/255", "1/0", "auto", "", "../..", "a:b=c", "\0"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=5,
)
TEXTS = st.one_of(
    st.text(max_size=30),
    st.text(alphabet="[]{}:,=&*!|>'\"%@-?#.0123456789abe/ \n", max_size=30),
    st.sampled_from(
        ["!!timestamp x", "!!python/object:os.system x", "&a [*a]", "<<: 3", "? [1]", "0b2", "1:99:99", "%"]
    ),
)
AS_IT_IS = read_yaml(RECIPE)
KEYS = [
    f"{section}.{key.name}".removeprefix("recipe.") for section in SECTIONS for key in sections(section)[section].keys
]


@contextlib.contextmanager
def refused_or_fine() -> Iterator[None]:
    """What happens inside may be refused, by our errors or a ValueError, with words; anything else fails the test."""
    try:
        yield
    except (VitruviusError, ValueError) as error:
        if not str(error).strip():
            pytest.fail(f"{type(error).__name__} without a word")


@quick
@given(TEXTS)
def test_any_text_is_a_value_or_refused(text: str) -> None:
    with refused_or_fine():
        parse_value(text)
    with refused_or_fine():
        parse_spec(text)


def test_any_text_is_a_recipe_or_refused(tmp_path: Path) -> None:
    @quick
    @given(TEXTS)
    def check(text: str) -> None:
        (tmp_path / "fuzz.yaml").write_text(text, encoding="utf-8")
        with refused_or_fine():
            read_yaml(tmp_path / "fuzz.yaml")

    check()


@settings(quick, max_examples=250)
@given(st.sampled_from(KEYS) | st.text(max_size=8), VALUES)
def test_any_value_of_any_key_is_taken_or_refused(key: str, value: Any) -> None:
    recipe: Any = copy.deepcopy(AS_IT_IS)
    *path, last = key.split(".")
    inside = recipe
    for name in path:
        if not isinstance(inside.get(name), dict):
            inside[name] = {}
        inside = inside[name]
    inside[last] = value
    with refused_or_fine():
        as_config(recipe)


@quick
@given(st.dictionaries(st.sampled_from(["model", "data", "train", "attention", "task"]) | st.text(max_size=4), VALUES))
def test_any_mapping_is_a_recipe_or_refused(recipe: dict[str, Any]) -> None:
    with refused_or_fine():
        as_config(recipe)


@settings(quick, max_examples=150)
@given(st.sampled_from(KEYS) | st.text(max_size=8), TEXTS)
def test_any_setting_of_a_command_is_taken_or_refused(key: str, text: str) -> None:
    with refused_or_fine():
        read_recipe(RECIPE, [f"{key}={text}"])
    with refused_or_fine():
        override({"a": [1, {"b": 2}], "c": None}, [f"{key}{text}", f"a.{key}={text}"])
    find_key(key)


def settings_for(registry: Registry[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A piece of a registry with settings that it has, and values of any kind for them."""

    def with_settings(name: str) -> st.SearchStrategy[dict[str, Any]]:
        known = [p.name for p in inspect.signature(registry[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
        keys = st.sampled_from(known) | st.text(max_size=4) if known else st.text(max_size=4)
        return st.dictionaries(keys, VALUES, max_size=3).map(lambda found: {**found, "use": name})

    return st.sampled_from(sorted(registry)).flatmap(with_settings)


@pytest.mark.parametrize("kind", BY_SETTINGS_ALONE)
def test_a_piece_with_any_settings_is_made_or_refused(kind: str) -> None:
    registry = BY_SETTINGS_ALONE[kind]

    @settings(quick, max_examples=120)
    @given(settings_for(registry) | VALUES)
    def check(spec: Any) -> None:
        with refused_or_fine():
            registry.make(spec, where="--flag")

    check()


@pytest.mark.parametrize("kind", WITH_ARGUMENTS)
def test_a_piece_with_any_settings_is_bound_or_refused(kind: str) -> None:
    registry = WITH_ARGUMENTS[kind]

    @quick
    @given(settings_for(registry) | VALUES)
    def check(spec: Any) -> None:
        with refused_or_fine():
            registry.bind(spec, where="--flag")

    check()


@quick
@given(st.sampled_from(sorted(attacks)), TEXTS)
def test_any_threat_of_a_command_is_made_or_refused(name: str, text: str) -> None:
    for spec in (f"{name}:{text}", f"{name}:eps={text}", f"corruptions:{text}"):
        with refused_or_fine():
            make_threats(spec, where="--threat")
