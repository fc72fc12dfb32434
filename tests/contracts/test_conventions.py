"""What CONVENTIONS says of the tree is so."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "vitruvius"


def test_every_file_opens_with_a_docstring() -> None:
    """Rule 1. Markers of packages without a sentence of their own may be empty."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not text.strip() or ast.get_docstring(ast.parse(text)), path


def test_modules_compute_without_writing_to_themselves() -> None:
    """Rule 8: `forward` of a stage or a kernel assigns nothing to `self`."""
    for path in (SOURCE / "attention").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "forward":
                assert not list(writes_to_self(node)), path


def writes_to_self(function: ast.FunctionDef) -> list[ast.Attribute]:
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]


RESTORE_THEMSELVES = ("_random.py",)  # for each batch; for timm's augmentation of each image
SEEDS = ("torch.manual_seed", "random.seed", "np.random.seed")


def test_no_global_generator_is_left_seeded() -> None:
    """Rule 12: a global seed is set inside `fork_rng` only, or where the state is put back by hand."""
    for path in SOURCE.rglob("*.py"):
        if not str(path.relative_to(SOURCE)).startswith(RESTORE_THEMSELVES):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert lines_that_seed(tree) <= lines_that_fork(tree), path


def lines_that_seed(tree: ast.Module) -> set[int]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {call.lineno for call in calls if ast.unparse(call.func) in SEEDS}


def lines_that_fork(tree: ast.Module) -> set[int]:
    """The lines inside `with torch.random.fork_rng(…)`."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and any("fork_rng" in ast.unparse(item) for item in node.items):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def test_recipes_say_their_command_and_what_to_expect_or_that_nobody_ran_them() -> None:
    """Rule 20, for everything but the digits, whose results come from the demo."""
    for path in (ROOT / "recipes").rglob("*.yaml"):
        if path.parent.name in ("digits", "sweeps"):
            continue
        head = "".join(
            line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.startswith("#")
        )
        assert "vitruvius train" in head, path
        assert "Expected: " in head, path
