"""What there is: every registered piece with its settings and one line, read from the pieces themselves."""

from __future__ import annotations

import textwrap

from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius._recipes import find_recipe, recipe_files, recipes_folder
from vitruvius.recipe_keys import PIECES, SECTIONS, load, sections

__all__ = ["KINDS", "find_recipe", "listing", "recipes", "recipes_folder", "rows_of"]

Row = tuple[str, str, str]  # name, settings, one line

KINDS = {  # kind → its registry, or a function that lists it, and what it is; only what is listed is imported
    "analyses": ("analysis:analyses", "what `vitruvius analyse` measures of attention"),
    "attacks": ("attacks.base:attacks", "adversarial attacks, for --threat and for training"),
    "attentions": ("attention:attentions", "parts of attention, for `attention:` in a recipe and for rewire"),
    "bases": ("init:bases", "what an init begins with, for `base:` beside it"),
    "checkpoints": ("converters.published:describe_published", "checkpoints that papers publish, models by name"),
    "converters": ("converters:converters", "layouts of checkpoints, for `vitruvius convert --from`"),
    "corruptions": ("corruptions:corruptions", "common corruptions, for --threat and `vitruvius corrupt`"),
    "data": ("data.base:describe_sources", "data sets, for `data.dataset`"),
    "explanations": ("analysis:explanations", "which pixels an answer rests on, for `vitruvius analyse`"),
    "inits": ("init:inits", "initial weights, for `init:` in a recipe"),
    "models": ("models:models", "models of our own; those of timm have the names that timm gives them"),
    "recipes": ("listing:recipes", "what `vitruvius train` takes by name"),
    "rules": ("compression.rules:rules", "which pairs a mask keeps, for `vitruvius masks --rule`"),
    "shifts": ("shifts:shifts", "published sets of shifted images, for --shift"),
    "sockets": ("surgery.base:sockets", "attention classes of timm that can be rewired"),
    "studies": ("studies:studies", "experiments over several runs, for `vitruvius study`"),
    "targets": ("targets:target_kinds", "ways to name a model"),
    "tasks": ("tasks:tasks", "what training minimises, for `task:` in a recipe"),
    "trackers": ("tracking:trackers", "where training reports to, for `tracking:` in a recipe"),
    "zoo": ("_recipes:describe_zoo", "trained checkpoints of a checkout, models by name"),
}


def recipes() -> list[Row]:
    """The recipes that come with the package: name, command, first line of the head."""
    rows = []
    for name, file in recipe_files().items():
        head = (line[1:].strip() for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
        rows.append((name, "", next(head, "")))
    return rows


def rows_of(kind: str) -> list[Row]:
    """The pieces of one `kind` of `KINDS`."""
    source = load(KINDS[kind][0])
    return source() if callable(source) else source.describe()


def listing(kind: str | None = None, section: str | None = None) -> str:
    """The pieces of one kind, or of all; of `keys`, those of one section of a recipe, or of all with fixed keys.

    kind: one of KINDS or its singular, "keys" or "all"; by default what kinds there are. section: data, train, model,
    task, …; for keys only.
    """
    if kind is None:
        about = [(name, "", text) for name, (_, text) in KINDS.items()]
        keys = ("keys", "", "the keys of a recipe; `vitruvius list keys train`: those of a section")
        return _table("vitruvius list KIND, or all:", [*about, keys])
    kind = plural_of(kind)
    if kind == "keys":
        return _keys(section)
    if section is not None:
        raise ConfigError(f"{section!r} after {kind!r}: only `vitruvius list keys` takes a section.")
    if kind not in (*KINDS, "all"):
        known = [*KINDS, "keys", "all"]
        raise UnknownName(f"nothing called {kind!r} to list{suggest(kind, known)} Kinds: {', '.join(known)}.")
    return "\n\n".join(_table(name.upper(), rows_of(name)) for name in (KINDS if kind == "all" else [kind]))


def _keys(name: str | None) -> str:
    """Without a section those that are known without importing PyTorch; the others are named at the end."""
    chosen = sections(name) if name else {title: sections(title)[title] for title in SECTIONS}
    tables = []
    for title, section in chosen.items():
        rows = [
            (key.name, f"{key.type}; {f'default {key.default}' if key.default else 'must be given'}", key.help)
            for key in section.keys
        ]
        tables.append(_table(f"{title}: {section.about}", rows))
    if name is None:
        tables.append("\n".join(f"{title}: see `vitruvius list keys {title}`" for title in PIECES))
    return "\n\n".join(tables)


def plural_of(kind: str) -> str:
    """The kind that a singular `kind` means: attention → attentions, analysis → analyses; other words as they are."""
    irregular = {"analysis": "analyses", "basis": "bases", "study": "studies", "key": "keys"}
    return irregular.get(kind, f"{kind}s" if f"{kind}s" in KINDS else kind)


def _table(title: str, rows: list[Row]) -> str:
    width = max((len(name) for name, _, _ in rows), default=0)
    lines = [title]
    for name, settings, doc in rows:
        lines.append(f"  {name:<{width}}  {doc}".rstrip())
        if settings:
            lines += textwrap.wrap(settings, 100, initial_indent=" " * (width + 4), subsequent_indent=" " * (width + 4))
    return "\n".join(lines)
