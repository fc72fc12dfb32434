"""Initialise: give a model's attention, or the whole of it, another start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius._registry import read_spec
from vitruvius.init import BaseSpec, InitSpec, Layer, bases, inits
from vitruvius.surgery._dry_run import Size
from vitruvius.surgery._socket import inner
from vitruvius.surgery.positions import position_table
from vitruvius.surgery.rewiring import Where, head_weights, refuse_compiled

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
    plan = _plan(init, where, base, settings)
    with _all_or_nothing(model):
        if plan.base is not None:
            plan.base(inner(model), generator=generator)
        if plan.start is not None:
            plan.start(layers(model, plan.where, input_size=input_size), generator=generator)
    return model


def layers(model: nn.Module, where: Where = "*", *, input_size: Size | None = None) -> list[Layer]:
    """The attention layers that an init works on, in the model's order, with the positions they see.

    `model` may be rewired or bare; `where` is a glob over site names, or several (default: all); `input_size` is that
    of an image, (channels, rows, columns), for models that do not know it themselves.
    """
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


class _Plan(NamedTuple):
    """A start for the whole model, then one for the attention at some sites; either may be missing."""

    base: Callable[..., None] | None
    start: Callable[..., None] | None
    where: Where


def _plan(init: InitSpec, where: Where, base: BaseSpec | None, settings: dict[str, Any]) -> _Plan:
    """Both starts with their settings checked; `where` and `base` may also stand among the settings of `init`."""
    if isinstance(init, str | Mapping):
        name, own = read_spec(init, where="init")
        where = own.pop("where", where)
        base = own.pop("base", base)
        init = {"use": name, **own}
        if name in bases:
            if base is not None or where != "*":
                raise ConfigError(f"{name!r} is a base init: it starts the whole model, so leave out base and where.")
            return _Plan(bases.bind(init, where="init", settings=settings), None, where)
        _check_known(name)
    start = inits.bind(init, where="init", settings=settings)
    if base is None:
        return _Plan(None, start, where)
    return _Plan(bases.bind(base, where="init.base"), start, where)


def _check_known(name: str) -> None:
    """An unknown name gets suggestions from both kinds of starts."""
    if name not in inits:
        hint = suggest(name, [*inits, *bases])
        raise UnknownName(
            f"init: no init named {name!r}{hint} Known: {', '.join(inits)}. Base inits: {', '.join(bases)}."
        )


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
    logger.debug("initialise left %d of %d parameters as they were: %s", len(kept), len(before), ", ".join(kept))
