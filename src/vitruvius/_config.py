"""Recipes and settings: frozen dataclasses and signatures of pieces, checked by pydantic.

Whatever is wrong becomes one ConfigError that says where, what came and what was expected.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    NotRequired,
    Required,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import pydantic.dataclasses
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PydanticInvalidForJsonSchema,
    PydanticSchemaGenerationError,
    PydanticUserError,
    Strict,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import SchemaError
from typing_extensions import TypedDict

from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius._yaml import parse_value, to_plain

T = TypeVar("T")
Data = dict[str, Any]
Spec = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})]  # a piece, in three forms
Schema = dict[str, Any]  # a JSON schema, or a part of one

SETTINGS = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
SECTION = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


def key(default: T, help: str, **bounds: float) -> T:
    """A field with its `default`, one line that says what it does, and its `bounds` (ge, gt, le, lt)."""
    metadata: Data = {"description": help, "bounds": bounds}
    if isinstance(default, list | dict):
        metadata["json_schema_extra"] = {"default": default}
        return cast(T, dataclasses.field(default_factory=default.copy, metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


def required(help: str, **bounds: float) -> Any:
    """The same for a key that must be given."""
    return dataclasses.field(metadata={"description": help, "bounds": bounds})


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(name: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: a frozen dataclass whose values pydantic checks whenever one is made.

    `name` is what an error calls it where it is made in Python: `data`, as in `data.batch_size = 0, expected …`.
    """

    def decorate(plain: type[T]) -> type[T]:
        for field, hint in get_type_hints(plain, include_extras=True).items():
            metadata = getattr(plain.__dict__.get(field), "metadata", {})
            plain.__annotations__[field] = Annotated[_strict(hint), Field(**metadata.get("bounds", {}))]
        made: Any = pydantic.dataclasses.dataclass(plain, frozen=True, kw_only=True, config=SECTION)
        checked_init = made.__init__

        @functools.wraps(checked_init)
        def __init__(self: Any, **values: Any) -> None:
            try:
                checked_init(self, **values)
            except ValidationError as error:
                raise _explained(error, TypeAdapter(made), path=[name]) from None

        made.__init__ = __init__
        return cast(type[T], made)

    return decorate


def build(schema: type[T], data: Mapping[str, Any], *, source: str) -> T:
    """A section from a mapping; unknown, missing and wrongly typed keys are ConfigErrors that name the `source`."""
    adapter = TypeAdapter(schema)
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        raise _explained(error, adapter, where=source) from None


def bind(name: str, piece: Callable[..., Any], settings: Mapping[str, Any], *, where: str = "") -> Data:
    """Settings checked and converted against the keyword-only parameters of a piece; `where` begins an error."""
    adapter = _settings_of(piece)
    try:
        return adapter.validate_python(dict(settings))
    except ValidationError as error:
        raise _explained(error, adapter, where=where, path=[name]) from None


def schema_of(section_or_piece: Any) -> Schema:
    """The JSON schema of a section, or of the settings of a piece."""
    is_section = pydantic.dataclasses.is_pydantic_dataclass(section_or_piece)
    adapter = TypeAdapter(section_or_piece) if is_section else _settings_of(section_or_piece)
    return adapter.json_schema(schema_generator=_Generator)


def override(data: Mapping[str, Any], settings: Iterable[str]) -> Data:
    """A copy with `section.key=value` settings applied; list items by number, `attention.0.where=…`."""
    result: Data = _copy(data)
    for setting in settings:
        dotted, equals, text = setting.partition("=") if isinstance(setting, str) else ("", "", "")
        if not equals or not dotted:
            raise ConfigError(f"override {setting!r} is not of the form section.key=value, e.g. train.epochs=20.")
        if not text.strip():  # a variable of a shell that is not set
            raise ConfigError(f"override {setting!r} says no value; write {dotted}=null for none.")
        _put(result, dotted.split("."), parse_value(text), setting)
    return result


def _put(data: Any, keys: Sequence[str], value: Any, setting: str) -> None:
    head, *rest = keys
    index: Any = head
    if isinstance(data, list):
        if not head.isdigit() or int(head) >= len(data):
            raise ConfigError(f"override {setting!r}: {head!r} is not an item 0 … {len(data) - 1} of that list.")
        index = int(head)
    elif not isinstance(data, dict):
        raise ConfigError(f"override {setting!r}: {head!r} lies inside {data!r}, which has no keys.")
    elif rest and data.get(head) is None:
        data[head] = {}
    if rest:
        _put(data[index], rest, value, setting)
    else:
        data[index] = value


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


_SCALARS: dict[Any, Any] = {
    int: Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)],  # what a tensor can hold
    float: Annotated[float, Strict(), Field(ge=-math.inf)],  # NaN is no number
    bool: Annotated[bool, Strict()],
    str: Annotated[str, Strict(), BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)],
}


def _strict(hint: Any) -> Any:
    """A type hint for pydantic that takes numbers, booleans and text only for what they are.

    A class with a method `parse` (a norm, a loss) takes text too.
    """
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_strict, members))
    if origin in (list, tuple, dict):
        return origin[tuple(member if member is Ellipsis else _strict(member) for member in members)]
    if getattr(hint, "_is_protocol", False):  # anything: whether it is one is seen when it is called
        return Any
    if isinstance(hint, type) and hasattr(hint, "parse"):
        return Annotated[hint, BeforeValidator(lambda value: hint.parse(value) if isinstance(value, str) else value)]
    return hint


def _settings_of(piece: Callable[..., Any]) -> TypeAdapter[Data]:
    """The keyword-only parameters of a piece, explained by its fields or its docstring; its generator is no setting."""
    hints, helps = hints_of(piece), _helps_of(piece)
    fields: Data = {}
    for parameter in inspect.signature(piece).parameters.values():
        name, default = parameter.name, parameter.default
        if parameter.kind is not parameter.KEYWORD_ONLY or name == "generator":
            continue
        hint, about = _usable(_strict(hints.get(name, Any))), helps.get(name)
        if default is parameter.empty:
            fields[name] = Required[Annotated[hint, Field(description=about)]]
        else:
            extra = Field(description=about, json_schema_extra={"default": to_plain(default)})
            fields[name] = NotRequired[Annotated[hint, extra]]
    settings = cast(Any, TypedDict)("Settings", fields)
    settings.__pydantic_config__ = SETTINGS
    return TypeAdapter(settings)


def _usable(hint: Any) -> Any:
    """The hint, or Any if pydantic has no rule for it: such a value is left to the piece."""
    try:
        TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticSchemaGenerationError, SchemaError, TypeError, NameError):
        return Any
    except PydanticUserError:  # a dataclass, which has a config of its own
        return hint
    return hint


def hints_of(piece: Callable[..., Any]) -> dict[str, Any]:
    target: Any = piece.__init__ if isinstance(piece, type) and not dataclasses.is_dataclass(piece) else piece  # type: ignore[misc]
    try:
        return get_type_hints(inspect.unwrap(target), include_extras=True)
    except (NameError, TypeError):  # annotations of a plugin that only exist for type checkers
        return {}


def _helps_of(piece: Callable[..., Any]) -> dict[str, str]:
    """Name → help, from the fields of a dataclass and from the lines `name: …` of the docstring."""
    helps = dict(re.findall(r"^\s*(\w+): (\S.*)$", inspect.getdoc(piece) or "", flags=re.MULTILINE))
    if dataclasses.is_dataclass(piece):
        fields = {field.name: field.metadata.get("description") for field in dataclasses.fields(piece)}
        helps |= {name: text for name, text in fields.items() if text}
    return helps


class _Generator(GenerateJsonSchema):
    """JSON schemas without titles made from names of keys; a type that JSON does not know is told by its name."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def int_schema(self, schema: Any) -> Schema:
        bounds = {"minimum": -(2**63), "exclusiveMaximum": 2**63}
        return {key: value for key, value in super().int_schema(schema).items() if bounds.get(key) != value}

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Schema:
        if "cls" not in schema and schema["type"] != "callable":
            raise PydanticInvalidForJsonSchema(error_info)
        return {"title": schema["cls"].__name__ if "cls" in schema else "a callable"}


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument", "invalid_key")


def _explained(
    error: ValidationError, adapter: TypeAdapter[Any], *, where: str = "", path: Sequence[str] = ()
) -> ConfigError | UnknownName:
    """What pydantic found as one sentence; an unknown key first, for it may be what is missing elsewhere."""
    details = error.errors(include_url=False)
    detail = min(details, key=lambda one: one["type"] not in _UNKNOWN)
    opening = f"{where}: " if where else ""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError | UnknownName):
        return type(cause)(f"{opening}{cause}")
    schema = adapter.json_schema(schema_generator=_Generator)
    keys, node = locate(schema, detail["loc"])
    dotted = ".".join((*path, *keys)) or "the top level"
    if detail["type"] in _UNKNOWN:
        known = [name for choice in _choices(schema, node) for name in choice.get("properties", ())]
        last = str(detail["loc"][-1])
        whole = ".".join((*path, *keys, last))
        return ConfigError(f"{opening}unknown key {whole!r}{suggest(last, known)} Known: {', '.join(known) or 'none'}.")
    expected = f"expected {words_of(node)}"
    if detail["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return ConfigError(f"{opening}{dotted} is missing; {expected}.")
    value = detail["input"]
    if isinstance(value, int) and abs(value) >= 2**63:
        expected += ", of at most 64 bits"
    hint = suggest(value, map(str, node["enum"])) if isinstance(value, str) and "enum" in node else "."
    return ConfigError(f"{opening}{dotted} = {value!r}, {expected}{hint}")


def locate(schema: Schema, steps: Iterable[int | str]) -> tuple[list[str], Schema]:
    """The keys among the `steps` of an error of pydantic, which names types too, and what is said of the last."""
    node, keys = schema, []
    for step in steps:
        children = [_child(choice, step) for choice in _choices(schema, node)]
        child = next((child for child in children if child is not None), None)
        if child is not None:
            keys.append(str(step))
            node = child
    return keys, node


def _choices(schema: Schema, node: Schema) -> list[Schema]:
    """What a part of a schema may be, references followed."""
    choices = node.get("anyOf", [node])
    return [schema["$defs"][choice["$ref"].rpartition("/")[2]] if "$ref" in choice else choice for choice in choices]


def _child(node: Schema, step: int | str) -> Schema | None:
    if step in node.get("properties", {}):
        return cast(Schema, node["properties"][step])
    if isinstance(step, int) and node.get("type") == "array":
        return cast(Schema, node["prefixItems"][step] if "prefixItems" in node else node.get("items", {}))
    return None


_PLAIN = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
_PLURAL = {"a whole number": "whole numbers", "a number": "numbers", "a section": "sections", "text": "texts"}


def words_of(node: Schema) -> str:
    """A type in words, from its JSON schema."""
    if "anyOf" in node:
        return " or ".join(words_of(choice) for choice in node["anyOf"])
    if "enum" in node or "const" in node:
        return "one of " + ", ".join(map(str, node.get("enum", [node.get("const")])))
    if "$ref" in node or "properties" in node:
        return "a section"
    kind = node.get("type")
    if kind == "array":
        return _list_in_words(node)
    if kind == "object":
        return "a mapping"
    return _PLAIN.get(str(kind), str(node.get("title", "anything"))) + _bounds_in_words(node)


def _bounds_in_words(node: Schema) -> str:
    if "minimum" in node and "maximum" in node:
        return f" from {node['minimum']:g} to {node['maximum']:g}"
    bounds = " and ".join(f"{words} {node[bound]:g}" for bound, words in _BOUNDS.items() if bound in node)
    return f" of {bounds}" if bounds.startswith("at") else f" {bounds}".rstrip()


def _list_in_words(node: Schema) -> str:
    items = dict.fromkeys(words_of(item) for item in node.get("prefixItems", [node.get("items", {})]))
    count = f"{node['minItems']} " if "minItems" in node and node["minItems"] == node.get("maxItems") else ""
    return f"a list of {count}" + " and ".join(_PLURAL.get(item, item) for item in items)
