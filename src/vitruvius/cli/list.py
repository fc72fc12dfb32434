"""What there is: names, settings, one line each."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind", nargs="?", help="attentions, attacks, inits, models, recipes, sockets, studies, tasks, …"
    )


def run(options: argparse.Namespace) -> None:
    from vitruvius.listing import listing

    print(listing(options.kind))
