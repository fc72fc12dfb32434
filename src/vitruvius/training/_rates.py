"""The learning rate that a recipe means: given, or scaled from a base rate to the global batch.

Linear: Goyal et al. 2017, arXiv:1706.02677; square root: Krizhevsky 2014, arXiv:1404.5997. The global batch is
images per process × processes × accumulated batches.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from vitruvius._errors import ConfigError
from vitruvius.training.config import Config

logger = logging.getLogger(__name__)

DEFAULT = 1e-3
ADAPTIVE = ("ada", "lamb")  # optimisers of these names take the square root unless told otherwise, as in timm


def with_rate(config: Config, world_size: int) -> Config:
    """The recipe with its learning rate as a number."""
    train = config.train
    if train.lr_base is None:
        rate = DEFAULT if train.lr is None else train.lr
        return replace(config, train=replace(train, lr=rate))
    batch = config.data.batch_size * world_size * train.grad_accum_steps
    rule = train.lr_base_scale or ("sqrt" if any(name in train.opt.lower() for name in ADAPTIVE) else "linear")
    ratio = batch / train.lr_base_size
    rate = train.lr_base * (math.sqrt(ratio) if rule == "sqrt" else ratio)
    if train.lr is not None and not math.isclose(train.lr, rate, rel_tol=1e-9):
        raise ConfigError(
            f"train.lr = {train.lr}, but train.lr_base = {train.lr_base} means {rate:.6g} for a global batch of "
            f"{batch} ({rule}, base {train.lr_base_size}). Give one of the two."
        )
    logger.info("learning rate %.6g: %s from %g at %d to %d", rate, rule, train.lr_base, train.lr_base_size, batch)
    return replace(config, train=replace(train, lr=rate, lr_base_scale=rule))
