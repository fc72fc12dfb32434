"""Train, attack, corrupt and look inside on the embedded digits; ends with a page."""

from __future__ import annotations

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/demo", help="folder for runs and page (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    from vitruvius.demo import demo

    print(demo(Path(options.out)))
