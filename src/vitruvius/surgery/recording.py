"""Record: watch Heads go by at the attention sites of a model, as they enter the cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vitruvius.attention.base import Core, attention_map, build_core
from vitruvius.heads import Heads, RecordedHeads, Site
from vitruvius.surgery.base import Socket, inner
from vitruvius.surgery.rewiring import plug, refuse_compiled, unplug
from vitruvius.surgery.sites import Size, Where, select, survey

OnHeads = Callable[[str, Heads], None]


@contextmanager
def record(
    model: nn.Module,
    where: Where = "*",
    *,
    on_heads: OnHeads | None = None,
    detach: bool = True,
    input_size: Size | None = None,
    sites: Mapping[str, Site] | None = None,
) -> Iterator[dict[str, Heads]]:
    """While open, every run of `model` leaves the Heads of each matching site in the dictionary it yields.

    `where` is a glob over site names, or several (default: every site). The last run wins. With
    `on_heads(name, heads)` nothing is kept: it gets each Heads as it comes (under activation checkpointing once
    more in the backward pass). `detach` cuts the recorded tensors off from autograd (default: yes). `input_size` is
    the size of an image, (channels, rows, columns), for models that do not know it themselves. `sites` are what
    `survey` found, where that is known already. Bare sites hold a softmax core meanwhile and are upstream's again on
    leaving, also on an exception.
    """
    refuse_compiled(model)
    root = inner(model)
    chosen = select(model, survey(model, input_size=input_size) if sites is None else sites, where)
    modules: dict[str, Any] = {name: root.get_submodule(name) for name in chosen}
    bare = {name: module for name, module in modules.items() if not isinstance(module, Socket)}
    lent = {name: build_core((), chosen[name]) for name in bare}
    plug(bare, lent)
    seen: dict[str, Heads] = {}
    handles: list[Any] = []
    try:
        handles += [_watch(module, name, on_heads or seen.__setitem__, detach) for name, module in modules.items()]
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for name, module in bare.items():
            if getattr(module, "core", None) is lent[name]:  # it may have been restored or rewired meanwhile
                unplug(module)


def core_of(model: nn.Module, name: str) -> Core | None:
    """The core at the site `name` of `model`, which may be wrapped; None where upstream's own attention sits there."""
    core: Core | None = getattr(inner(model).get_submodule(name), "core", None)
    return core


def map_of(model: nn.Module, name: str, heads: Heads) -> Tensor:
    """The weights that the site `name` of `model` really gives to the values in `heads`, (B, H, N, M).

    `heads` is what enters the core, as `record` hands it over. Upstream's own attention is softmax. A core without
    a map (`Core.map`) is refused by the name of the part that cannot say what it does.
    """
    core = core_of(model, name)
    return attention_map(heads) if core is None else core.map_of(heads, name)


def _watch(module: Any, name: str, keep: OnHeads, detach: bool) -> Any:
    takes_context: bool = getattr(module.core, "takes_context", False)

    def cut(x: Any) -> Any:
        return x.detach() if detach and isinstance(x, Tensor) else x

    def look(_: nn.Module, args: tuple[Any, ...]) -> None:
        heads = Heads(*map(cut, args[0]))
        if takes_context:
            _, x, states = (*args, None, None)[:3]
            heads = RecordedHeads(*heads)
            heads.x = cut(x)
            heads.states = {part: cut(state) for part, state in (states or {}).items()}
        keep(name, heads)

    return module.core.register_forward_pre_hook(look)
