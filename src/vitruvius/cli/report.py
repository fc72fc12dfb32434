"""One self-contained page about one or several runs."""

from __future__ import annotations

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", default="report.html", help="the page (default: %(default)s)")
    parser.add_argument("--title", help="its title")


def run(options: argparse.Namespace) -> None:
    from vitruvius.report import write_page

    title = {"title": options.title} if options.title else {}
    print(write_page([Path(run) for run in options.runs], Path(options.out), **title))
