"""Every benchmark of this folder: `python -m benchmarks` lists them, `python -m benchmarks NAME [options]` runs one."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    known = {path.stem: path for path in sorted(HERE.glob("*.py")) if not path.stem.startswith("_")}
    if len(sys.argv) < 2:
        for name, path in known.items():
            first_line = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
            print(f"{name:12s} {first_line}")
        return
    name = sys.argv.pop(1)
    if name not in known:
        raise SystemExit(f"no benchmark named {name!r}. Known: {', '.join(known)}.")
    sys.path.insert(0, str(HERE))
    runpy.run_path(str(known[name]), run_name="__main__")


if __name__ == "__main__":
    main()
