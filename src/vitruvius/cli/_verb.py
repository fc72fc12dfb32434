"""A verb: its name, the arguments it takes, and what runs it; the docstring of the latter is its help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One word of the command line. A file of this room lists its verbs in `VERBS`."""

    name: str
    arguments: Callable[[argparse.ArgumentParser], None]  # adds them to the verb's parser
    run: Callable[[argparse.Namespace], None]
    aliases: tuple[str, ...] = ()


def add_target(parser: argparse.ArgumentParser) -> None:
    """What a verb works on, and settings of it; the same words for every verb that takes a model."""
    parser.add_argument("target", metavar="RUN|MODEL", help="a run folder or a model name")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.root=/imagenet")
    add_trust(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """The flag of every verb that opens a run: whether the Python modules that it names are imported."""
    parser.add_argument(
        "--trust-plugins", action="store_true", help="import the modules a run names under plugins:, which runs code"
    )


def trust_plugins(options: argparse.Namespace, *targets: str) -> None:
    """Import the plugins of these runs, if the flag says so; what opens them then finds them imported."""
    if not options.trust_plugins:
        return
    from vitruvius.targets import load_target_plugins

    for target in targets:
        load_target_plugins(target, trust_plugins=True)


def add_images(parser: argparse.ArgumentParser, doing: str, *, default: str = "all") -> None:
    """The one flag for how many images a verb uses."""
    parser.add_argument("--images", type=int, metavar="N", help=f"{doing} N images (default: {default})")


def warn_deprecated(old: str, new: str) -> None:
    """One line on stderr for a spelling that will go."""
    print(f"vitruvius: note: {old} is deprecated; write {new}.", file=sys.stderr)
