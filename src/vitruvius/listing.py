"""What there is: every registered piece with its settings and one line, read from the pieces themselves."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius._keys import Key
from vitruvius._recipes import find_recipe, recipe_files, recipes_folder
from vitruvius.analysis import analyses
from vitruvius.attacks import attacks
from vitruvius.attention import attentions
from vitruvius.compression.rules import rules
from vitruvius.converters import converters
from vitruvius.corruptions import corruptions
from vitruvius.data import describe_sources
from vitruvius.init import bases, inits
from vitruvius.models import models
from vitruvius.recipe_keys import chosen_sections
from vitruvius.shifts import shifts
from vitruvius.studies import studies
from vitruvius.surgery import sockets
from vitruvius.tasks import tasks
from vitruvius.tracking import trackers

__all__ = ["KINDS", "find_recipe", "listing", "recipes", "recipes_folder"]

Row = tuple[str, str, str]  # name, settings, one line


def recipes() -> list[Row]:
    """The recipes that come with the package: name, command, first line of the head."""
    return [(name, "", _head(file)) for name, file in recipe_files().items()]


KINDS: dict[str, Callable[[], list[Row]]] = {
    "analyses": analyses.describe,
    "attacks": attacks.describe,
    "attentions": attentions.describe,
    "bases": bases.describe,
    "converters": converters.describe,
    "corruptions": corruptions.describe,
    "data": describe_sources,
    "inits": inits.describe,
    "models": lambda: [(name, "", doc) for name, _, doc in models.describe()],
    "recipes": recipes,
    "rules": rules.describe,
    "shifts": shifts.describe,
    "sockets": sockets,
    "studies": studies.describe,
    "tasks": tasks.describe,
    "trackers": trackers.describe,
}


def listing(kind: str | None = None, section: str | None = None) -> str:
    """The pieces of one kind, or of all; of `keys`, those of one section of a recipe, or of all.

    kind: one of KINDS, or "keys"; by default all kinds of pieces. section: data, train, model, task, …; for keys only.
    """
    if kind == "keys":
        return _keys(section)
    if section is not None:
        raise ConfigError(f"{section!r} after {kind!r}: only `vitruvius list keys` takes a section.")
    if kind is not None and kind not in KINDS:
        known = [*KINDS, "keys"]
        raise UnknownName(f"nothing called {kind!r} to list{suggest(kind, known)} Kinds: {', '.join(known)}.")
    chosen = [kind] if kind else list(KINDS)
    return "\n\n".join(_section(name.upper(), KINDS[name]()) for name in chosen)


def _head(file: Path) -> str:
    """The first comment line of a recipe."""
    comments = (line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#"))
    return next(comments, "")


def _keys(section: str | None) -> str:
    """Sections of a recipe: every key with what it does, its type and its default."""
    texts = []
    for name, (about, keys) in chosen_sections(section).items():
        rows = [(key.name, _type_and_default(key), key.help) for key in keys]
        texts.append(_section(f"{name}: {about}", rows))
    return "\n\n".join(texts)


def _type_and_default(key: Key) -> str:
    if not key.default:
        return f"{key.type}; must be given"
    return f"{key.type}; default {key.default}"


def _section(title: str, rows: list[Row]) -> str:
    width = max((len(name) for name, _, _ in rows), default=0)
    lines = [title]
    for name, settings, doc in rows:
        lines.append(f"  {name:<{width}}  {doc}".rstrip())
        if settings:
            lines += textwrap.wrap(settings, 100, initial_indent=" " * (width + 4), subsequent_indent=" " * (width + 4))
    return "\n".join(lines)
