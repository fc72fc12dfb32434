"""What there is: every registered piece with its settings and one line, read from the pieces themselves."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius._keys import Key
from vitruvius._recipes import find_recipe, recipe_files, recipes_folder

__all__ = ["KINDS", "find_recipe", "listing", "recipes", "recipes_folder", "remembered_listing"]

Row = tuple[str, str, str]  # name, settings, one line


def recipes() -> list[Row]:
    """The recipes that come with the package: name, command, first line of the head."""
    return [(name, "", _head(file)) for name, file in recipe_files().items()]


def registered(room: str, registry: str) -> list[Row]:
    """The pieces of one `registry`, by its name in a `room`; only that room is imported."""
    rows: list[Row] = getattr(import_module(f"vitruvius.{room}"), registry).describe()
    return rows


def attacks() -> list[Row]:
    """Attacks that need a model and nothing else, and those of evaluation, which look inside it or at a second one."""
    import_module("vitruvius.evaluation")
    return registered("attacks", "attacks")


def models() -> list[Row]:
    """The models under vitruvius/; their settings are timm's."""
    return [(name, "", doc) for name, _, doc in registered("models", "models")]


def told_by(room: str, function: str) -> list[Row]:
    """What a `function` of a `room` lists; only that room is imported."""
    rows: list[Row] = getattr(import_module(f"vitruvius.{room}"), function)()
    return rows


KINDS: dict[str, Callable[[], list[Row]]] = {
    "analyses": partial(registered, "analysis", "analyses"),
    "attacks": attacks,
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
}


def listing(kind: str | None = None, section: str | None = None) -> str:
    """The pieces of one kind, or of all; of `keys`, those of one section of a recipe, or of all.

    kind: one of KINDS or its singular, or "keys"; by default all kinds of pieces. section: data, train, model, task,
    …; for keys only.
    """
    if kind is not None:
        kind = plural_of(kind)
    if kind == "keys":
        return _keys(section)
    if section is not None:
        raise ConfigError(f"{section!r} after {kind!r}: only `vitruvius list keys` takes a section.")
    return "\n\n".join(_section(name.upper(), KINDS[name]()) for name in _chosen_kinds(kind))


def remembered_listing(kind: str | None = None, section: str | None = None) -> str:
    """As `listing`, but what was listed once is read from a file, so that PyTorch is not imported to print names.

    The file lies in the user's cache folder under a name made of the size and time of every source file and recipe.
    Nothing is remembered in a process that has imported PyTorch already, where plugins may have registered pieces, nor
    where installed plugins bring some.

    kind, section: as for `listing`.
    """
    if "torch" in sys.modules or _has_plugins():
        return listing(kind, section)
    file = _cache_folder() / f"listing-{_fingerprint()}-{kind or 'all'}-{section or 'all'}.txt"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8")
    text = listing(kind, section)
    if "torch" in sys.modules:  # else it was quick anyway
        with contextlib.suppress(OSError):  # a home that cannot be written to
            _remember(file, text)
    return text


def _remember(file: Path, text: str) -> None:
    """Write a list; those of earlier sources go."""
    from vitruvius._files import atomic_write_text  # which imports PyTorch

    for old in file.parent.glob("listing-*.txt"):
        if _fingerprint() not in old.name:
            old.unlink()
    atomic_write_text(file, text)


def _has_plugins() -> bool:
    """Whether an installed distribution brings pieces by entry points."""
    return any(group.startswith("vitruvius.") for group in entry_points().groups)


def _cache_folder() -> Path:
    """Where a user's caches lie: XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitruvius"


def _fingerprint() -> str:
    """Of the sources, the recipes, and the versions that names may come from."""
    facts = [sys.version]
    for name in ("torch", "timm"):
        with contextlib.suppress(PackageNotFoundError):
            facts.append(version(name))
    for file in [*sorted(Path(__file__).parent.rglob("*.py")), *recipe_files().values()]:
        found = file.stat()
        facts.append(f"{file} {found.st_size} {found.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


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


def _keys(section: str | None) -> str:
    """Sections of a recipe: every key with what it does, its type and its default."""
    from vitruvius.recipe_keys import chosen_sections  # which imports every section's room

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
