"""Initialise: give a model's attention, or the whole of it, another start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius._registry import read_spec
from vitruvius.init.base import BaseSpec, InitSpec, Layer, bases, inits
from vitruvius.surgery.base import inner
from vitruvius.surgery.positions import position_table
from vitruvius.surgery.rewiring import head_weights, refuse_compiled
from vitruvius.surgery.sites import Size, Where

logger = logging.getLogger(__name__)


def initialise(
    model: nn.Module,
    init: InitSpec,
    *,
    generator: torch.Generator | None = None,
    where: Where = "*",
    base: BaseSpec | None = None,
    input_size: Size | None = None,
    **settings: Any,
) -> nn.Module:
    """Give `model` another start; in place, returns the model.

    `init` is a start for attention (`vitruvius list inits`), which touches nothing but the attention that
    `where` matches, or a base init (`vitruvius list bases`), which touches the whole model: `"mimetic"`,
    `"mimetic:alpha=0.6"`, `{"use": "mimetic", "alpha": 0.6}`, or a function of layers. `settings` are further
    settings of it.

    All randomness comes from `generator` (default: one of seed 0): the same state gives the same weights, and one
    on the CPU gives them on every device. `where` is a glob over site names, or several (default: every site).
    `base` is a base init for the whole model, applied first; without it all other weights stay as they are.
    `input_size` is the size of an image, (channels, rows, columns), for models that do not know it themselves. A
    refusal leaves the model as it was.
    """
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    if not isinstance(generator, torch.Generator):
        raise ConfigError(f"generator = {generator!r}, expected a torch.Generator: torch.Generator().manual_seed(0).")
    refuse_compiled(model)
    base_init, start, where = _read(init, where, base, settings)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        if base_init is not None:
            base_init(inner(model), generator=generator)
        if start is not None:
            start(layers(model, where, input_size=input_size), generator=generator)
    except BaseException:
        for name, parameter in model.named_parameters():
            parameter.detach().copy_(before[name])
        raise
    same = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    logger.debug("initialise left %d of %d parameters as they were: %s", len(same), len(before), ", ".join(same))
    return model


def layers(model: nn.Module, where: Where = "*", *, input_size: Size | None = None) -> list[Layer]:
    """The attention layers that an init works on, in the model's order, with the positions they see."""
    made: list[Layer] = []
    tables: dict[tuple[int, ...], Tensor] = {}
    for site, weights in head_weights(model, where, input_size=input_size).values():
        table, reason = position_table(model, site)
        if table is not None:  # layers that see the same table hold the same object
            table = tables.setdefault(tuple(table.shape), table)
        made.append(Layer(weights=weights, site=site, positions=table, no_positions=reason))
    return made


Start = Callable[..., None] | None


def _read(init: InitSpec, where: Where, base: BaseSpec | None, settings: dict[str, Any]) -> tuple[Start, Start, Where]:
    """A start for the whole model, one for attention, and the sites of that; either start may be missing.

    Settings are checked; `where` and `base` may also stand among those of `init`.
    """
    if isinstance(init, str | Mapping):
        name, written = read_spec(init, where="init")
        where = written.pop("where", where)
        base = written.pop("base", base)
        init = {"use": name, **written}
        if name in bases:
            if base is not None or where != "*":
                raise ConfigError(f"{name!r} is a base init: it starts the whole model, so leave out base and where.")
            return bases.bind(init, where="init", settings=settings), None, where
        if name not in inits:
            hint = suggest(name, [*inits, *bases])
            raise UnknownName(
                f"init: no init named {name!r}{hint} Known: {', '.join(inits)}. Base inits: {', '.join(bases)}."
            )
    start = inits.bind(init, where="init", settings=settings)
    return None if base is None else bases.bind(base, where="init.base"), start, where
