"""YAML as this field writes it: 1e-5 and 4/255 are numbers, 1:30 is text, only true and false are booleans."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from vitruvius._errors import ConfigError

LARGEST = 100_000  # values a text may stand for, aliases counted as often as they are used
WRONG = (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError)  # what PyYAML raises


class _Loader(yaml.SafeLoader):
    """SafeLoader without YAML 1.1's traps; a repeated key, and a text that aliases blow up, are refused."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        _count(node, {})
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise ConfigError(f"the key {key.value!r} is there twice, in lines {lines[key.value]} and {line}.")
                lines[key.value] = line
        return super().construct_mapping(node, deep)


def _count(node: Any, known: dict[int, int]) -> int:
    """How many values a node stands for, with aliases written out."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = LARGEST + 1  # met again before it is counted: it holds itself
    children = node.value if isinstance(node, yaml.CollectionNode) else []
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in children for child in pair]
    total = 1 + sum(_count(child, known) for child in children)
    if total > LARGEST:
        raise ConfigError(f"its aliases (*name) stand for more than {LARGEST} values; write them out.")
    known[id(node)] = total
    return total


_BOOL, _INT, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_DATE, _MERGE = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge"
_FRACTION = re.compile(r"[-+]?\d+(?:\.\d+)?/\d+(?:\.\d+)?")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag not in (_BOOL, _INT, _FLOAT, _DATE)]  # a date is text
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(_INT, re.compile(r"^[-+]?(?:\d[\d_]*|0b[01_]+|0x[\da-fA-F_]+)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^(?:[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?|[-+]?\.?inf|\.nan)$"),
    list("-+.0123456789i"),
)
_Loader.add_implicit_resolver("!fraction", re.compile(rf"^{_FRACTION.pattern}$"), list("-+0123456789"))


def _construct_int(_: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(node.value).replace("_", "")
    return int(text, 0 if "b" in text[:3] or "x" in text[:3] else 10)


def _construct_fraction(_: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    over, under = str(node.value).split("/")
    if float(under) == 0:
        raise ConfigError(f"{node.value} divides by zero.")
    return float(over) / float(under)


_Loader.add_constructor(_INT, _construct_int)
_Loader.add_constructor(_FLOAT, lambda _, node: float(node.value.replace(".inf", "inf").replace(".nan", "nan")))
_Loader.add_constructor("!fraction", _construct_fraction)


def parse_value(text: str) -> Any:
    """One YAML value: `4/255` → 0.0157, `1e-5` → 0.00001, `[1, 2]` → a list."""
    try:
        return yaml.load(text, _Loader)
    except WRONG as error:
        raise ConfigError(f"cannot read {_short(text)} as a YAML value: {error}") from error


def _short(text: str, most: int = 200) -> str:
    """The text in quotes, only its beginning if it is long."""
    return f"{text[:most]!r}…" if len(text) > most else repr(text)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no recipe at {path}. `vitruvius list recipes` shows the ones that come with it.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        data = yaml.load(text, _Loader)
    except WRONG as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        expected = "expected a mapping of sections such as model: and train:."
        raise ConfigError(f"{path} holds {type(data).__name__} {_short(str(data))}, {expected}")
    return data


def to_plain(value: Any) -> Any:
    """Dataclasses, paths and tuples as what YAML and JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    if isinstance(value, bool | int | float | str | None):
        return value
    return str(value)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also puts in quotes what only our loader would take for a number."""


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *rules]
    for first, rules in _Loader.yaml_implicit_resolvers.items()
}


def dump_yaml(value: Any) -> str:
    """YAML that reads back to the same values."""
    return str(yaml.dump(to_plain(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))
