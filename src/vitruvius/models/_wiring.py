"""Attention rules of a recipe: which sites, which parts; all are applied, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from vitruvius._config import bind, split_use
from vitruvius._errors import ConfigError
from vitruvius.attention import Part, attentions, part
from vitruvius.surgery import restore, rewire, survey
from vitruvius.surgery.rewiring import match


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """One item of the `attention:` section: which sites, which parts, in reading order."""

    where: str = "*"
    parts: list[str | dict[str, Any]]


Parts = Sequence[str | Part | AttentionRule]


def wire(model: nn.Module, attention: Parts, *, input_size: tuple[int, int, int] | None = None) -> None:
    """Apply parts or rules; a site matched by two rules, or a rule that matches none, is an error.

    `input_size` is the size of an image, for models that do not know it themselves.
    """
    if not attention:
        return
    rules = [item for item in attention if isinstance(item, AttentionRule)]
    if not rules:
        rewire(model, *attention, input_size=input_size)  # type: ignore[arg-type]
        return
    if len(rules) != len(attention):
        raise ConfigError("attention mixes parts and rules; give a list of parts, or a list of rules.")
    made = [parts_of(rule, f"attention.{i}") for i, rule in enumerate(rules)]
    _check_overlap(model, rules, input_size)
    done: list[str] = []
    try:
        for rule, parts in zip(rules, made, strict=True):
            rewire(model, *parts, where=rule.where, input_size=input_size)
            done.append(rule.where)
    except Exception:
        for where in done:
            restore(model, where)
        raise


def parts_of(rule: AttentionRule, where: str) -> list[Part]:
    """The parts a rule names, with their settings checked."""
    made = []
    for item in rule.parts:
        name, settings = split_use(item, where=where)
        made.append(part(name, **bind(name, attentions[name], settings, where=where)))
    return made


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
    stored = {"file": None, "keep": "all"}
    parts = [{**p, **stored} if isinstance(p, dict) and p.get("use") == "mask" else p for p in rule.parts]
    return replace(rule, parts=parts)
