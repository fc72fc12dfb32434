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
from vitruvius.compression._site_files import check_maps, guess_sites
from vitruvius.compression.rules import Rule, rules
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
    chosen = _make_rules(rule, maps)
    if sparsity is not None:
        _refuse_several(chosen, sparsity)
    protected = {name: _protected(sites[name], protect) for name in maps}
    of_site = _by_site(chosen)
    levels = {name: of_site[name].levels(map_.double().cpu(), sites[name]) for name, map_ in maps.items()}
    own = {name: levels[name] < of_site[name].limit for name in maps}
    if tiles is None:
        forced = {name: _forced(levels[name], maps[name].cpu(), protected[name], sites[name]) for name in maps}
    else:
        limit = {name: of_site[name].limit for name in maps}
        levels, forced, own = _by_tiles(levels, limit, protected, sites, tiles)
    if sparsity is None:
        keep, limits = _within_limits(forced, own)
    else:
        keep, limits = _search(levels, maps, forced, sparsity, budget)
    return Masks(keep=keep, protected=protected, sites=sites, rule=_describe(chosen), limits=limits)


def _within_limits(
    forced: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What is forced, and what lies within the rule's own limit; there is no other."""
    return {name: forced[name] | own[name] for name in own}, {}


def _by_site(chosen: Mapping[str, tuple[list[str], Rule]]) -> dict[str, Rule]:
    return {name: made for names, made in chosen.values() for name in names}


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
    own = {name: tiling.spread(means[name] < limits[name], True) for name, tiling in tilings.items()}
    return ranks, forced, own


def _refuse_several(chosen: Mapping[str, object], sparsity: float) -> None:
    if len(chosen) > 1:
        raise ConfigError(
            f"sparsity = {sparsity} moves the limit of one rule, and there are {len(chosen)}; give one rule, or leave "
            "sparsity out and let each rule keep its own limit."
        )


def _patterns(rule: Rule | Spec | Mapping[str, Rule | Spec]) -> Mapping[str, Any]:
    if isinstance(rule, Mapping) and "use" not in rule:
        return rule
    return {"*": rule}


def _make_rules(
    rule: Rule | Spec | Mapping[str, Rule | Spec], maps: Mapping[str, Tensor]
) -> dict[str, tuple[list[str], Rule]]:
    """Pattern → the sites it is for, and its rule; every site has one."""
    patterns = _patterns(rule)
    left = list(maps)
    chosen: dict[str, tuple[list[str], Rule]] = {}
    for pattern, spec in patterns.items():
        names = [name for name in left if fnmatchcase(name, pattern)]
        if not names:
            raise ConfigError(f"rule for {pattern!r} fits no site that is left; sites: {', '.join(maps)}.")
        chosen[pattern] = names, rules.make(spec, where="rule")
        left = [name for name in left if name not in names]
    if left:
        raise ConfigError(f"no rule for {', '.join(left)}; add one for the pattern '*'.")
    return chosen


def _describe(chosen: Mapping[str, tuple[list[str], Rule]]) -> str:
    if len(chosen) == 1:
        return repr(next(iter(chosen.values()))[1])
    return "; ".join(f"{pattern}={rule!r}" for pattern, (_, rule) in chosen.items())


def _protected(site: Site, asked: Sequence[int] | None) -> tuple[int, ...]:
    if asked is None:
        tokens = tuple(range(site.num_prefix_tokens))
    else:
        tokens = tuple(asked)
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
        level, value, force = (_gathered(table, slots) for table in (levels, maps, forced))
        chosen, limits[group] = _cut(level, value.cpu(), force, share, group)
        _spread(chosen, keep, slots)
    return keep, limits


def _gathered(table: Mapping[str, Tensor], slots: Sequence[tuple[str, Any]]) -> Tensor:
    """The pairs of a group in one row."""
    return torch.cat([table[name][index].flatten() for name, index in slots])


def _spread(chosen: Tensor, keep: dict[str, Tensor], slots: Sequence[tuple[str, Any]]) -> None:
    """The row of a group back to its sites and heads."""
    sizes = [keep[name][index].numel() for name, index in slots]
    for (name, index), part in zip(slots, chosen.split(sizes), strict=True):
        keep[name][index] = part.view(keep[name][index].shape)


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
