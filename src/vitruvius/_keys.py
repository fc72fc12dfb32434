"""Keys of a recipe that explain themselves: a field with one line of help, and lists of keys with type and default.

A dataclass section names its keys with `key` (or `field(metadata={"help": …})` where a key has no default). A piece
with settings explains them in its docstring, a line `name: what it does` each.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

from vitruvius._config import hints_of, type_in_words
from vitruvius._errors import UnknownName, suggest
from vitruvius._yaml import to_plain

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a section, as a reader needs it."""

    name: str
    type: str
    default: str  # empty: the key must be given
    help: str


def key(default: T, help: str) -> T:
    """The default of a dataclass field, with one line that says what the key does."""
    field: Any = dataclasses.field(default=default, metadata={"help": help})
    made: T = field
    return made


def key_from(factory: Callable[[], T], help: str) -> T:
    """The same for a default that must be made anew each time, such as a list."""
    field: Any = dataclasses.field(default_factory=factory, metadata={"help": help})
    made: T = field
    return made


def keys_of(section: type[Any]) -> list[Key]:
    """The keys of a dataclass section, in the order in which they are written."""
    hints = get_type_hints(section)
    return [
        Key(field.name, type_in_words(hints[field.name]), _default_of(field), str(field.metadata.get("help", "")))
        for field in dataclasses.fields(section)
        if field.init
    ]


def settings_of(piece: Callable[..., Any]) -> list[Key]:
    """The settings of a registered piece: its keyword-only parameters, explained by its fields or its docstring."""
    parameters = [p for p in inspect.signature(piece).parameters.values() if p.kind is p.KEYWORD_ONLY]
    hints = hints_of(piece)
    helps = _helps_of(piece)
    return [
        Key(p.name, type_in_words(hints.get(p.name, Any)), _text(p.default, p.empty), helps.get(p.name, ""))
        for p in parameters
        if p.name != "generator"
    ]


def choose_sections(known: Mapping[str, T], name: str | None) -> dict[str, T]:
    """Of the `known` sections by title, the one of this `name` and those inside it; all of them without a name."""
    if name is None:
        return dict(known)
    titles = {title: re.split(r"[ :]", title)[0] for title in known}  # `task.schedule linear: …` → `task.schedule`
    chosen = {title: section for title, section in known.items() if name in (titles[title], title.partition(":")[0])}
    if not chosen:
        names = list(dict.fromkeys(titles.values()))
        raise UnknownName(f"a recipe has no section {name!r}{suggest(name, names)} Sections: {', '.join(names)}.")
    return chosen


def _helps_of(piece: Callable[..., Any]) -> dict[str, str]:
    """Name → help, from the metadata of a dataclass and from the lines `name: …` of the docstring."""
    lines = re.findall(r"^\s*(\w+): (\S.*)$", inspect.getdoc(piece) or "", flags=re.MULTILINE)
    helps = dict(lines)
    if dataclasses.is_dataclass(piece):
        helps |= {one.name: one.metadata["help"] for one in dataclasses.fields(piece) if "help" in one.metadata}
    return helps


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        if dataclasses.is_dataclass(made):
            return "the defaults of that section"
        return _text(made, dataclasses.MISSING)
    return _text(field.default, dataclasses.MISSING)


def _text(default: Any, missing: Any) -> str:
    """A default as a recipe writes it."""
    if default is missing:
        return ""
    plain = to_plain(default)
    if plain is None:
        return "null"
    if isinstance(plain, bool):
        return str(plain).lower()
    if plain == "":
        return '""'
    return str(plain)
