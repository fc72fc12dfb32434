"""How a new model's weights begin: the init a recipe names, and auto-encoders that keep what the model can do."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from vitruvius._errors import SurgeryError
from vitruvius.attention.low_rank import LowRank
from vitruvius.init.base import InitSpec
from vitruvius.surgery.base import inner
from vitruvius.surgery.folding import start_low_rank
from vitruvius.surgery.initialising import initialise

logger = logging.getLogger(__name__)
Start = InitSpec  # "impulse", "impulse:kernel=5", {"use": "impulse", "kernel": 5}, or a function of layers


def start(model: nn.Module, init: Start, seed: int) -> None:
    """Give the attention weights the start a recipe names."""
    initialise(model, init, generator=torch.Generator().manual_seed(seed))


def start_new_parts(model: nn.Module, missing: Sequence[str]) -> None:
    """Let auto-encoders that the weights did not bring begin from the weights that they did."""
    sites = {key.partition(".core.low_rank.")[0] for key in missing if ".core.low_rank." in key}
    begin_low_rank(model, only=sites)


def _fresh_sites(model: nn.Module) -> list[str]:
    """Sites whose auto-encoder begins from weights."""
    found = []
    for name, module in inner(model).named_modules():
        site = name.removesuffix(".core.low_rank")
        if site != name and isinstance(module, LowRank) and module.start != "released":
            found.append(site)
    return found


def begin_low_rank(model: nn.Module, only: set[str] | None = None) -> None:
    """`low_rank` begins as the projection that keeps most of q and k, unless its start is the released one."""
    chosen = _fresh_sites(model)
    if only is not None:
        chosen = [name for name in chosen if name in only]
    if not chosen or any(parameter.is_meta for parameter in model.parameters()):
        return
    try:
        start_low_rank(model, chosen)
    except SurgeryError as error:  # a norm or another stage stands between the weights and the auto-encoder
        logger.warning(
            "low_rank begins as a plain projection: %s fit_low_rank(model, batches) finds a better one.", error
        )
