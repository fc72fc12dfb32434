"""The package itself: a demo, what there is, and how fast it is here."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from vitruvius.cli._verb import Verb

BENCHES = {
    "rpc": ("attention", "--only", "rpc,tokens,iterations,heads,precision"),
    "mask": ("attention", "--only", "mask,sparsity"),
    "mask-cpu": ("sparse_cpu",),
    "memory": ("rpc_memory",),
    "train": ("attention_models",),
    "autoattack": ("autoattack",),
}


def demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder to `parser`, that of the verb."""
    parser.add_argument("--out", default="runs/demo", help="folder for runs and page (default: %(default)s)")


def run_demo(options: argparse.Namespace) -> None:
    """Train, attack, corrupt and look inside on the embedded digits; ends with a page.

    `options` hold what `demo_arguments` adds.
    """
    from vitruvius.demo import demo

    print(demo(Path(options.out)))


def list_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kind and, for keys, the section to `parser`, that of the verb."""
    parser.add_argument(
        "kind", nargs="?", help="attentions (or attention), attacks, inits, keys, models, recipes, sockets, tasks, …"
    )
    parser.add_argument("section", nargs="?", help="of `list keys`: data, train, model, task, … (default: all)")


def run_list(options: argparse.Namespace) -> None:
    """What there is: names, settings, one line each.

    `options` hold what `list_arguments` adds.
    """
    from vitruvius.listing import listing

    print(listing(options.kind, options.section))


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell to `parser`, that of the verb."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="%(choices)s")


def run_completion(options: argparse.Namespace) -> None:
    """Print a script that completes verbs, flags and names in your shell.

    `options` hold what `completion_arguments` adds.
    """
    from vitruvius._registry import require
    from vitruvius.cli import make_parser

    shtab: Any = require("shtab", "completion")
    print(shtab.complete(make_parser(), shell=options.shell))


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is measured to `parser`, that of the verb."""
    parser.add_argument("what", metavar="WHAT", choices=tuple(BENCHES), help=", ".join(BENCHES))


def run_bench(options: argparse.Namespace) -> None:
    """Measure speed on this machine: robust and masked attention, attacks, training, beside what they compete with.

    `options` hold what `bench_arguments` adds.
    """
    from vitruvius._errors import ConfigError

    checkout = Path(__file__).parents[3]
    if not (checkout / "benchmarks" / "__main__.py").exists():
        raise ConfigError(
            "vitruvius bench runs the folder benchmarks/ of the source, which an installed package does not carry. "
            "Run it in a checkout: pip install -e ."
        )
    command = [sys.executable, "-m", "benchmarks", *BENCHES[options.what]]
    done = subprocess.run(command, cwd=checkout, check=False)
    if done.returncode:
        raise ConfigError(f"the benchmark {options.what!r} ended with {done.returncode}; its own words are above.")


VERBS = (
    Verb(name="demo", arguments=demo_arguments, run=run_demo),
    Verb(name="list", arguments=list_arguments, run=run_list),
    Verb(name="completion", arguments=completion_arguments, run=run_completion),
    Verb(name="bench", arguments=bench_arguments, run=run_bench),
)
