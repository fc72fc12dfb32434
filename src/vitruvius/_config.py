"""Recipes: YAML and `key=value` overrides become frozen dataclasses; every mistake is named with file, key and remedy.

jsonargparse checks each value against its type hint; what is written here finds the key and the words.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser

from vitruvius._errors import ConfigError, suggest
from vitruvius._yaml import parse_value

T = TypeVar("T")
Data = dict[str, Any]


def override(data: Mapping[str, Any], settings: Iterable[str]) -> Data:
    """A copy with `section.key=value` settings applied; list items by number, `attention.0.where=…`."""
    result: Data = _copy(data)
    for setting in settings:
        if not isinstance(setting, str):
            raise ConfigError(f"override {setting!r} is not text of the form section.key=value, e.g. train.epochs=20.")
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {setting!r} is not of the form section.key=value, e.g. train.epochs=20.")
        _put(result, key.split("."), parse_value(text), setting)
    return result


def build(schema: type[T], data: Mapping[str, Any], *, source: str) -> T:
    """A frozen dataclass from a mapping; unknown, missing and wrongly typed keys are ConfigErrors."""
    return _build(schema, data, source, ())


def split_use(spec: str | Mapping[str, Any], *, where: str) -> tuple[str, Data]:
    """`"rpc"` or `{use: rpc, iterations: 2}` → name and settings."""
    if isinstance(spec, str):
        return spec, {}
    settings = dict(spec)
    if "use" not in settings:
        raise ConfigError(f"{where}: {settings} does not say which piece to use; add a key `use:`.")
    name = settings.pop("use")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: use = {name!r}, expected the name of a piece.")
    return name, settings


def parse_spec(text: str, *, where: str = "") -> tuple[str, Data]:
    """`pgd:eps=4/255,steps=10` → ("pgd", {"eps": 0.0157, "steps": 10}); commas inside [] and {} stay together.

    `where` begins an error's sentence.
    """
    prefix = _prefix(where)
    name, _, rest = text.partition(":")
    if not name.strip():
        raise ConfigError(f"{prefix}{text!r} does not begin with a name; expected e.g. pgd:eps=4/255,steps=10.")
    settings: Data = {}
    for item in re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,\[{])+", rest):
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(
                f"{prefix}{item!r} in {text!r} is not of the form key=value, e.g. pgd:eps=4/255,steps=10."
            )
        if key in settings:
            raise ConfigError(f"{prefix}{text!r} sets {key!r} twice.")
        settings[key] = parse_value(value)
    return name.strip(), settings


def bind(name: str, piece: Callable[..., Any], settings: Mapping[str, Any], *, where: str = "") -> Data:
    """Settings checked and converted against the keyword-only parameters of a piece."""
    prefix = _prefix(where)
    known = _settings_of(piece)
    hints = hints_of(piece)
    _refuse_unknown_settings(name, settings, known, prefix)
    _refuse_missing_settings(name, settings, known, prefix)
    return {key: _value(hints.get(key, Any), value, f"{prefix}{name}.{key}") for key, value in settings.items()}


def _refuse_unknown_settings(name: str, settings: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> None:
    for key in settings:
        if key not in known:
            options = ", ".join(known) or "none"
            raise ConfigError(f"{prefix}{name!r} has no setting {key!r}{suggest(str(key), known)} Settings: {options}.")


def _refuse_missing_settings(
    name: str, settings: Mapping[str, Any], known: Mapping[str, inspect.Parameter], prefix: str
) -> None:
    needed = [key for key, parameter in known.items() if parameter.default is parameter.empty]
    missing = [key for key in needed if key not in settings]
    if missing:
        raise ConfigError(f"{prefix}{name!r} needs a value for {', '.join(missing)}.")


def _prefix(where: str) -> str:
    """How an error's sentence begins."""
    if not where:
        return ""
    return f"{where}: "


def _settings_of(piece: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a piece; its generator is not a setting."""
    parameters = inspect.signature(piece).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "generator"}


def _build(schema: type[T], data: Any, source: str, path: tuple[str, ...]) -> T:
    where = ".".join(path) or "the top level"
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: {where} is {_kind(data)}, expected a section with keys.")
    hints = get_type_hints(schema)
    fields = {field.name: field for field in dataclasses.fields(schema) if field.init}  # type: ignore[arg-type]
    _refuse_unknown_keys(data, fields, source, path)
    values: Data = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _field(hints[name], data[name], source, (*path, name))
        elif _is_required(field):
            raise ConfigError(f"{source}: {_dotted(path, name)} is missing; expected {type_in_words(hints[name])}.")
    return schema(**values)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _refuse_unknown_keys(
    data: Mapping[str, Any], fields: Mapping[str, Any], source: str, path: tuple[str, ...]
) -> None:
    for key in data:
        if key not in fields:
            known = ", ".join(fields)
            raise ConfigError(
                f"{source}: unknown key {_dotted(path, key)!r}{suggest(str(key), fields)} Known: {known}."
            )


def _field(hint: Any, value: Any, source: str, path: tuple[str, ...]) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, source, path)  # type: ignore[arg-type]
    origin = get_origin(hint)
    if origin in (tuple, list) and dataclasses.is_dataclass(get_args(hint)[0]):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{source}: {'.'.join(path)} is {_kind(value)}, expected a list of sections.")
        item: Any = get_args(hint)[0]
        return origin(_build(item, one, source, (*path, str(i))) for i, one in enumerate(value))
    return _value(hint, value, f"{source}: {'.'.join(path)}")


def _value(hint: Any, value: Any, where: str) -> Any:
    """The value as its type, or a ConfigError that says what was expected."""
    members = _members(hint)
    for choice in members:
        if isinstance(value, str) and hasattr(choice, "parse"):
            return choice.parse(value)
        if _is_instance(value, choice):
            return value
    if _is_stray(value, members):
        raise ConfigError(f"{where} = {value!r}, expected {type_in_words(hint)}.")
    found = _parsed(hint, value, where)
    if _is_no_number(found):
        raise ConfigError(
            f"{where} = {value!r}, expected {type_in_words(hint)}; nan and whole numbers beyond 64 bits are refused."
        )
    return found


def _is_no_number(value: Any) -> bool:
    """Whether a value is NaN, or a whole number that no tensor can hold; in lists too."""
    if isinstance(value, list | tuple):
        return any(_is_no_number(item) for item in value)
    if isinstance(value, float):
        return math.isnan(value)
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _is_stray(value: Any, members: tuple[Any, ...]) -> bool:
    """Whether a value is true, false or nothing where the hint allows none of them; the parser would let it pass."""
    if Any in members or inspect.Parameter.empty in members:
        return False
    return (isinstance(value, bool) and bool not in members) or (value is None and type(None) not in members)


def _parsed(hint: Any, value: Any, where: str) -> Any:
    parser = _parser(hint)
    if parser is None:
        return value
    try:
        return parser.parse_object({"value": value}).value
    except ArgumentError:
        raise ConfigError(f"{where} = {value!r}, expected {type_in_words(hint)}.") from None


def _is_instance(value: Any, choice: Any) -> bool:
    """Whether a value is of a type already; numbers are left to the parser, which tells 1 from 1.0 and true."""
    return isinstance(choice, type) and choice not in (int, float, bool, Any) and isinstance(value, choice)


@lru_cache(maxsize=512)
def _parser(hint: Any) -> ArgumentParser | None:
    if hint is Any or hint is inspect.Parameter.empty:
        return None
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
    except ValueError:  # a type jsonargparse has no rule for is left to the piece itself
        return None
    return parser


def _members(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return get_args(hint)
    return (hint,)


def hints_of(piece: Callable[..., Any]) -> dict[str, Any]:
    """The type hints of a piece's settings."""
    target: Any = piece
    if isinstance(piece, type) and not dataclasses.is_dataclass(piece):
        target = piece.__init__  # type: ignore[misc]
    try:
        return get_type_hints(inspect.unwrap(target))
    except (NameError, TypeError):  # annotations of a plugin that only exist for type checkers
        return {}


def _put(data: Any, keys: list[str], value: Any, setting: str) -> None:
    head, *rest = keys
    key = _key_in(data, head, setting)
    if not rest:
        data[key] = value
        return
    if isinstance(data, dict) and data.get(key) is None:
        data[key] = {}
    _put(data[key], rest, value, setting)


def _key_in(data: Any, head: str, setting: str) -> Any:
    """A word of an override as what it means in `data`: the number of an item, or a key."""
    if isinstance(data, dict):
        return head
    if not isinstance(data, list):
        raise ConfigError(f"override {setting!r}: {head!r} lies inside {data!r}, which has no keys.")
    if not head.isdigit() or int(head) >= len(data):
        raise ConfigError(f"override {setting!r}: {head!r} is not an item 0 … {len(data) - 1} of that list.")
    return int(head)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


def _dotted(path: tuple[str, ...], key: object) -> str:
    return ".".join((*path, str(key)))


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{type(value).__name__} {value!r}"


def type_in_words(hint: Any) -> str:
    """A type hint in words, for errors and lists of keys."""
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if hint in plain:
        return plain[hint]
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(type_in_words(member) for member in get_args(hint))
    if get_origin(hint) in (list, tuple):
        return _list_in_words(hint)
    return _kind_in_words(hint)


def _kind_in_words(hint: Any) -> str:
    if hint is Any:
        return "anything"
    if get_origin(hint) is dict:
        return "a mapping"
    if dataclasses.is_dataclass(hint):
        return "a section"
    return getattr(hint, "__name__", str(hint))


def _list_in_words(hint: Any) -> str:
    plural = {"a whole number": "whole numbers", "a number": "numbers", "a section": "sections", "text": "texts"}
    items = dict.fromkeys(type_in_words(arg) for arg in get_args(hint) if arg is not Ellipsis)
    return "a list of " + " and ".join(plural.get(item, item) for item in items)
