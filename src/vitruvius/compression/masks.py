"""Average maps → masks: a rule with its own limit, or the limit that removes exactly the wanted share.

L sites, H heads, N queries, M keys; True = kept
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius._registry import Spec
from vitruvius.compression.rules import Rule, rules
from vitruvius.compression.sites import check_maps, guess_sites
from vitruvius.compression.sparsity import Sparsity, count
from vitruvius.compression.tiles import Tiling, best_tiles, rank_tiles
from vitruvius.heads import Site

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
    if tiles is None:
        within = {name: levels[name] < of_site[name].limit for name in maps}
        forced = {name: _forced(levels[name], maps[name].cpu(), protected[name], sites[name]) for name in maps}
    else:
        limit = {name: of_site[name].limit for name in maps}
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
    ranks = {name: tilings[name].spread(rank, -1.0) for name, rank in rank_tiles(means).items()}
    forced = {name: tiling.spread(best_tiles(means[name]), True) for name, tiling in tilings.items()}
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
    best = torch.where(levels == levels.amin(-1, keepdim=True), map_.double(), -torch.inf).argmax(-1, keepdim=True)
    forced = torch.zeros(levels.shape, dtype=torch.bool).scatter_(-1, best, True)
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
