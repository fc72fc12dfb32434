"""The package itself: a demo, what there is, and how fast it is here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

from vitruvius._errors import ConfigError

BENCHES = {
    "rpc": ("attention", "--only", "rpc,tokens,iterations,heads,precision"),
    "mask": ("attention", "--only", "mask,sparsity"),
    "mask-cpu": ("sparse_cpu",),
    "memory": ("rpc_memory",),
    "train": ("attention_models",),
    "autoattack": ("autoattack_cpu",),
    "cpu": ("cpu",),
}


def demo(*, out: Path = Path("runs/demo")) -> None:
    """Look into a robust ViT on real pictures, clean and attacked; then train, attack and corrupt on digits; two pages.

    Args:
        out: folder for runs and pages (default: runs/demo).
    """
    from vitruvius._files import check_out

    check_out(out)
    from vitruvius.cli.look import look
    from vitruvius.demo import ROBUST
    from vitruvius.demo import demo as run_demo

    look(ROBUST, images=4, threat="pgd:eps=8/255,steps=20", out=out / "look.html")
    print(run_demo(out))


def list_pieces(kind: str | None = None, section: str | None = None, /) -> None:
    """What there is: names, settings, one line each.

    Args:
        kind: attentions (or attention), attacks, inits, keys, models, recipes, tasks, … (default: what kinds there
            are); all: every piece.
        section: of `list keys`: data, train, model, task, … (default: all).
    """
    from vitruvius.listing import listing

    print(listing(kind, section))


def schema(*, pieces: bool = False) -> None:
    """Print the JSON schema of a recipe, with which editors complete and check recipes.

    Args:
        pieces: with names and settings of all tasks, inits, attentions and trackers, which takes seconds.
    """
    from vitruvius.recipe_keys import recipe_schema

    print(json.dumps(recipe_schema(pieces=pieces), indent=2))


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that completes verbs and flags in your shell.

    Args:
        shell: which one.
    """
    from vitruvius.cli import make_app

    print(make_app().generate_completion(shell=shell))


def bench(what: Literal["rpc", "mask", "mask-cpu", "memory", "train", "autoattack", "cpu"], /) -> None:
    """Measure speed on this machine: robust and masked attention, attacks, training, beside what they compete with.

    Args:
        what: is measured.
    """
    checkout = Path(__file__).parents[3]
    if not (checkout / "benchmarks" / "__main__.py").exists():
        missing = "the folder benchmarks/ of the source, which an installed package does not carry"
        raise ConfigError(f"vitruvius bench runs {missing}. Run it in a checkout: pip install -e .")
    done = subprocess.run([sys.executable, "-m", "benchmarks", *BENCHES[what]], cwd=checkout, check=False)
    if done.returncode:
        raise ConfigError(f"the benchmark {what!r} ended with {done.returncode}; its own words are above.")
