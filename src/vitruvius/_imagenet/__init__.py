"""The 1,000 ImageNet classes by WordNet id, in the order of the logits, and the 200-class subsets of A, O and R."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

NUM_CLASSES = 1000


@cache
def imagenet_classes(subset: str = "") -> tuple[str, ...]:
    """WordNet ids in order; `subset` is a, o or r, or nothing for all."""
    text = files(__package__).joinpath("classes.txt").read_text(encoding="utf-8")
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return tuple(f"n{number}" for number, *marks in rows if not subset or subset in "".join(marks))


def imagenet_labels(subset: str = "") -> dict[str, int]:
    """WordNet id → place among these classes."""
    return {wnid: place for place, wnid in enumerate(imagenet_classes(subset))}


@cache
def subset_columns(subset: str) -> tuple[int, ...]:
    """Which of the 1,000 logits belong to a subset."""
    every = imagenet_labels()
    return tuple(every[wnid] for wnid in imagenet_classes(subset))
