"""Attention rules of a recipe: which sites, which parts; all are applied, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from vitruvius._config import build
from vitruvius._errors import ConfigError
from vitruvius._registry import read_spec
from vitruvius.attention.base import PartMaker, PartSpec, part
from vitruvius.models.config import AttentionRule
from vitruvius.surgery import restore, rewire, survey
from vitruvius.surgery.sites import match

Parts = PartSpec | AttentionRule | Sequence[PartSpec | AttentionRule]


def wire(model: nn.Module, attention: Parts, *, input_size: tuple[int, int, int] | None = None) -> None:
    """Apply parts or rules to `model`; a site matched by two rules, or a rule that matches none, is an error.

    `attention` is one part or a list of them, for every site, or a list of rules, `AttentionRule` or
    `{"where": …, "parts": […]}`. `input_size` is the size of an image, for models that do not know it themselves.
    """
    items = list(attention) if isinstance(attention, list | tuple) else [attention] if attention is not None else []
    read = [_read_item(item, f"attention.{number}") for number, item in enumerate(items)]
    rules = [item for item in read if isinstance(item, AttentionRule)]
    parts = [item for item in read if not isinstance(item, AttentionRule)]
    if rules and parts:
        raise ConfigError("attention mixes parts and rules; give a list of parts, or a list of rules.")
    if parts:
        rewire(model, *parts, input_size=input_size)
    if not rules:
        return
    makers = [parts_of(rule, f"attention.{number}") for number, rule in enumerate(rules)]
    _check_overlap(model, rules, input_size)
    with contextlib.ExitStack() as undo:
        for rule, made in zip(rules, makers, strict=True):
            rewire(model, *made, where=rule.where, input_size=input_size)
            undo.callback(restore, model, rule.where)
        undo.pop_all()  # all went well


def _read_item(item: Any, where: str) -> PartMaker | AttentionRule:
    """A part with its settings checked, or a rule; a mapping with `where` or `parts` is a rule of a recipe."""
    if isinstance(item, AttentionRule):
        return item
    if isinstance(item, Mapping) and "use" not in item and ("parts" in item or "where" in item):
        return build(AttentionRule, item, source=where)
    return part(item, where=where)


def parts_of(rule: AttentionRule, where: str) -> list[PartMaker]:
    """The parts a rule names, with their settings checked; `where` begins an error's sentence."""
    return [part(item, where=where) for item in rule.parts]


def _check_overlap(model: nn.Module, rules: Sequence[AttentionRule], input_size: tuple[int, int, int] | None) -> None:
    owner: dict[str, str] = {}
    sites = list(survey(model, input_size=input_size))
    for rule in rules:
        for site in match(model, sites, rule.where):
            if site in owner:
                raise ConfigError(
                    f"attention: {site!r} is matched by two rules, where={owner[site]!r} and where={rule.where!r}. "
                    "Make the patterns disjoint."
                )
            owner[site] = rule.where


def without_files(rule: AttentionRule) -> AttentionRule:
    """Masks of a run lie in its checkpoint; the file they came from is no longer needed."""
    parts: list[Any] = []
    for item in rule.parts:
        if not callable(item):
            name, settings = read_spec(item, where="attention")
            if name == "mask":
                item = {"use": name, **settings, "file": None, "keep": "all"}
        parts.append(item)
    return replace(rule, parts=parts)
