"""Where maps and masks belong: their sites, and whether they are maps at all.       H heads, N queries, M keys"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitruvius._errors import CheckpointError, ConfigError, DataError, suggest
from vitruvius.heads import Site

TOLERANCE = 1e-3  # of a row's sum; bfloat16 maps are averages of many


def check_maps(maps: Mapping[str, Tensor], sites: Mapping[str, Site]) -> dict[str, Site]:
    """The sites of the maps, if every map is a map and every one belongs to a site."""
    if not maps:
        raise DataError("there are no maps to make masks from.")
    for name, map_ in maps.items():
        if name not in sites:
            raise ConfigError(
                f"maps of another model: there is no site {name!r}{suggest(name, sites)} "
                f"The model has {len(sites)} sites, the maps are of {len(maps)}."
            )
        check_map(name, map_, sites[name])
    return {name: sites[name] for name in maps}


def check_map(name: str, map_: Tensor, site: Site) -> None:
    """Shape, sign and sums of one map."""
    shape = (site.num_heads, site.num_queries, site.num_keys)
    if tuple(map_.shape) != shape:
        raise ConfigError(
            f"map of {name!r} has shape {tuple(map_.shape)}, the site needs {shape}: heads, queries, keys. "
            "Is it of another model, or of another image size?"
        )
    sums = map_.double().sum(-1)
    wrong = ~((sums - 1).abs() <= TOLERANCE) | (map_ < 0).any(-1)  # also where not finite
    if wrong.any():
        head, query = wrong.nonzero()[0].tolist()
        raise DataError(
            f"{int(wrong.sum())} rows of the map of {name!r} are not attention: row {query} of head {head} sums to "
            f"{float(sums[head, query]):.4g}, expected non-negative numbers that sum to 1. Average maps again."
        )


def guess_sites(tensors: Mapping[str, Tensor]) -> dict[str, Site]:
    """Sites from shapes alone: one class token if that leaves a square of patches, else what is square.

    `tensors` are maps or masks (H, N, M), by site.
    """
    return {name: guess_site(name, tensors[name]) for name in sorted(tensors, key=_natural)}


def guess_site(name: str, tensor: Tensor) -> Site:
    if tensor.ndim != 3:
        raise DataError(f"{name!r} has shape {tuple(tensor.shape)}, expected (heads, queries, keys).")
    heads, queries, keys = tensor.shape
    square = queries == keys
    prefix = next((p for p in (1, 0, 2) if square and math.isqrt(keys - p) ** 2 == keys - p), 0)
    side = math.isqrt(keys - prefix)
    return Site(
        name=name,
        family="unknown",
        attends="tokens" if square else "downsampled",
        num_heads=heads,
        num_queries=queries,
        num_keys=keys,
        key_dim=0,
        value_dim=0,
        dim=0,
        num_prefix_tokens=prefix,
        grid=(side, side) if square and side * side == keys - prefix else None,
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """So that blocks.2 comes before blocks.10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in name.split(".")]


def sites_to_json(sites: Mapping[str, Site]) -> str:
    return json.dumps([dataclasses.asdict(site) for site in sites.values()])


def sites_from_json(text: str | None, tensors: Mapping[str, Tensor], source: object) -> dict[str, Site]:
    """The sites a file tells of, or guessed ones where it tells nothing."""
    if text is None:
        return guess_sites(tensors)
    try:
        rows: list[dict[str, Any]] = json.loads(text)
        sites = [Site(**{**row, "grid": tuple(row["grid"]) if row["grid"] else None}) for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{source} describes its sites in a form that cannot be read ({error}).") from error
    return {site.name: site for site in sites}


def in_order(tensors: Mapping[str, Tensor], sites: Mapping[str, Site]) -> dict[str, Tensor]:
    """The tensors in the order of the model; a file keeps none."""
    places = {name: place for place, name in enumerate(sites)}
    return dict(sorted(tensors.items(), key=lambda item: places.get(item[0], len(places))))
