"""Print the figures that say how readable the tree is, and the bounds that the contract tests hold it to.

    python scripts/tree_figures.py               (two seconds)
    python scripts/tree_figures.py --by-room     (one row per room)
    python scripts/tree_figures.py --places attacks      (where a room's figures come from)

A *room* is a folder of src/vitruvius, or one of the files beside them. Complexity is radon's, which also counts `and`,
`or`, conditional expressions and comprehensions. The length of a function is that of its body without the docstring.
Conditional expressions are counted per 1,000 lines, and per 1,000 lines that are not blank (--by-room shows these); the
bound holds for both.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from radon.complexity import cc_visit_ast
from radon.visitors import Class, Function

SOURCE = Path(__file__).parent.parent / "src" / "vitruvius"
CRUMB_LINES = 40  # a file with fewer lines is a crumb
COMPRESSED_COMPLEXITY, COMPRESSED_LINES = 8, 20  # that complex, in a body that short: compressed
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MAX_COMPLEXITY = 10
MAX_PRIVATE_MODULES = {"attacks": 8, "data": 12, "training": 12}  # at the top level of a room
MAX_CRUMBS = 45
MAX_PRIVATE_IMPORTS = 0
MAX_COMPRESSED_PERCENT = 2.0
MAX_CONDITIONALS_PER_1000 = 15.0


@dataclass
class Figures:
    """What was counted in some files; every list holds places, written as `file:line what`."""

    files: int = 0
    lines: int = 0
    lines_not_blank: int = 0
    functions: int = 0
    highest_complexity: int = 0
    private_modules: list[str] = field(default_factory=list)
    crumbs: list[str] = field(default_factory=list)
    private_imports: list[str] = field(default_factory=list)
    too_complex: list[str] = field(default_factory=list)
    compressed: list[str] = field(default_factory=list)
    conditionals: list[str] = field(default_factory=list)

    @property
    def compressed_percent(self) -> float:
        return 100 * len(self.compressed) / max(self.functions, 1)

    @property
    def conditionals_per_1000(self) -> float:
        return 1000 * len(self.conditionals) / max(self.lines, 1)

    @property
    def conditionals_per_1000_not_blank(self) -> float:
        return 1000 * len(self.conditionals) / max(self.lines_not_blank, 1)

    def add_file(self, path: Path, source: Path) -> None:
        """Count one file; `source` is the folder of the package."""
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        inside = path.relative_to(source)
        lines = len(text.splitlines())
        self.files += 1
        self.lines += lines
        self.lines_not_blank += sum(bool(line.strip()) for line in text.splitlines())
        if path.name != "__init__.py" and lines < CRUMB_LINES:
            self.crumbs.append(f"{inside} {lines} lines")
        if len(inside.parts) == 2 and inside.name.startswith("_") and inside.name != "__init__.py":
            self.private_modules.append(str(inside))
        self._count_nodes(tree, inside)
        self._count_functions(tree, inside)

    def _count_nodes(self, tree: ast.Module, inside: Path) -> None:
        room = room_of(inside)
        for node in ast.walk(tree):
            if isinstance(node, ast.IfExp):
                self.conditionals.append(f"{inside}:{node.lineno}")
            for name in imported_modules(node):
                if is_private_elsewhere(name, room):
                    self.private_imports.append(f"{inside}:{node.lineno} {name}")

    def _count_functions(self, tree: ast.Module, inside: Path) -> None:
        body_lines = {node.lineno: body_length(node) for node in ast.walk(tree) if isinstance(node, DEFINITIONS)}
        for function in functions_in(tree):
            place = f"{inside}:{function.lineno} {function.name} {function.complexity}"
            self.functions += 1
            self.highest_complexity = max(self.highest_complexity, function.complexity)
            if function.complexity > MAX_COMPLEXITY:
                self.too_complex.append(place)
            if function.complexity >= COMPRESSED_COMPLEXITY and body_lines[function.lineno] <= COMPRESSED_LINES:
                self.compressed.append(f"{place} in {body_lines[function.lineno]} lines")


def measure(source: Path = SOURCE, *, room: str | None = None) -> Figures:
    """Count the package in `source`, or only the room of that name."""
    figures = Figures()
    for path in sorted(source.rglob("*.py")):
        if room is None or room_of(path.relative_to(source)) == room:
            figures.add_file(path, source)
    return figures


def room_of(inside: Path) -> str:
    """The room that a file lies in, from its path inside the package."""
    return inside.parts[0].removesuffix(".py")


def rooms(source: Path = SOURCE) -> list[str]:
    return sorted({room_of(path.relative_to(source)) for path in source.rglob("*.py")})


def imported_modules(node: ast.AST) -> Iterator[str]:
    """The dotted names that an import statement may bind as modules: `from a import b` names both `a` and `a.b`."""
    if isinstance(node, ast.Import):
        for name in node.names:
            yield name.name
    elif isinstance(node, ast.ImportFrom) and node.module:
        if is_private_name(node.module):
            yield node.module
        else:
            for name in node.names:
                yield f"{node.module}.{name.name}"


def is_private_name(dotted: str) -> bool:
    """Whether a part below `vitruvius.<room>` begins with one underscore."""
    parts = dotted.split(".")[2:]
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def is_private_elsewhere(dotted: str, room: str) -> bool:
    parts = dotted.split(".")
    return len(parts) > 2 and parts[0] == "vitruvius" and parts[1] != room and is_private_name(dotted)


def functions_in(tree: ast.Module) -> Iterator[Function]:
    """Every function and method once; what is defined inside a function counts as part of it."""
    seen = set()
    for block in cc_visit_ast(tree):
        for function in block.methods if isinstance(block, Class) else [block]:
            if function.lineno not in seen:
                seen.add(function.lineno)
                yield function


def body_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the last."""
    body = node.body
    if ast.get_docstring(node) is not None and len(body) > 1:
        body = body[1:]
    return (node.end_lineno or node.lineno) - body[0].lineno + 1


def print_whole(figures: Figures) -> None:
    print(f"{figures.files} files, {figures.lines} lines, {figures.functions} functions\n")
    rows: list[tuple[str, str, str]] = []
    for room, bound in MAX_PRIVATE_MODULES.items():
        beside = [name for name in figures.private_modules if name.startswith(f"{room}/")]
        rows.append((f"private modules at the top level of {room}", str(len(beside)), str(bound)))
    percent = f"{MAX_COMPRESSED_PERCENT:g} %"
    conditionals = f"{MAX_CONDITIONALS_PER_1000:g}"
    rows += [
        (f"files under {CRUMB_LINES} lines, without __init__", str(len(figures.crumbs)), str(MAX_CRUMBS)),
        ("imports of another room's private files", str(len(figures.private_imports)), str(MAX_PRIVATE_IMPORTS)),
        ("functions of complexity 8 or more in 20 lines or fewer", f"{figures.compressed_percent:.1f} %", percent),
        (f"functions of complexity over {MAX_COMPLEXITY}", str(len(figures.too_complex)), "0"),
        ("highest complexity", str(figures.highest_complexity), str(MAX_COMPLEXITY)),
        ("conditional expressions per 1,000 lines", f"{figures.conditionals_per_1000:.1f}", conditionals),
        ("… per 1,000 lines that are not blank", f"{figures.conditionals_per_1000_not_blank:.1f}", conditionals),
    ]
    for what, found, bound in rows:
        print(f"{what:58s}{found:>8s}   at most {bound}")


def print_by_room(source: Path = SOURCE) -> None:
    headings = ("room", "files", "private", "crumbs", "imports", "compressed", "over 10", "highest", "conditionals")
    print(f"{headings[0]:14s}" + "".join(f"{heading:>13s}" for heading in headings[1:]))
    for room in rooms(source):
        found = measure(source, room=room)
        cells = (
            str(found.files),
            str(len(found.private_modules)),
            str(len(found.crumbs)),
            str(len(found.private_imports)),
            f"{len(found.compressed)} = {found.compressed_percent:.1f} %",
            str(len(found.too_complex)),
            str(found.highest_complexity),
            f"{len(found.conditionals)} = {found.conditionals_per_1000_not_blank:.1f}",
        )
        print(f"{room:14s}" + "".join(f"{cell:>13s}" for cell in cells))


def print_places(figures: Figures) -> None:
    lists: dict[str, Iterable[str]] = {
        "private modules": figures.private_modules,
        f"files under {CRUMB_LINES} lines": figures.crumbs,
        "imports of another room's private files": figures.private_imports,
        f"complexity over {MAX_COMPLEXITY}": figures.too_complex,
        "complexity 8 or more in 20 lines or fewer": figures.compressed,
        "conditional expressions": figures.conditionals,
    }
    for heading, places in lists.items():
        print(f"\n{heading}")
        for place in places:
            print(f"  {place}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by-room", action="store_true", help="one row per room")
    parser.add_argument("--places", metavar="ROOM", choices=rooms(), help="where a room's figures come from")
    chosen = parser.parse_args()
    if chosen.places:
        print_places(measure(room=chosen.places))
    elif chosen.by_room:
        print_by_room()
    else:
        print_whole(measure())


if __name__ == "__main__":
    main()
