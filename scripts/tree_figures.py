"""How large the package is, and how much of it one command runs.

    python scripts/tree_figures.py             (two seconds: lines, files, private modules, exported names per package)
    python scripts/tree_figures.py --walks     (two minutes: the files and functions that six commands run)
    python scripts/tree_figures.py --walks evaluate --names     (with the files' names)

A *package* is a folder of src/vitruvius; `.` stands for the modules beside them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "vitruvius"
TESTS = ROOT / "tests"


@dataclass(kw_only=True)
class Size:
    """What was counted in some files."""

    files: int = 0
    lines: int = 0
    private: int = 0
    exported: int = 0

    def add(self, path: Path, source: Path) -> None:
        text = path.read_text(encoding="utf-8")
        self.files += 1
        self.lines += len(text.splitlines())
        self.private += is_private(list(path.relative_to(source).parts))
        if path.name == "__init__.py":
            self.exported += len(exported_names(ast.parse(text)))


def exported_names(tree: ast.Module) -> list[str]:
    """The names in `__all__`: a list of them, or what a package imports for type checkers, for `vitruvius._lazy`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return [alias.name for item in node.body if isinstance(item, ast.ImportFrom) for alias in item.names]
        if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0]):
            return [item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)]
    return []


def measure(source: Path = SOURCE) -> dict[str, Size]:
    """The size of every package, by name."""
    sizes: dict[str, Size] = {}
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source)
        package = inside.parts[0] if len(inside.parts) > 1 else "."
        sizes.setdefault(package, Size()).add(path, source)
    return sizes


def total(sizes: dict[str, Size]) -> Size:
    """All packages together."""
    every = list(sizes.values())
    return Size(
        files=sum(size.files for size in every),
        lines=sum(size.lines for size in every),
        private=sum(size.private for size in every),
        exported=sum(size.exported for size in every),
    )


def lines_of_tests(folder: Path = TESTS) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def private_imports(source: Path = SOURCE) -> list[str]:
    """Imports of a private module of another package, as `file:line module`."""
    found = []
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source)
        own = inside.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in imported_modules(node):
                parts = name.split(".")
                if parts[0] == "vitruvius" and len(parts) > 2 and parts[1] != own and is_private(parts[2:]):
                    found.append(f"{inside}:{node.lineno} {name}")
    return found


def imported_modules(node: ast.AST) -> Iterator[str]:
    """The dotted names that an import statement may bind as modules: `from a import b` names both `a` and `a.b`."""
    if isinstance(node, ast.Import):
        for name in node.names:
            yield name.name
    elif isinstance(node, ast.ImportFrom) and node.module:
        if is_private(node.module.split(".")[2:]):
            yield node.module
        else:
            for name in node.names:
                yield f"{node.module}.{name.name}"


def is_private(parts: list[str]) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


WALKS = {
    "train": ["train", "digits/softmax", "train.epochs=1", "train.warmup_epochs=0", "out={run}"],
    "evaluate": ["evaluate", "{run}", "--threat", "autoattack:eps=4/255", "--images", "8", "--out", "{tmp}/judged"],
    "analyse": ["analyse", "{run}", "entropy", "--images", "8", "--out", "{tmp}/analysis"],
    "report": ["report", "{run}", "--out", "{tmp}/page.html"],
    "rewire": ["-c", "import timm, vitruvius; vitruvius.rewire(timm.create_model('vit_tiny_patch16_224'), 'rpc')"],
    "apgd stage": [
        "evaluate",
        "{run}",
        "--threat",
        "autoattack:eps=4/255,version=custom,attacks=[apgd-ce]",
        "--images",
        "8",
    ],
}
TRACER = """
import json, sys, threading, atexit
seen, met = set(), set()
def importing(frame):
    while frame := frame.f_back:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
    return False
def look(frame, event, _):
    code = frame.f_code
    if event == "call" and code not in seen and "/vitruvius/" in code.co_filename and code.co_name != "<module>":
        if not importing(frame):
            seen.add(code)
            met.add((code.co_filename.rpartition("/vitruvius/")[2], code.co_qualname))
sys.setprofile(look); threading.setprofile(look)
atexit.register(lambda: open({file!r}, "w").write(json.dumps(sorted(met))))
"""


def walk(words: list[str], folder: Path) -> set[tuple[str, str]]:
    """File and name of every function of the package that a command calls, apart from what importing runs."""
    answer = folder / "walk.json"
    (folder / "sitecustomize.py").write_text(TRACER.format(file=str(answer)), encoding="utf-8")
    words = [word.format(run=folder / "run", tmp=folder) for word in words]
    command = [sys.executable, *(words if words[0] == "-c" else ["-m", "vitruvius", *words])]
    path = os.pathsep.join([str(folder), str(SOURCE.parent)])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return {(file, name) for file, name in json.loads(answer.read_text(encoding="utf-8"))}


def print_walks(chosen: list[str], *, names: bool) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        for name, words in WALKS.items():
            needs_run = any("{run}" in word for word in words)
            if (name in chosen or not chosen) or (name == "train" and not Path(tmp, "run").exists() and needs_run):
                called = walk(words, Path(tmp))
                files = sorted({file for file, _ in called})
                if name == "apgd stage":
                    files = [file for file in files if file.startswith("attacks/")]
                    called = {(file, function) for file, function in called if file in files}
                print(f"{name:12} {len(files):4} files {len(called):5} functions", flush=True)
                if names:
                    print("\n".join(f"    {file}" for file in files))


def print_sizes() -> None:
    sizes = measure()
    print(f"{'package':18}{'lines':>8}{'files':>7}{'private':>9}{'exported':>10}")
    for name, size in [*sorted(sizes.items(), key=lambda pair: -pair[1].lines), ("all", total(sizes))]:
        print(f"{name:18}{size.lines:8,}{size.files:7}{size.private:9}{size.exported:10}")
    print(f"{'tests':18}{lines_of_tests():8,}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", nargs="*", metavar="NAME", help=", ".join(WALKS))
    parser.add_argument("--names", action="store_true", help="list the files of each walk")
    options = parser.parse_args()
    with contextlib.suppress(BrokenPipeError):
        print_sizes() if options.walks is None else print_walks(options.walks, names=options.names)
