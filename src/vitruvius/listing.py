"""What there is: every registered piece with its settings and one line, read from the pieces themselves."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius.analysis import analyses
from vitruvius.attacks import attacks
from vitruvius.attention import attentions
from vitruvius.compression.rules import rules
from vitruvius.converters import converters
from vitruvius.corruptions import corruptions
from vitruvius.data import describe_sources
from vitruvius.init import bases, inits
from vitruvius.models import models
from vitruvius.shifts import shifts
from vitruvius.studies import studies
from vitruvius.surgery import sockets
from vitruvius.tasks import tasks
from vitruvius.tracking import trackers

Row = tuple[str, str, str]  # name, settings, one line


def recipes() -> list[Row]:
    """The recipes that come with the package: name, command, first line of the head."""
    folder = recipes_folder()
    rows = []
    for file in sorted(folder.glob("*/*.yaml")):
        name = file.relative_to(folder).with_suffix("").as_posix()
        head = next((line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#")), "")
        rows.append((name, "", head))
    return rows


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


def listing(kind: str | None = None) -> str:
    """The pieces of one kind, or of all."""
    if kind is not None and kind not in KINDS:
        raise UnknownName(f"nothing called {kind!r} to list{suggest(kind, KINDS)} Kinds: {', '.join(KINDS)}.")
    chosen = [kind] if kind else list(KINDS)
    return "\n\n".join(_section(name, KINDS[name]()) for name in chosen)


def recipes_folder() -> Path:
    """Beside the package when installed, at the root of the repository in a checkout."""
    packaged = Path(__file__).parent / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "recipes"


def find_recipe(name: str) -> Path:
    """A path as it stands, or a recipe's name."""
    path = Path(name)
    if path.exists():
        return path
    packaged = recipes_folder() / f"{name.removesuffix('.yaml').removeprefix('recipes/')}.yaml"
    if packaged.exists():
        return packaged
    known = [row[0] for row in recipes()]
    raise ConfigError(f"no recipe at {name}{suggest(name, known)} `vitruvius list recipes` shows what comes with it.")


def _section(kind: str, rows: list[Row]) -> str:
    width = max((len(name) for name, _, _ in rows), default=0)
    lines = [kind.upper()]
    for name, settings, doc in rows:
        lines.append(f"  {name:<{width}}  {doc}".rstrip())
        if settings:
            lines += textwrap.wrap(settings, 100, initial_indent=" " * (width + 4), subsequent_indent=" " * (width + 4))
    return "\n".join(lines)
