"""What runs and their parts are called on the page: legends, attention, threats, shifts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vitruvius.attention.base import attentions
from vitruvius.report._blocks import Key
from vitruvius.report._numbers import pixels
from vitruvius.report._runs import Run, Threat


def run_keys(runs: Sequence[Run]) -> list[Key]:
    """A dot for each run; a single run needs no legend."""
    if len(runs) == 1:
        return []
    return [Key(text=run.name, colour=run.look.name) for run in runs]


def describe_attention(run: Run) -> str:
    """The chains of parts a recipe plugs in, each once; a recipe without any has upstream's attention."""
    chains = list(dict.fromkeys(chain for _, chain in attention_rules(run)))
    return "; ".join(chains) or "as upstream"


def attention_rules(run: Run) -> list[tuple[str, str]]:
    """(where, chain of parts) of every rule of the recipe."""
    found = []
    for rule in _rules(run):
        chain = " → ".join(_part(part) for part in rule.get("parts") or [])
        found.append((str(rule.get("where", "*")), chain or "softmax"))
    return found


def say_maps(runs: Sequence[Run]) -> str:
    """A sentence for a page that shows maps: what the map of each part of the `runs` is; softmax's says itself."""
    told = []
    for name in dict.fromkeys(name for run in runs for name in _part_names(run)):
        words = getattr(attentions[name], "map_text", "")
        if words:
            told.append(f"of {name} {words}")
    if not told:
        return ""
    return f"Maps are the weights that the model really gives to its values: {'; '.join(told)}."


def _part_names(run: Run) -> list[str]:
    """The registered parts of a run's rules, in order, plain softmax apart."""
    names = []
    for rule in _rules(run):
        for item in rule.get("parts") or []:
            names.append(_part_name(item))
    return [name for name in names if name != "softmax" and name in attentions]


def _rules(run: Run) -> list[dict[str, Any]]:
    rules = run.config.get("attention")
    if not isinstance(rules, list):
        return []
    return [rule for rule in rules if isinstance(rule, dict)]


def _part_name(item: Any) -> str:
    """The registered name of one item of a rule: `rpc:iterations=2` or {use: rpc}."""
    if isinstance(item, dict):
        return str(item.get("use", ""))
    return str(item).partition(":")[0]


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    settings = ", ".join(f"{key}={value}" for key, value in part.items() if key != "use" and value is not None)
    if settings:
        return f"{part.get('use', '?')}({settings})"
    return str(part.get("use", "?"))


def label_threats(runs: Sequence[Run]) -> dict[str, str]:
    """spec → label of every threat of the runs, in order of appearance; labels differ from each other."""
    threats = {threat.spec: threat for run in runs for threat in run.threats}
    labels = {spec: _label(threat) for spec, threat in threats.items()}
    alike = Counter(labels.values())
    return {spec: label if alike[label] == 1 else spec for spec, label in labels.items()}


def family(threat: Threat) -> str:
    """What an attack is besides its strength: its spec without ε and without the step size that follows from it."""
    head, _, settings = threat.spec.partition("(")
    kept = [one for one in settings.removesuffix(")").split(", ") if not re.match(r"(eps|step_size)=", one)]
    if any(kept):
        return f"{head}({', '.join(kept)})"
    return head


def _label(threat: Threat) -> str:
    name = threat.name.partition("(")[0]
    if threat.eps is None:
        return name
    return f"{name} ε = {pixels(threat.eps)}"


def shift_names(runs: Sequence[Run]) -> list[str]:
    """Names of all shifts of the runs, in order of appearance."""
    return list(dict.fromkeys(name for run in runs for name in run.shifts))
