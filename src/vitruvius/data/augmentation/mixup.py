"""Mixup and CutMix of batches into soft labels, by timm, randomness being a function of (seed, epoch, step, process).

Zhang et al. 2018, arXiv:1710.09412; Yun et al. 2019, arXiv:1905.04899.   B batch, K classes
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitruvius._random import seed_of, seeded
from vitruvius.data._config import DataConfig


class Mixer:
    """(images, labels) → (mixed images, soft labels (B, K)), by timm's `mixup`; the arguments stay as they are."""

    def __init__(self, mixup: Any, *, off_epoch: int, seed: int, rank: int) -> None:
        self.mixup, self.off_epoch, self.seed, self.rank = mixup, off_epoch, seed, rank

    def __call__(self, images: Tensor, labels: Tensor, *, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """From `off_epoch` on images are left alone and labels only smoothed; `epoch` and `step` count from 0."""
        self.mixup.mixup_enabled = not (self.off_epoch and epoch >= self.off_epoch)
        count = len(images)
        rows = torch.arange(count + count % 2, device=images.device) % count  # timm pairs images: an even number
        with seeded(seed_of(self.seed, epoch, step, self.rank)):
            mixed, soft = self.mixup(images[rows], labels[rows])
        return mixed[:count], soft[:count]


def make_mixup(config: DataConfig, num_classes: int, *, seed: int = 0, rank: int = 0) -> Mixer | None:
    """The mixer a recipe asks for, or None if it mixes nothing; soft labels have `num_classes` columns."""
    if config.mixup == 0 and config.cutmix == 0 and config.cutmix_minmax is None:
        return None
    from timm.data import Mixup

    mixup = Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        cutmix_minmax=config.cutmix_minmax,
        prob=config.mixup_prob,
        switch_prob=config.mixup_switch_prob,
        mode=config.mixup_mode,
        label_smoothing=config.smoothing,
        num_classes=num_classes,
    )
    return Mixer(mixup, off_epoch=config.mixup_off_epoch, seed=seed, rank=rank)
