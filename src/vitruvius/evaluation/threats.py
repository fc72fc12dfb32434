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
from vitruvius.attacks.adapters import Foreign
from vitruvius.attacks.base import attacks, check_moved, disturb
from vitruvius.corruptions.base import is_corruption, parse_corruptions

OF_MODELS = ("device", "model_name", "training")  # attributes of other libraries' attacks that are no settings

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
    return not str(getattr(threat, "__module__", "")).startswith("vitruvius.")


def enter(threat: Threat) -> Entry:
    """The line of a `threat` in a ledger: its description, short name and strength.

    An attack that looks for the smallest change has an infinite eps, which is none, and no number of JSON's.
    """
    eps, severity = getattr(threat, "eps", None), getattr(threat, "severity", None)
    eps = None if eps == math.inf else eps
    return Entry(spec=describe(threat), short=short_name(threat), eps=eps, severity=severity)


def by_spec(threats: Sequence[Threat]) -> dict[str, Threat]:
    """Threats by their descriptions; the same one twice is an error."""
    named: dict[str, Threat] = {}
    for threat in threats:
        spec = describe(threat)
        if spec in named:
            raise ConfigError(f"the threat {spec} is given twice; each once.")
        named[spec] = threat
    return named


def name_entries(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Short names, made different by their settings where the same attack comes twice."""
    named: dict[str, Entry] = {}
    for entry in entries:
        named[entry.spec if entry.short in named else entry.short] = entry
    return named


def family(entry: Entry) -> str:
    """A corruption without its severity: `fog`, or `fog(seed=1)` where other settings differ."""
    return re.sub(r"severity=\d+(, )?", "", entry.spec).replace(", )", ")").removesuffix("()")


def short_name(threat: Threat) -> str:
    """What tables call a `threat`: the name of its function or class, in lower case."""
    inside = threat.func if isinstance(threat, functools.partial) else threat
    return str(getattr(inside, "__name__", type(inside).__name__)).lower()


def describe(threat: Threat) -> str:
    """`pgd(eps=4/255, steps=20)`: the settings that differ from the defaults, exactly."""
    if isinstance(threat, functools.partial):
        bound = [f"{key}={format_number(value)}" for key, value in threat.keywords.items()]
        return f"{short_name(threat)}({', '.join([*map(format_number, threat.args), *bound])})"
    made: Any = threat
    if isinstance(made, Foreign):
        radius = "" if made.eps is None else f", eps={format_number(made.eps)}, norm={made.norm}"
        return f"{short_name(threat)}({_describe_theirs(made)}{radius})"
    if not dataclasses.is_dataclass(made):
        return short_name(threat)
    shown = []
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.init and value != default:  # a field without one has MISSING, which equals no value
            shown.append(f"{field.name}={format_number(value)}")
    return f"{short_name(threat)}({', '.join(shown)})"


def _describe_theirs(adapter: Foreign) -> str:
    """`PGD(alpha=2/255, eps=8/255, steps=10)`: another library's attack, as it is made for a model of no consequence.

    Where it cannot be made for that: the name of the function that makes it.
    """
    try:
        theirs = adapter.make(nn.Sequential(nn.Flatten(), nn.Linear(1, 2)).eval())
    except Exception:
        return str(getattr(adapter.make, "__qualname__", type(adapter.make).__name__))
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    plain = {key: value for key, value in vars(theirs).items() if isinstance(value, bool | int | float | str)}
    settings = [f"{key}={format_number(plain[key])}" for key in sorted(plain) if key not in OF_MODELS and key[0] != "_"]
    return f"{type(theirs).__name__}({', '.join(settings)})"
