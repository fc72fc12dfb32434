"""Initialise: give a model's attention, or the whole of it, another start."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._config import bind
from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius._registry import Registry
from vitruvius.init import Base, Init, Layer, bases, inits
from vitruvius.surgery._dry_run import Size
from vitruvius.surgery._socket import inner
from vitruvius.surgery.positions import position_table
from vitruvius.surgery.rewiring import Where, head_weights, refuse_compiled

logger = logging.getLogger(__name__)


def initialise(
    model: nn.Module,
    init: str | Init,
    *,
    generator: torch.Generator | None = None,
    where: Where = "*",
    base: str | Base | None = None,
    input_size: Size | None = None,
    **settings: Any,
) -> nn.Module:
    """Give a model another start; in place, returns the model.

    `init` names a start for attention (`vitruvius list inits`), which touches nothing but the attention that
    `where` matches, or a base init (`vitruvius list bases`), which touches the whole model; or it is a function
    of layers. `base` is a base init for the whole model, applied first; without it all other weights stay as
    they are. All randomness comes from `generator`: the same state gives the same weights, and one on the CPU
    gives them on every device. A refusal leaves the model as it was.
    """
    if generator is None:
        raise ConfigError("initialise needs its randomness given: generator=torch.Generator().manual_seed(0).")
    refuse_compiled(model)
    with _all_or_nothing(model):
        if isinstance(init, str) and init in bases:
            if base is not None or where != "*":
                raise ConfigError(f"{init!r} is a base init: it starts the whole model, so leave out base and where.")
            _bound(bases, init, settings)(inner(model), generator=generator)
        else:
            start = _bound(inits, init, settings)
            if base is not None:
                _bound(bases, base, {})(inner(model), generator=generator)
            start(layers(model, where, input_size=input_size), generator=generator)
    return model


def layers(model: nn.Module, where: Where = "*", *, input_size: Size | None = None) -> list[Layer]:
    """The attention layers that an init works on, in the model's order, with the positions they see."""
    made: list[Layer] = []
    tables: dict[tuple[int, ...], Tensor] = {}
    for site, weights in head_weights(model, where, input_size=input_size).values():
        table, reason = position_table(model, site)
        if table is None:
            made.append(Layer(weights=weights, site=site, no_positions=reason))
        else:  # layers that see the same table hold the same object
            table = tables.setdefault(tuple(table.shape), table)
            made.append(Layer(weights=weights, site=site, positions=table))
    return made


def _bound(registry: Registry[Callable[..., None]], init: Any, settings: dict[str, Any]) -> Callable[..., None]:
    """A start with its settings checked."""
    if isinstance(init, str) and init not in registry:
        known = ", ".join(registry)
        also = f" Base inits: {', '.join(bases)}." if registry is inits else ""
        hint = suggest(init, [*registry, *(bases if registry is inits else ())])
        raise UnknownName(f"no {registry.kind} named {init!r}{hint} Known: {known}.{also}")
    piece = registry[init] if isinstance(init, str) else init
    name = init if isinstance(init, str) else getattr(init, "__name__", type(init).__name__)
    return functools.partial(piece, **bind(name, piece, settings, where="init"))


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """On failure, put every parameter back; on success, say which ones stayed as they were."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        yield
    except BaseException:
        for name, parameter in model.named_parameters():
            parameter.detach().copy_(before[name])
        raise
    kept = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    logger.info("initialise left %d of %d parameters as they were: %s", len(kept), len(before), ", ".join(kept))
