"""Measure speed on this machine: robust and masked attention, attacks, training, beside what they compete with."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

BENCHES = {
    "rpc": ("attention", "--only", "rpc,tokens,iterations,heads,precision"),
    "mask": ("attention", "--only", "mask,sparsity"),
    "mask-cpu": ("sparse_cpu",),
    "memory": ("rpc_memory",),
    "train": ("attention_models",),
    "autoattack": ("autoattack",),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", choices=BENCHES, help=", ".join(BENCHES))


def run(options: argparse.Namespace) -> None:
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
