"""Masks that tighten while a model trains: first the pairs with the least attention go, the last ones at the end.

The removed share follows 1 − (1 − t)³, Zhu & Gupta 2017, arXiv:1710.01878.    H heads, N queries, M keys; True = kept
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.attention.mask import Mask, check_keep
from vitruvius.compression.masks import check_map, guess_site, rank
from vitruvius.surgery import survey
from vitruvius.surgery.base import cores_of


class GradualMask:
    """Patterns on the way to `masks` over `epochs` epochs; call `epoch_start` before each, in every process.

    What is removed in the end leaves in the order of the average `maps`, least attention first, over all sites
    together. The same epoch always gives the same pattern, so a resumed run goes on unharmed. Weights of epochs before
    `finished` were trained with looser masks: they must not be chosen as the best of the run.

    `power` is that of the schedule 1 − (1 − t)^power, above 0: the larger, the more goes early (default 3).
    """

    def __init__(
        self, masks: Mapping[str, Tensor], maps: Mapping[str, Tensor], *, epochs: int, power: float = 3.0
    ) -> None:
        if epochs < 1 or power <= 0:
            raise ConfigError(f"GradualMask got epochs={epochs}, power={power}; expected at least 1, and above 0.")
        for name, keep in masks.items():
            if name not in maps:
                raise ConfigError(f"there is a mask for {name!r} but no average map; were they made from other maps?")
            check_map(name, maps[name], guess_site(name, keep))
        self.masks, self.epochs, self.power = dict(masks), epochs, power
        removed = {name: ~keep.cpu() for name, keep in masks.items()}
        places = rank({name: -maps[name].double().cpu()[gone] for name, gone in removed.items()})
        self.num_removed = sum(map(len, places.values()))
        self.places = {  # of every pair that goes, among all of them: the most attended has place 0
            name: torch.zeros(gone.shape, dtype=torch.float64).masked_scatter_(gone, places[name])
            for name, gone in removed.items()
        }

    def fraction(self, epoch: int) -> float:
        """How much of what goes in the end is gone in this epoch (the first is 0)."""
        t = min(max((epoch + 1) / self.epochs, 0.0), 1.0)
        return 1 - (1 - t) ** self.power

    def finished(self, epoch: int) -> bool:
        """Whether this epoch trains with the final masks."""
        return epoch + 1 >= self.epochs

    def patterns(self, fraction: float) -> dict[str, Tensor]:
        """Masks that remove this `fraction` of what goes in the end, (H, N, M) by site."""
        spared = self.num_removed - round(fraction * self.num_removed)
        if not spared:
            return dict(self.masks)
        return {name: keep | (self.places[name] < spared).to(keep.device) for name, keep in self.masks.items()}

    def epoch_start(self, epoch: int, model: nn.Module) -> None:
        """Put the patterns of this `epoch`, from 0, into the masks of `model`."""
        tighten(model, self.patterns(self.fraction(epoch)))


@torch.no_grad()
def tighten(model: nn.Module, patterns: Mapping[str, Tensor]) -> nn.Module:
    """Write `patterns` into the `mask` parts of `model`, by site; everything is checked first. In place."""
    sites = survey(model)
    cores = cores_of(model)
    parts = {name: part for name, core in cores.items() for part in core.children() if isinstance(part, Mask)}
    for name, keep in patterns.items():
        if name not in parts:
            raise ConfigError(f"{name!r} holds no 'mask' to tighten; rewire it with part('mask', keep='all') first.")
        check_keep(keep, sites[name])
    for name, keep in patterns.items():
        parts[name].keep.copy_(keep)
    return model
