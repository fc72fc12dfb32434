"""The keys of a recipe, section by section, and its JSON schema, read from what defines them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vitruvius._config import Schema, schema_of, words_of
from vitruvius._errors import UnknownName, suggest
from vitruvius._lazy import uncollected
from vitruvius._registry import Registry, first_line

SECTIONS = {  # title → where it is defined, in the order in which they are listed
    "recipe": "training.config:Config",
    "model": "models.config:ModelConfig",
    "attention": "models.config:AttentionRule",
    "data": "data._config:DataConfig",
    "data.mix": "data._config:Mix",
    "train": "training.config:TrainConfig",
    "train.keep": "training.config:Keep",
    "gradual": "training.config:Gradual",
    "sweep": "training.config:SweepConfig",
    "sweep.evaluate": "training.config:EvaluationPlan",
    "sweep.maps": "training.config:MapsPlan",
    "sweep.masks": "training.config:MaskPlan",
}
PIECES = {  # those whose keys are settings of pieces, which must be imported to be asked
    "slurm": "training.slurm:launch",
    "task": "tasks:tasks",
    "task.schedule": "tasks.inner:schedules",
    "tracking": "tracking:trackers",
}
NAMED = {  # where a recipe names a piece → the registry of these pieces
    ("properties", "task"): "tasks:tasks",
    ("properties", "init"): "init:inits",
    ("properties", "tracking", "items"): "tracking:trackers",
    ("$defs", "AttentionRule", "properties", "parts", "items"): "attention:attentions",
}


@dataclass(frozen=True)
class Key:
    """One key of a section, as a reader needs it."""

    name: str
    type: str
    default: str  # empty: the key must be given
    help: str


@dataclass(frozen=True)
class Section:
    """Keys that belong together, and one line about them."""

    about: str
    keys: list[Key]


def sections(name: str | None = None) -> dict[str, Section]:
    """The sections of a recipe, of a sweep file and of `--slurm`, by title.

    name: `train`, `task`, `task.schedule`, …: that one and those inside it, one for each piece that may stand there; by
    default all.
    """
    homes = SECTIONS | PIECES
    chosen = [title for title in homes if name is None or title == name or title.startswith(f"{name}.")]
    if not chosen:
        raise UnknownName(f"a recipe has no section {name!r}{suggest(str(name), homes)} Sections: {', '.join(homes)}.")
    found: dict[str, Section] = {}
    for title in chosen:
        made = load(homes[title])
        pieces = {f"{title} {name}": made[name] for name in made} if isinstance(made, Registry) else {title: made}
        found |= {title: Section(first_line(piece), keys_of(piece)) for title, piece in pieces.items()}
    return found


def load(home: str) -> Any:
    """What `package.module:name` stands for."""
    module, _, name = home.partition(":")
    with uncollected():
        return getattr(import_module(f"vitruvius.{module}"), name)


def keys_of(section_or_piece: Any) -> list[Key]:
    """The keys of a section, or the settings of a piece, in the order in which they are written."""
    schema = schema_of(section_or_piece)
    needed = schema.get("required", ())
    return [
        Key(name, words_of(node), "" if name in needed else _default_of(node), node.get("description", ""))
        for name, node in schema["properties"].items()
    ]


def find_key(name: str, among: Iterable[str] = ("train", "data", "model", "recipe")) -> str | None:
    """How a key is written on the command line: `epochs` → `train.epochs`; None if no section has it."""
    wanted = name.replace("-", "_")
    for title in among:
        if wanted in schema_of(load(SECTIONS[title]))["properties"]:
            return wanted if title == "recipe" else f"{title}.{wanted}"
    return None


def recipe_schema(*, pieces: bool = False) -> Schema:
    """The JSON schema of a recipe, for editors.

    pieces: with the names and settings of all tasks, inits, attentions and trackers, which takes importing them.
    """
    schema = schema_of(load(SECTIONS["recipe"]))
    if pieces:
        for path, home in NAMED.items():
            _name_pieces(schema, path, load(home))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_with_fractions(schema)}


def _name_pieces(schema: Schema, path: tuple[str, ...], registry: Registry[Any]) -> None:
    """Put the forms of the registered pieces where a recipe names one; other names are left to plugins."""
    node: Schema = schema
    for step in path:
        node = node[step]
    names = list(registry)
    forms: list[Schema] = [{"enum": names}, {"type": "string"}, {"type": "null"}]
    for name in names:
        settings = schema_of(registry[name])
        use = {"const": name, "description": first_line(registry[name])}
        forms.append(
            {
                "type": "object",
                "properties": {"use": use, **settings["properties"]},
                "required": ["use", *settings.get("required", ())],
                "additionalProperties": registry.kind == "init",  # beside its settings stand `where` and `base`
            }
        )
    forms.append({"type": "object", "properties": {"use": {"not": {"enum": names}}}, "required": ["use"]})
    node.pop("anyOf")
    node["anyOf"] = forms


def _with_fractions(node: Any) -> Any:
    """The same schema where a number may also be written 4/255 or 1e-5, which is text for other readers of YAML."""
    if isinstance(node, list):
        return [_with_fractions(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    changed = {key: _with_fractions(value) for key, value in node.items()}
    if changed.get("type") == "number":
        changed |= {"type": ["number", "string"], "pattern": r"^[-+]?[\d.]+(/[\d.]+|[eE][-+]?\d+)$"}
    return changed


def _default_of(node: Schema) -> str:
    """A default as a recipe writes it."""
    default = node["default"]
    if "$ref" in node:
        return "the defaults of that section"
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return str(default) if default != "" else '""'
