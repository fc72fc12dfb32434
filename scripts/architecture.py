"""Draw docs/figures/architecture.svg: the layers of the package, and the way of a batch through them.

    python scripts/architecture.py

The layers are those that import-linter checks (pyproject.toml), the ways the two tables of docs/architecture.md.
"""

from __future__ import annotations

import re
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "figures" / "architecture.svg"
WIDTH, ROW, HEIGHT, GAP = 980, 48, 30, 10  # pixels: of the picture, of a layer, of a box, between boxes
COLOURS = ("#b5532a", "#2a5db5")  # of a training batch, of an attacked batch
STEP = re.compile(r"^\| (\d+) \| ([\w, ]+) \| ([^|]*) \|", re.MULTILINE)


def layers() -> list[list[str]]:
    """The packages of each layer, from above; modules that only the package itself uses lose their underscore."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (one for one in project["tool"]["importlinter"]["contracts"] if one["name"] == "layers")
    return [[name.strip().removeprefix("vitruvius.") for name in row.split("|")] for row in contract["layers"]]


def ways() -> list[list[tuple[int, str, str]]]:
    """Number, packages and files of every step, of a training batch and of an attacked one."""
    parts = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    found = [[(int(number), *rest) for number, *rest in STEP.findall(part)] for part in parts]
    return [way for way in found if way]


def picture() -> str:
    """The picture as SVG."""
    rows = layers()
    height = ROW * len(rows) + 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fffdf9"/>',
    ]
    centres: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        widths = [max(70.0, 8.0 * len(name) + 20) for name in row]
        scale = min(1.0, (WIDTH - 40 - GAP * (len(row) - 1)) / sum(widths))
        x, y = (WIDTH - scale * sum(widths) - GAP * (len(row) - 1)) / 2, ROW * number + 22
        for name, width in zip(row, widths, strict=True):
            lines += box(name, x, y, scale * width)
            centres[name] = (x, y)
            x += scale * width + GAP
    for way, colour in zip(ways(), COLOURS, strict=True):
        steps: dict[str, list[int]] = {}
        for step, names, _ in way:
            for name in names.split(", "):
                if name in centres:
                    steps.setdefault(name, []).append(step)
        for name, numbers in steps.items():
            lines += marks(numbers, *centres[name], colour)
    legend = zip(("a training batch", "an attacked batch"), COLOURS, strict=True)
    for place, (text, colour) in enumerate(legend):
        y = height - 14
        lines.append(f'<circle cx="{30 + 240 * place}" cy="{y - 4}" r="7" fill="{colour}"/>')
        lines.append(f'<text x="{44 + 240 * place}" y="{y}" font-size="13">the way of {text}</text>')
    return "\n".join([*lines, "</svg>\n"])


def box(name: str, x: float, y: float, width: float) -> list[str]:
    fill = "#f1e7d8" if not name.startswith("_") else "#eeeeee"
    size = min(14.0, 1.6 * width / max(1, len(name)))
    return [
        f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="4" fill="{fill}" stroke="#8a7a60"/>',
        f'<text x="{x + width / 2:.0f}" y="{y + 20}" text-anchor="middle" font-size="{size:.1f}">{escape(name)}</text>',
    ]


def marks(numbers: list[int], x: float, y: float, colour: str) -> list[str]:
    """The numbers of the steps in a package: of training batches on its upper edge, of attacked ones on its lower."""
    edge = y if colour == COLOURS[0] else y + HEIGHT
    found = []
    for place, number in enumerate(numbers):
        centre = x + 10 + 17 * place
        found.append(f'<circle cx="{centre:.0f}" cy="{edge}" r="8" fill="{colour}"/>')
        found.append(
            f'<text x="{centre:.0f}" y="{edge + 4}" text-anchor="middle" font-size="10" fill="white">{number}</text>'
        )
    return found


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
