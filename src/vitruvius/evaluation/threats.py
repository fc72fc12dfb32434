"""Threats: made from their descriptions, and what they are called in ledgers and reports.

A threat is any function (model, x, y) → x'. Its short name is for tables; its description, with the settings that
differ from the defaults, identifies it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius._format import format_number
from vitruvius._progress import Progress, no_progress
from vitruvius._registry import Spec, read_spec
from vitruvius.attacks.base import attacks, check_moved, disturb
from vitruvius.corruptions.base import is_corruption, parse_corruptions

Threat = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A threat as ledgers and reports know it."""

    spec: str  # pgd(eps=4/255, steps=20): the same description, the same threat
    short: str  # pgd
    eps: float | None = None
    severity: int | None = None  # of a corruption


def make_threats(spec: Spec | Threat, *, where: str = "threat") -> list[Threat]:
    """The threats that one description means; most mean one, `corruptions` means 15 corruptions at 5 severities.

    spec: `"pgd:eps=4/255,steps=10"`, `"fog:severity=3"`, `{use: pgd, eps: 4/255}`, or a function (model, x, y) → x'.
    where: what was described, for an error: an argument, a flag or a recipe's section.
    """
    if isinstance(spec, str | Mapping):
        name, settings = read_spec(spec, where=where)
        if is_corruption(name, settings):
            return list(parse_corruptions(name, settings, where=where))
    return [attacks.make(spec, where=where)]


def make_threat(spec: Spec | Threat, *, where: str = "threat") -> Threat:
    """The one threat that a description means: `pgd:eps=4/255,steps=10` → PGD(eps=…, steps=10).

    spec and where: as in `make_threats`; a description of several threats is refused.
    """
    threats = make_threats(spec, where=where)
    if len(threats) != 1:
        raise ConfigError(f"{where}: {spec!r} means {len(threats)} threats; expected one, e.g. fog:severity=3.")
    return threats[0]


def moved_by(
    threat: Threat, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor, progress: Progress = no_progress
) -> Tensor:
    """x' (B, …) of images `x` with labels `y` and `ids`; that of others than ours is checked."""
    moved = disturb(threat, model, x, y, ids, progress)
    if is_foreign(threat):
        check_moved(threat, moved, x)
    return moved


def is_foreign(threat: object) -> bool:
    """Whether nobody has checked yet that what it returns lies in the image and in its ball."""
    return not type(threat).__module__.startswith("vitruvius.")


def enter(threat: Threat) -> Entry:
    """The line of a `threat` in a ledger: its description, short name and strength.

    An attack that looks for the smallest change has an infinite eps, which is none, and no number of JSON's.
    """
    eps = getattr(threat, "eps", None)
    if eps == math.inf:
        eps = None
    return Entry(
        spec=describe(threat),
        short=short_name(threat),
        eps=eps,
        severity=getattr(threat, "severity", None),
    )


def by_spec(threats: Sequence[Threat]) -> dict[str, Threat]:
    """Threats by their descriptions; the same one twice is an error.

    `threats` come in any order, which is kept.
    """
    named: dict[str, Threat] = {}
    for threat in threats:
        spec = describe(threat)
        if spec in named:
            raise ConfigError(f"the threat {spec} is given twice; each once.")
        named[spec] = threat
    return named


def name_entries(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Short names, made different by their settings where the same attack comes twice.

    `entries` are those of one ledger.
    """
    named: dict[str, Entry] = {}
    for entry in entries:
        named[entry.spec if entry.short in named else entry.short] = entry
    return named


def family(entry: Entry) -> str:
    """A corruption without its severity: `fog`, or `fog(seed=1)` where other settings differ.

    `entry` is the line of a corruption in a ledger.
    """
    return re.sub(r"severity=\d+(, )?", "", entry.spec).replace(", )", ")").removesuffix("()")


def short_name(threat: Threat) -> str:
    """What tables call a `threat`: the name of its function or class, in lower case."""
    if isinstance(threat, functools.partial):
        inside = threat.func
    else:
        inside = threat
    return str(getattr(inside, "__name__", type(inside).__name__)).lower()


def describe(threat: Threat) -> str:
    """`pgd(eps=4/255, steps=20)`: the settings that differ from the defaults, exactly.

    `threat` is any; of a plain function the description is its name.
    """
    if isinstance(threat, functools.partial):
        return f"{short_name(threat)}({', '.join(_bound_settings(threat))})"
    made: Any = threat
    if not dataclasses.is_dataclass(made):
        return short_name(threat)
    shown = []
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        if field.init and value != _default_of(field):
            shown.append(f"{field.name}={format_number(value)}")
    return f"{short_name(threat)}({', '.join(shown)})"


def _bound_settings(threat: functools.partial[Any]) -> list[str]:
    named = [f"{key}={format_number(value)}" for key, value in threat.keywords.items()]
    return [*map(format_number, threat.args), *named]


def _default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field; MISSING, which equals no value, where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
