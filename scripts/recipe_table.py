"""Write docs/recipes.md from the heads of the recipes: `python scripts/recipe_table.py`."""

from __future__ import annotations

import re
from pathlib import Path

from vitruvius.listing import recipes_folder

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes.md"
FOLDERS = {
    "digits": "The embedded digits: minutes on a laptop",
    "kpca": "Kernel PCA: robust principal components, scaled attention, reconstruction",
    "light": "The light recipe: adversarial training of transformers and others",
    "speedruns": "Speedruns: how fast one GPU gets there",
    "structured": "Structured initialisation",
    "vitcod": "ViTCoD: low rank, then masks",
}
OPENING = """# Recipes

The training runs published in the papers, as files. `vitruvius list recipes` lists them, `vitruvius train NAME`
runs one, `key=value` overrides a key, and under `torchrun` the same file runs on many devices. This page is generated
from the comments at the head of each recipe by `python scripts/recipe_table.py`.

Each recipe is compared, key by key, with the command that it reproduces (`tests/originals`); what differs is declared
in its head and shown in the last column, ours before ≠. ImageNet is read from a folder throughout. The adversarial
recipes hold out a small part of the training images and choose the best weights on it under a multi-step attack. The
published runs chose them on the test images under the training attack, which is optimistic
([deviations](deviations.md)). Batch norms gather their statistics from the attacked images only; the published runs
also used the clean ones, which costs one more pass (`task.log_clean=true task.statistics="[clean, adversarial]"`).
DeiT's loop keeps its rate for the first two epochs, ours for the first. No number below has been measured here unless
its recipe says so.

Left out: training runs of the papers whose code was never released (kernel PCA on WikiText-103, SST, IMDB, ADE20K and
with FAN). DeiT's distilled models and iNaturalist, which the programs know and no published command trains, have no
recipe.
"""
SWEEPS = """
## Sweeps of the light recipe

`vitruvius sweep recipes/light/sweeps/NAME.yaml` trains a recipe under every combination of a grid.

| sweep | what it asks | recipe | varies |
|---|---|---|---|
"""


def head_of(file: Path) -> list[str]:
    """The comment lines at the top, without their marks."""
    lines = file.read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return [line[1:] for line in lines[:end]]


WORDS = re.compile(r"\b(Differs|Data|Expected): ")


def told(head: list[str], word: str) -> list[str]:
    """The text after each `word:` in a head, up to the next such word."""
    text = " ".join(line.strip() for line in head if not line.startswith("   "))
    parts = WORDS.split(text)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [body.strip().replace("|", "\\|") for found, body in pairs if found == word]


def row(name: str, file: Path) -> str:
    head = head_of(file)
    commands = "<br>".join(f"`{line.strip()}`" for line in head if line.startswith("   "))
    data = " ".join(told(head, "Data")) or "the embedded digits"
    expected = " ".join(told(head, "Expected")) or "see the recipe"
    differs = "<br>".join(told(head, "Differs"))
    link = f"[{name}](../recipes/{name}.yaml)"
    return f"| {link} | {head[0].strip()} | {data} | {expected} | {commands} | {differs} |"


def sweep_row(file: Path) -> str:
    text = file.read_text(encoding="utf-8").splitlines()
    recipe = next(line.partition(": ")[2] for line in text if line.startswith("recipe: "))
    varied = [line.strip() for line in text if line.startswith("  ")]
    link = f"[{file.stem}](../recipes/light/sweeps/{file.name})"
    return f"| {link} | {head_of(file)[0].strip()} | {recipe} | {'; '.join(varied)} |"


def page() -> str:
    """The whole page."""
    folder = recipes_folder()
    parts = [OPENING]
    for folder_name in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        rows = [row(f"{folder_name}/{file.stem}", file) for file in sorted((folder / folder_name).glob("*.yaml"))]
        title = (
            f"\n## {FOLDERS.get(folder_name, folder_name)}\n\n"
            "| recipe | what | data | expected | command | differs from the original in |\n|---|---|---|---|---|---|\n"
        )
        parts.append(title + "\n".join(rows) + "\n")
    parts.append(SWEEPS + "\n".join(sweep_row(file) for file in sorted((folder / "light" / "sweeps").glob("*.yaml"))))
    return "".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
