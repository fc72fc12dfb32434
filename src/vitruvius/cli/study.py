"""An experiment over several runs: a table and a figure; `vitruvius list studies` names them."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="STUDY", help="attack-effectiveness, attack-convergence, eps-sweep")
    parser.add_argument(
        "words", nargs="+", metavar="RUN|MODEL|key=value", help="subjects, and settings such as steps=20"
    )
    parser.add_argument("--out", help="folder for table and figure (default: runs/STUDY)")


def run(options: argparse.Namespace) -> None:
    from vitruvius._yaml import parse_value
    from vitruvius.studies import study

    targets = [word for word in options.words if "=" not in word]
    settings = {key: parse_value(value) for key, _, value in (w.partition("=") for w in options.words if "=" in w)}
    print(study(options.name, targets, settings, options.out or f"runs/{options.name}"))
