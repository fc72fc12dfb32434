"""What a threat is called: a short name, and a description with the settings that matter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from vitruvius._errors import ConfigError

Threat = Callable[[nn.Module, Tensor, Tensor], Tensor]


def name_threats(threats: Sequence[Threat]) -> dict[str, Threat]:
    """Short names, made different by their settings where the same attack comes twice."""
    named: dict[str, Threat] = {}
    for threat in threats:
        name = short_name(threat)
        if name in named:
            name = describe(threat)
        if name in named:
            raise ConfigError(f"the threat {name} is given twice; each once.")
        named[name] = threat
    return named


def short_name(threat: Threat) -> str:
    return str(getattr(threat, "__name__", type(threat).__name__)).lower()


def describe(threat: Threat) -> str:
    """`pgd(eps=4/255, steps=10)`: the settings that differ from the defaults."""
    fields: dict[str, dataclasses.Field[Any]] = getattr(threat, "__dataclass_fields__", {})
    shown = []
    for field in fields.values():
        value = getattr(threat, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            shown.append(f"{field.name}={_spoken(field.name, value)}")
    return f"{short_name(threat)}({', '.join(shown)})" if fields else short_name(threat)


def _spoken(name: str, value: Any) -> str:
    if name == "eps" and isinstance(value, float) and 0 < value < 1 and abs(value * 255 - round(value * 255, 2)) < 1e-9:
        return f"{round(value * 255, 2):g}/255"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
