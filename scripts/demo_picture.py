"""README's picture: the top of the demo's page, and its maps and viewer, side by side.

    vitruvius demo && python scripts/demo_picture.py runs/demo/report.html --out docs/figures/demo.png

Needs chromium; the page is shown as it is, at half its size.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

SIZE = (1200, 1580)  # of each half, in pixels of the page
GAP = 32
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--virtual-time-budget=5000"),
)
ONLY = "<style>.masthead, .contents, main > section:not(#maps):not(#viewer) {display: none}</style></head>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("page", type=Path, help="report.html of the demo")
    parser.add_argument("--out", type=Path, default=Path("docs/figures/demo.png"))
    options = parser.parse_args()
    text = options.page.read_text(encoding="utf-8")
    halves = [shoot(text), shoot(text.replace("</head>", ONLY, 1))]
    whole = Image.new("RGB", (2 * SIZE[0] + GAP, SIZE[1]), "#dfd8cc")
    whole.paste(halves[0], (0, 0))
    whole.paste(halves[1], (SIZE[0] + GAP, 0))
    small = whole.resize((whole.width // 2, whole.height // 2), Image.Resampling.LANCZOS)
    small.save(options.out, optimize=True)
    print(f"{options.out}: {small.width} × {small.height}, {options.out.stat().st_size / 1000:.0f} kB")


def shoot(text: str) -> Image.Image:
    """The page in a window of the size of one half."""
    browser = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit("no chromium installed.")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(text, encoding="utf-8")
        picture = Path(folder, "picture.png")
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        command = [browser, *FLAGS, size, f"--user-data-dir={folder}/profile", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        return Image.open(picture).convert("RGB")


if __name__ == "__main__":
    main()
