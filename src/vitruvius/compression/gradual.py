"""Masks that tighten while a model trains: first the pairs with the least attention go, the last ones at the end.

The removed share follows 1 − (1 − t)³, Zhu & Gupta 2017, arXiv:1710.01878.    H heads, N queries, M keys; True = kept
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.attention.mask import Mask, check_keep
from vitruvius.compression._site_files import check_map, guess_site
from vitruvius.surgery import Socket, inner, survey


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
        removed = [maps[name].double().cpu()[~keep.cpu()] for name, keep in masks.items()]
        self.maps = {name: maps[name].double().cpu() for name in masks}
        self.attention = torch.cat(removed).sort(descending=True).values  # of the pairs that go in the end

    def fraction(self, epoch: int) -> float:
        """How much of what goes in the end is gone in this epoch (the first is 0)."""
        t = min(max((epoch + 1) / self.epochs, 0.0), 1.0)
        return 1 - (1 - t) ** self.power

    def finished(self, epoch: int) -> bool:
        """Whether this epoch trains with the final masks."""
        return epoch + 1 >= self.epochs

    def patterns(self, fraction: float) -> dict[str, Tensor]:
        """Masks that remove this `fraction` of what goes in the end, (H, N, M) by site."""
        spared = len(self.attention) - round(fraction * len(self.attention))
        if not spared:
            return dict(self.masks)
        least = self.attention[spared - 1]
        return {name: keep | (self.maps[name] >= least).to(keep.device) for name, keep in self.masks.items()}

    def epoch_start(self, epoch: int, model: nn.Module) -> None:
        """Put the patterns of this `epoch`, from 0, into the masks of `model`."""
        tighten(model, self.patterns(self.fraction(epoch)))


@torch.no_grad()
def tighten(model: nn.Module, patterns: Mapping[str, Tensor]) -> nn.Module:
    """Write `patterns` into the `mask` parts of `model`, by site; everything is checked first. In place."""
    sites = survey(model)
    parts = {name: _mask_of(model, name) for name in patterns}
    for name, keep in patterns.items():
        check_keep(keep, sites[name])
    for name, keep in patterns.items():
        parts[name].keep.copy_(keep)
    return model


def _mask_of(model: nn.Module, name: str) -> Mask:
    modules: dict[str, Any] = dict(inner(model).named_modules())
    socket = modules.get(name)
    if isinstance(socket, Socket):
        for part in socket.core.children():
            if isinstance(part, Mask):
                return part
    raise ConfigError(f"{name!r} holds no 'mask' to tighten; rewire it with part('mask', keep='all') first.")
