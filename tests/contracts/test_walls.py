"""The walls of the house: a room's private files are its own business."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "vitruvius"


def modules_named(tree: ast.AST) -> Iterator[str]:
    """Every module of ours that a file imports, `from vitruvius.room import _file` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reaches_into(module: str, room: str) -> bool:
    """Whether a module is a private file, or in a private folder, of another room."""
    package, *parts = module.split(".")
    if package != "vitruvius" or len(parts) < 2 or parts[0] == room:
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts[1:])


def test_no_room_imports_a_private_file_of_another_room() -> None:
    trespassers = []
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for module in modules_named(ast.parse(path.read_text())):
            if reaches_into(module, room):
                trespassers.append(f"{path.relative_to(SOURCE)} imports {module}")
    assert not trespassers, "export what is needed from the room's __init__ instead"


def test_the_check_sees_both_ways_to_import() -> None:
    tree = ast.parse("from vitruvius.attacks._base import Model\nfrom vitruvius.attacks import _norms, PGD\n")
    found = [module for module in modules_named(tree) if reaches_into(module, "tasks")]
    assert found == ["vitruvius.attacks._base", "vitruvius.attacks._base.Model", "vitruvius.attacks._norms"]
    assert not any(reaches_into(module, "attacks") for module in modules_named(tree))
