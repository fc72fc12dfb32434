"""The attention of a run in words: `low_rank(rank=2) → softmax`."""

from __future__ import annotations

from typing import Any

from vitruvius.report._runs import Run


def describe_attention(run: Run) -> str:
    """The chains of parts a recipe plugs in, each once; a recipe without any has upstream's attention."""
    chains = list(dict.fromkeys(chain for _, chain in attention_rules(run)))
    return "; ".join(chains) or "as upstream"


def attention_rules(run: Run) -> list[tuple[str, str]]:
    """(where, chain of parts) of every rule of the recipe."""
    rules = run.config.get("attention")
    return [
        (str(rule.get("where", "*")), " → ".join(_part(part) for part in rule.get("parts") or []) or "softmax")
        for rule in (rules if isinstance(rules, list) else [])
        if isinstance(rule, dict)
    ]


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    settings = ", ".join(f"{key}={value}" for key, value in part.items() if key != "use" and value is not None)
    return f"{part.get('use', '?')}({settings})" if settings else str(part.get("use", "?"))
