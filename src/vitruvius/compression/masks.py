"""Average maps → masks: a rule with its own limit, or the limit that removes exactly the wanted share.

Single pairs go, or whole tiles: squares of queries and keys that a kernel computes or skips together, of tokens in an
order in which neighbours on the grid of patches follow each other, as `sparse_softmax` takes them.
L sites, H heads, N queries, M keys, R × C tiles; True = kept
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, DataError, suggest
from vitruvius._format import format_table, natural_key
from vitruvius._registry import Spec
from vitruvius.attention.sparse_softmax import tile_order
from vitruvius.compression.rules import Rule, rules
from vitruvius.heads import Site

TOLERANCE = 1e-3  # of a row's sum; bfloat16 maps are averages of many

Budget = Literal["global", "layer", "head"]


@dataclass(frozen=True, kw_only=True)
class Masks:
    """Patterns by site, and how they came about."""

    keep: dict[str, Tensor]  # site → bool (H, N, M)
    protected: dict[str, tuple[int, ...]]  # site → tokens whose rows and columns are kept
    sites: dict[str, Site]
    rule: str = ""
    limits: dict[str, float] = field(default_factory=dict)  # where a wanted sparsity put the limit of the rule

    @property
    def sparsity(self) -> Sparsity:
        """Shares removed, in all, by site and by head."""
        return count(self.keep, self.protected)


def make_masks(
    maps: Mapping[str, Tensor],
    rule: Rule | Spec | Mapping[str, Rule | Spec] = "information",
    *,
    sparsity: float | None = None,
    budget: Budget = "global",
    protect: Sequence[int] | None = None,
    sites: Mapping[str, Site] | None = None,
    tiles: int | None = None,
) -> Masks:
    """Masks of average maps. No query ever loses its best key.

    maps: (H, N, M) by site, as `average_maps` gives them.
    rule: which pairs go first: `"ratio:ratio=0.8"`, `{use: ratio, ratio: 0.8}`, or a Rule; or one per pattern of site
        names, `{"stages.0.*": "information:mass=0.46", "*": "information"}`; the first pattern that fits counts.
    sparsity: share of all pairs that goes, exactly (rounded), from the highest levels down; default: the rule's own
        limit.
    budget: what shares that limit: all sites together (global), every site (layer), or every head (head).
    protect: tokens whose rows and columns stay whole; default: class, distillation and register tokens.
    sites: those of the maps, as from `survey(model)`; default: guessed from the shapes.
    tiles: choose whole tiles of this many queries and keys, e.g. 16, by the mean level of their pairs, so that kernels
        can skip what is removed; every query keeps its best tile. An exact sparsity cuts through one tile of a group.
        Default: single pairs.
    """
    sites = check_maps(maps, guess_sites(maps) if sites is None else sites)
    of_pattern = _make_rules(rule, maps)
    if sparsity is not None and len(of_pattern) > 1:
        raise ConfigError(
            f"sparsity = {sparsity} moves the limit of one rule, and there are {len(of_pattern)}; give one rule, or "
            "leave sparsity out and let each rule keep its own limit."
        )
    of_site = {name: made for names, made in of_pattern.values() for name in names}
    maps = {name: map_ if of_site[name].uses_maps else torch.zeros_like(map_) for name, map_ in maps.items()}
    protected = {name: _protected(sites[name], protect) for name in maps}
    levels = {name: of_site[name].levels(map_.double().cpu(), sites[name]) for name, map_ in maps.items()}
    limit = {name: of_site[name].limit for name in maps}
    if tiles is None:
        within = {name: levels[name] < limit[name] for name in maps}
        forced = {name: _forced(levels[name], maps[name].cpu(), protected[name], sites[name]) for name in maps}
    else:
        levels, forced, within = _by_tiles(levels, limit, protected, sites, tiles)
    keep = {name: forced[name] | within[name] for name in maps}
    limits: dict[str, float] = {}
    if sparsity is not None:
        keep, limits = _search(levels, maps, forced, sparsity, budget)
    return Masks(keep=keep, protected=protected, sites=sites, rule=_describe(of_pattern), limits=limits)


def _by_tiles(
    levels: Mapping[str, Tensor],
    limits: Mapping[str, float],
    protected: Mapping[str, tuple[int, ...]],
    sites: Mapping[str, Site],
    size: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Levels, what must stay, and what the rule's own limit keeps, all the same for the pairs of a tile."""
    tilings = {name: Tiling.of(sites[name], protected[name], size) for name in levels}
    means = {name: tiling.means(levels[name]) for name, tiling in tilings.items()}
    ranks = {name: tilings[name].spread(places, -1.0) for name, places in rank(means).items()}
    forced = {name: tiling.spread(_best(-means[name]), True) for name, tiling in tilings.items()}
    within = {name: tiling.spread(means[name] < limits[name], True) for name, tiling in tilings.items()}
    return ranks, forced, within


def _make_rules(
    rule: Rule | Spec | Mapping[str, Rule | Spec], maps: Mapping[str, Tensor]
) -> dict[str, tuple[list[str], Rule]]:
    """Pattern → the sites it is for, and its rule; every site has one."""
    patterns = rule if isinstance(rule, Mapping) and "use" not in rule else {"*": rule}
    left = list(maps)
    of_pattern: dict[str, tuple[list[str], Rule]] = {}
    for pattern, spec in patterns.items():
        names = [name for name in left if fnmatchcase(name, pattern)]
        if not names:
            raise ConfigError(f"rule for {pattern!r} fits no site that is left; sites: {', '.join(maps)}.")
        of_pattern[pattern] = names, rules.make(spec, where="rule")
        left = [name for name in left if name not in names]
    if left:
        raise ConfigError(f"no rule for {', '.join(left)}; add one for the pattern '*'.")
    return of_pattern


def _describe(of_pattern: Mapping[str, tuple[list[str], Rule]]) -> str:
    if len(of_pattern) == 1:
        return repr(next(iter(of_pattern.values()))[1])
    return "; ".join(f"{pattern}={rule!r}" for pattern, (_, rule) in of_pattern.items())


def _protected(site: Site, asked: Sequence[int] | None) -> tuple[int, ...]:
    tokens = tuple(range(site.num_prefix_tokens)) if asked is None else tuple(asked)
    for token in tokens:
        if not 0 <= token < site.num_keys:
            raise ConfigError(f"protect names token {token}; {site.name!r} has tokens 0 … {site.num_keys - 1}.")
    return tokens


def _forced(levels: Tensor, map_: Tensor, tokens: tuple[int, ...], site: Site) -> Tensor:
    """What must stay: rows and columns of protected tokens, and the best key of every query, (H, N, M)."""
    forced = _best(torch.where(levels == levels.amin(-1, keepdim=True), map_.double(), -torch.inf))
    forced[..., list(tokens)] = True
    if site.num_queries == site.num_keys:
        forced[..., list(tokens), :] = True
    return forced


def _search(
    levels: Mapping[str, Tensor], maps: Mapping[str, Tensor], forced: Mapping[str, Tensor], share: float, budget: Budget
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Exactly the wanted share, in each group of the budget."""
    if not 0 <= share < 1:
        raise ConfigError(f"sparsity = {share}, expected a share of pairs from 0 to below 1.")
    keep = {name: force.clone() for name, force in forced.items()}
    limits = {}
    for group, slots in _groups(levels, budget).items():
        level, value, force = (  # the pairs of the group in one row
            torch.cat([table[name][index].flatten() for name, index in slots]) for table in (levels, maps, forced)
        )
        row, limits[group] = _cut(level, value.cpu(), force, share, group)
        sizes = [keep[name][index].numel() for name, index in slots]
        for (name, index), part in zip(slots, row.split(sizes), strict=True):
            keep[name][index] = part.view(keep[name][index].shape)
    return keep, limits


def _groups(levels: Mapping[str, Tensor], budget: Budget) -> dict[str, list[tuple[str, Any]]]:
    """What shares one limit: (site, heads) by the group's name."""
    if budget == "global":
        return {"all": [(name, slice(None)) for name in levels]}
    if budget == "layer":
        return {name: [(name, slice(None))] for name in levels}
    if budget == "head":
        heads = [(name, head) for name in levels for head in range(len(levels[name]))]
        return {f"{name} head {head}": [(name, head)] for name, head in heads}
    raise ConfigError(f"budget = {budget!r}, expected global, layer or head.")


def _cut(level: Tensor, value: Tensor, forced: Tensor, share: float, group: str) -> tuple[Tensor, float]:
    """Keep what is forced and then the lowest levels, ties by attention; and the first level that goes."""
    wanted = len(level) - round(share * len(level))
    if int(forced.sum()) > wanted:
        most = 1 - int(forced.sum()) / len(level)
        raise ConfigError(
            f"sparsity {share:.4g} cannot be reached in {group}: protected rows and columns and one key for every "
            f"query alone keep {int(forced.sum()):,} of {len(level):,} pairs. At most {most:.4f}, or protect less."
        )
    free = (~forced).nonzero().flatten()
    order = value[free].argsort(descending=True, stable=True)
    order = free[order[level[free][order].argsort(stable=True)]]
    room = wanted - int(forced.sum())
    keep = forced.clone()
    keep[order[:room]] = True
    return keep, float(level[order[room]]) if room < len(order) else float("inf")


class Share(NamedTuple):
    """Pairs and kept pairs, of all and of those between tokens that are not protected."""

    kept: int
    pairs: int
    kept_inside: int
    pairs_inside: int

    @property
    def sparsity(self) -> float:
        """Share of all pairs that is removed."""
        return 1 - self.kept / max(self.pairs, 1)

    @property
    def sparsity_inside(self) -> float:
        """The same without protected rows and columns."""
        return 1 - self.kept_inside / max(self.pairs_inside, 1)


@dataclass(frozen=True)
class Sparsity:
    """Shares of every head of every site."""

    heads: dict[str, list[Share]]

    @property
    def total(self) -> Share:
        return _total([share for heads in self.heads.values() for share in heads])

    def __str__(self) -> str:
        rows = []
        for name, heads in {**self.heads, "all": []}.items():
            share = _total(heads) if heads else self.total
            by_head = " ".join(f"{100 * head.sparsity:.1f}" for head in heads)
            rows.append([name, f"{100 * share.sparsity:.2f} %", f"{100 * share.sparsity_inside:.2f} %", by_head])
        return "\n".join(format_table(["site", "removed", "unprotected", "by head"], rows))


def count(keep: Mapping[str, Tensor], protected: Mapping[str, Sequence[int]] | None = None) -> Sparsity:
    """Count the pairs of every head of masks (H, N, M) by site; `protected` names tokens by site."""
    tokens = protected or {}
    return Sparsity({name: [_share(head, tokens.get(name, ())) for head in pattern] for name, pattern in keep.items()})


def _total(shares: Sequence[Share]) -> Share:
    return Share(*map(sum, zip(*shares, strict=True)))


def _share(pattern: Tensor, tokens: Sequence[int]) -> Share:
    """Of one head, (N, M)."""
    queries, keys = pattern.shape
    inside = torch.ones(keys, dtype=torch.bool)
    inside[list(tokens)] = False
    rows = inside if queries == keys else torch.ones(queries, dtype=torch.bool)
    core = pattern[rows][:, inside]
    return Share(kept=int(pattern.sum()), pairs=pattern.numel(), kept_inside=int(core.sum()), pairs_inside=core.numel())


@dataclass(frozen=True)
class Tiling:
    """Which tile every pair of a site is in."""

    rows: Tensor  # (N): the block of each query, -1: none
    columns: Tensor  # (M): the block of each key

    @classmethod
    def of(cls, site: Site, protected: Sequence[int], size: int) -> Tiling:
        """The tiles of a site, of `size` queries and keys; protected tokens are in none."""
        if size < 2:
            raise ConfigError(f"tiles = {size}, expected the number of queries and keys of a tile, such as 16.")
        keys = _blocks(tile_order(site.num_keys, site.grid, site.num_prefix_tokens, size), protected, size)
        square = site.num_queries == site.num_keys
        return cls(keys if square else _blocks(torch.arange(site.num_queries), (), size), keys)

    def means(self, levels: Tensor) -> Tensor:
        """(H, R, C) mean levels of tiles, of pairs' `levels` (H, N, M); −∞ for a tile with a pair that always stays."""
        into, out_of = (  # (R, N) and (C, M): which tokens are in which block
            (blocks == torch.arange(int(blocks.max()) + 1)[:, None]).to(levels) for blocks in (self.rows, self.columns)
        )
        stays = levels == -torch.inf
        means = into @ levels.masked_fill(stays, 0.0) @ out_of.T / (into.sum(1)[:, None] * out_of.sum(1))
        return means.masked_fill(into @ stays.to(levels) @ out_of.T > 0, -torch.inf)

    def spread(self, tiles: Tensor, elsewhere: float) -> Tensor:
        """(H, N, M): the number of its tile for every pair; `elsewhere` for pairs in none. `tiles` is (H, R, C)."""
        spread = tiles[:, self.rows.clamp(min=0)][:, :, self.columns.clamp(min=0)]
        inside = (self.rows >= 0)[:, None] & (self.columns >= 0)
        return torch.where(inside, spread, elsewhere)


def rank(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values by site → their places among all of them, from 0 for the lowest; ties in order of sites and places.

    No two share a place, so an exact number of pairs cuts through one tile at most.
    """
    order = torch.cat([value.flatten() for value in values.values()]).argsort(stable=True)
    places = torch.empty(len(order), dtype=torch.float64).scatter_(0, order, torch.arange(len(order)).double())
    parts = places.split([value.numel() for value in values.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(values.items(), parts, strict=True)}


def _best(values: Tensor) -> Tensor:
    """Bool, True at the highest of each row, so that no query is left without keys."""
    return torch.zeros(values.shape, dtype=torch.bool).scatter_(-1, values.argmax(-1, keepdim=True), True)


def _blocks(order: Tensor, protected: Sequence[int], size: int) -> Tensor:
    """(N): the block of each token when those that are not protected are taken in this order, `size` at a time."""
    out = torch.isin(order, torch.tensor(list(protected), dtype=order.dtype))
    blocks = torch.full((len(order),), -1)
    taken = order[~out]
    blocks[taken] = torch.arange(len(taken)) // size
    return blocks


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
    """Sites from shapes (H, N, M) alone: one class token if that leaves a square of patches, else what is square."""
    return {name: guess_site(name, tensors[name]) for name in sorted(tensors, key=natural_key)}


def guess_site(name: str, tensor: Tensor) -> Site:
    if tensor.ndim != 3:
        raise DataError(f"{name!r} has shape {tuple(tensor.shape)}, expected (heads, queries, keys).")
    heads, queries, keys = tensor.shape
    square = queries == keys
    prefix = next((p for p in (1, 0, 2) if square and math.isqrt(keys - p) ** 2 == keys - p), 0)
    side = math.isqrt(keys - prefix)
    grid = (side, side) if square and side * side == keys - prefix else None
    return Site(
        name=name, family="unknown", attends="tokens" if square else "downsampled", num_heads=heads,
        num_queries=queries, num_keys=keys, key_dim=0, value_dim=0, dim=0, num_prefix_tokens=prefix, grid=grid,
    )  # fmt: skip
