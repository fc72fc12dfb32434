"""What there is: every registered piece with its settings and one line, read from the pieces themselves."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius._keys import Key, choose_sections
from vitruvius._recipes import describe_zoo, find_recipe, recipe_files, recipes_folder

__all__ = ["KINDS", "find_recipe", "listing", "recipes", "recipes_folder", "write_index"]

Row = tuple[str, str, str]  # name, settings, one line


def recipes() -> list[Row]:
    """The recipes that come with the package: name, command, first line of the head."""
    return [(name, "", _head(file)) for name, file in recipe_files().items()]


def registered(room: str, registry: str) -> list[Row]:
    """The pieces of one `registry`, by its name in a `room`; only that room is imported."""
    rows: list[Row] = getattr(import_module(f"vitruvius.{room}"), registry).describe()
    return rows


def models() -> list[Row]:
    """The models under vitruvius/; their settings are timm's."""
    return [(name, "", doc) for name, _, doc in registered("models", "models")]


def told_by(room: str, function: str) -> list[Row]:
    """What a `function` of a `room` lists; only that room is imported."""
    rows: list[Row] = getattr(import_module(f"vitruvius.{room}"), function)()
    return rows


KINDS: dict[str, Callable[[], list[Row]]] = {
    "analyses": partial(registered, "analysis", "analyses"),
    "attacks": partial(registered, "attacks", "attacks"),
    "attentions": partial(registered, "attention", "attentions"),
    "bases": partial(registered, "init", "bases"),
    "checkpoints": partial(told_by, "converters.published", "describe_published"),
    "converters": partial(registered, "converters", "converters"),
    "corruptions": partial(registered, "corruptions", "corruptions"),
    "data": partial(told_by, "data", "describe_sources"),
    "explanations": partial(registered, "analysis", "explanations"),
    "inits": partial(registered, "init", "inits"),
    "models": models,
    "recipes": recipes,
    "rules": partial(registered, "compression.rules", "rules"),
    "shifts": partial(registered, "shifts", "shifts"),
    "sockets": partial(told_by, "surgery", "sockets"),
    "studies": partial(registered, "studies", "studies"),
    "targets": partial(registered, "targets", "target_kinds"),
    "tasks": partial(registered, "tasks", "tasks"),
    "trackers": partial(registered, "tracking", "trackers"),
    "zoo": describe_zoo,
}
LIVE = ("recipes", "zoo")  # files that are read as they are now, without PyTorch


ROOMS = (  # whose public files register what is listed
    "analysis",
    "attacks",
    "attention",
    "compression/rules",
    "converters",
    "corruptions",
    "data/sources",
    "evaluation",
    "init",
    "models",
    "shifts",
    "studies",
    "surgery",
    "targets",
    "tasks",
    "tracking",
)
INDEX = Path(__file__).with_name("listing.json")  # written by scripts/listing_index.py


class Registries:
    """What the pieces say themselves; everything is imported."""

    def rows(self, kind: str) -> list[Row]:
        """The pieces of one `kind`."""
        return KINDS[kind]()

    def keys(self) -> dict[str, list[Row]]:
        """The keys of a recipe, by the title of their section."""
        from vitruvius.recipe_keys import sections  # which imports every section's room

        return {
            f"{name}: {about}": [(key.name, _type_and_default(key), key.help) for key in keys]
            for name, (about, keys) in sections().items()
        }


class Index:
    """What the pieces of the package say, as it was written down when it was released: nothing is imported.

    A test compares it with the registries.

    `text` is the JSON of the file.
    """

    def __init__(self, text: str) -> None:
        self.known: dict[str, Any] = json.loads(text)

    def rows(self, kind: str) -> list[Row]:
        """The pieces of one `kind`; recipes and checkpoints of the zoo are read as they are now."""
        if kind in LIVE:
            return KINDS[kind]()
        return [(name, settings, line) for name, settings, line in self.known["kinds"][kind]]

    def keys(self) -> dict[str, list[Row]]:
        """The keys of a recipe, by the title of their section."""
        return {
            title: [(name, default, line) for name, default, line in rows] for title, rows in self.known["keys"].items()
        }


def write_index() -> str:
    """The text of the index, from the registries."""
    live = Registries()
    kinds = {kind: live.rows(kind) for kind in KINDS if kind not in LIVE}
    known = {"files": piece_files(), "kinds": kinds, "keys": live.keys()}
    return json.dumps(known, indent=0, ensure_ascii=False) + "\n"


def piece_files() -> list[str]:
    """The public files of the rooms that pieces are dropped into."""
    package = Path(__file__).parent
    found = [file.relative_to(package) for room in ROOMS for file in (package / room).glob("[!_]*.py")]
    return sorted(file.as_posix() for file in found)


def source_of_pieces() -> Registries | Index:
    """The index, unless there may be pieces that it does not know.

    Those are a file that was dropped into a room, a plugin that is installed, and what a process that has imported
    PyTorch already may have registered.
    """
    live = Registries()
    if "torch" in sys.modules or _has_plugins() or not INDEX.is_file():
        return live
    index = Index(INDEX.read_text(encoding="utf-8"))
    if index.known["files"] != piece_files():
        return live
    return index


def listing(kind: str | None = None, section: str | None = None) -> str:
    """The pieces of one kind, or of all; of `keys`, those of one section of a recipe, or of all.

    kind: one of KINDS or its singular, or "keys"; by default all kinds of pieces. section: data, train, model, task,
    …; for keys only.
    """
    if kind is not None:
        kind = plural_of(kind)
    pieces = source_of_pieces()
    if kind == "keys":
        sections = choose_sections(pieces.keys(), section)
        return "\n\n".join(_section(title, rows) for title, rows in sections.items())
    if section is not None:
        raise ConfigError(f"{section!r} after {kind!r}: only `vitruvius list keys` takes a section.")
    return "\n\n".join(_section(name.upper(), pieces.rows(name)) for name in _chosen_kinds(kind))


def _has_plugins() -> bool:
    """Whether an installed distribution brings pieces by entry points."""
    return any(group.startswith("vitruvius.") for group in entry_points().groups)


def _chosen_kinds(kind: str | None) -> list[str]:
    """One kind, or all."""
    if not kind:
        return list(KINDS)
    if kind not in KINDS:
        known = [*KINDS, "keys"]
        raise UnknownName(f"nothing called {kind!r} to list{suggest(kind, known)} Kinds: {', '.join(known)}.")
    return [kind]


def plural_of(kind: str) -> str:
    """The kind that a singular `kind` means: attention → attentions, analysis → analyses; other words as they are."""
    for plural in (*KINDS, "keys"):
        if kind in _singulars(plural):
            return plural
    return kind


def _singulars(plural: str) -> set[str]:
    """`studies` → `study`, `bases` → `basis` and `base`, `analyses` → `analysis`, `attacks` → `attack`."""
    forms = {plural.removesuffix("s")}
    if plural.endswith("ies"):
        forms.add(plural.removesuffix("ies") + "y")
    if plural.endswith("ses"):
        forms.add(plural.removesuffix("ses") + "sis")
    return forms


def _head(file: Path) -> str:
    """The first comment line of a recipe."""
    comments = (line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#"))
    return next(comments, "")


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
