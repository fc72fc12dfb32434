"""A model's attention rules with masks in them, and the same model under those rules.

Masks, and auto-encoders, come before the kernel of a site, and before what chooses among the keys that are left.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vitruvius._registry import read_spec
from vitruvius.attention import Kernel, attentions
from vitruvius.compression.files import load_masks
from vitruvius.models import PixelModel, load_weights
from vitruvius.models.wiring import wire
from vitruvius.surgery import restore
from vitruvius.surgery.base import inner

Rules = list[dict[str, Any]]


def masked_rules(rules: Sequence[Mapping[str, Any]], masks: str | Path, rank: int | None = None) -> Rules:
    """The attention `rules` of a recipe with the masks of a file; sites without a rule get one of their own.

    `rank` also squeezes queries and keys through that many heads (default: as they are).
    """
    stages: list[dict[str, Any]] = [{"use": "mask", "file": str(masks)}]
    if rank is not None:
        stages.insert(0, {"use": "low_rank", "rank": rank})
    masked = [{"where": rule["where"], "parts": _with_stages(rule["parts"], stages)} for rule in rules]
    left = [name for name in load_masks(masks).keep if not any(fnmatchcase(name, rule["where"]) for rule in rules)]
    return [*masked, *({"where": name, "parts": stages} for name in left)]


def pruned(model: PixelModel, rules: Rules) -> PixelModel:
    """A copy of `model` with the attention of `rules`, which name its own parts too, and its weights."""
    copied = copy.deepcopy(model)
    weights = {key: value.clone() for key, value in inner(model).state_dict().items()}
    restore(copied)
    wire(copied, rules)
    fitting = inner(copied).state_dict()
    load_weights(copied, {key: value for key, value in weights.items() if key in fitting and ".mask." not in key})
    return copied.eval()


def _with_stages(parts: Sequence[Any], stages: Sequence[dict[str, Any]]) -> list[Any]:
    names = [read_spec(part, where="attention")[0] for part in parts]
    added = [stage for stage in stages if stage["use"] == "mask" or stage["use"] not in names]
    kept = [(part, attentions[name]) for part, name in zip(parts, names, strict=True) if name != "mask"]
    place = next((i for i, (_, piece) in enumerate(kept) if _comes_last(piece)), len(kept))
    others = [part for part, _ in kept]
    return [*others[:place], *added, *others[place:]]


def _comes_last(piece: object) -> bool:
    return isinstance(piece, type) and (issubclass(piece, Kernel) or "choice of keys" in getattr(piece, "writes", ()))
