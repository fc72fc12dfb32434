"""Count how many of timm's models each socket reaches, and write docs/families.md.

    python scripts/census.py --jobs 4            (about twenty minutes of one core, no weights, no network)

Every model is built on the meta device and surveyed there, so nothing is computed and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from torch import nn

from vitruvius._errors import SurgeryError
from vitruvius.surgery import survey
from vitruvius.surgery.base import socket_of, sockets

ALIKE = re.compile(r"Att(n|ention)|XCA|ParallelScalingBlock")
GATES = {"SplitAttn", "SelectiveKernelAttn"}  # weigh channels by pooled features: no queries, no keys
PAGE = Path(__file__).parent.parent / "docs" / "families.md"


@dataclass(frozen=True)
class Found:
    """One transformer-like model: the families of its sites, and its attention classes without a socket."""

    model: str
    families: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    refusal: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="*", help="a glob over timm's model names; the page is written for * only")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    names = timm.list_models(arguments.models)
    found = []
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for i, one in enumerate(pool.imap(look_at, names, chunksize=4)):
            print(f"\r{i + 1}/{len(names)} {names[i]:60}", end="", file=sys.stderr, flush=True)
            if one is not None:
                found.append(one)
    print(file=sys.stderr)
    print(summary(found))
    for one in found:
        if one.refusal:
            print(f"no survey of {one.model}: {one.refusal}")
    if arguments.models == "*":
        PAGE.write_text(page(found), encoding="utf-8")


def look_at(name: str) -> Found | None:
    """Build one model on the meta device and survey it; nothing if it is not transformer-like."""
    warnings.filterwarnings("ignore")
    with torch.device("meta"):
        model = timm.create_model(name)
    kinds = attention_classes(model)
    if not kinds:
        return None
    missing = frozenset(
        f"{kind.__module__}.{kind.__qualname__}" for kind, has_socket in kinds.items() if not has_socket
    )
    if len(missing) == len(kinds):
        return Found(name, missing=missing)
    try:
        return Found(name, frozenset(site.family for site in survey(model).values()), missing)
    except SurgeryError as error:
        return Found(name, missing=missing, refusal=str(error))


def attention_classes(model: nn.Module) -> dict[type[nn.Module], bool]:
    """Classes named like attention whose modules hold no other such module inside, and whether they have a socket."""
    alike = {n: m for n, m in model.named_modules() if ALIKE.search(type(m).__name__) and type(m).__name__ not in GATES}
    innermost = [m for n, m in alike.items() if not any(other.startswith(f"{n}.") for other in alike)]
    return {type(m): socket_of(m) is not None for m in innermost}


def summary(found: list[Found]) -> str:
    total = len(found)
    reached = sum(bool(one.families) for one in found)
    complete = sum(bool(one.families) and not one.missing for one in found)
    return (
        f"Of timm {timm.__version__}'s {total} transformer-like models, every attention module can be rewired "
        f"in {complete} ({100 * complete / total:.0f} %), at least one in {reached} ({100 * reached / total:.0f} %)."
    )


def page(found: list[Found]) -> str:
    rows = [
        f"| {family} | `{upstream}` | {doc} | {len(models)} | {models[0] if models else ''} |"
        for family, upstream, doc in sockets()
        if upstream.startswith("timm.")
        for models in [[one.model for one in found if family in one.families]]
    ]
    missing = Counter(name for one in found for name in sorted(one.missing))
    without = [f"| `{name}` | {n} |" for name, n in sorted(missing.items(), key=lambda item: (-item[1], item[0]))]
    return TEMPLATE.format(summary=summary(found), rows="\n".join(rows), without="\n".join(without))


TEMPLATE = """# Families

<!-- Written by scripts/census.py; do not edit by hand. -->

{summary}

*Transformer-like* is a model with at least one module whose class name speaks of attention (`Attn`, `Attention`, `XCA`,
or `ParallelScalingBlock`, whose attention has no module of its own), leaving out two gates of convolutional networks
that have neither queries nor keys (`SplitAttn`, `SelectiveKernelAttn`). Of nested modules the innermost counts. Models
are architectures (`timm.list_models()`), not pretrained weights. A model counts only if a survey of it, run on the meta
device, finds its sites.

| family | upstream class | | models | for example |
|---|---|---|---:|---|
{rows}

A model may have sites of several families. With a softmax core every family reproduces upstream's logits; the tests
check it with all weights, biases and buffers randomised.

## Without a socket

Attention modules that cannot be rewired, and in how many models they occur:

| upstream class | models |
|---|---:|
{without}
"""

if __name__ == "__main__":
    main()
