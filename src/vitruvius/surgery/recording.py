"""Record: watch Heads go by at the attention sites of a model, as they enter the cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vitruvius._errors import UnsuitableSite
from vitruvius.attention.base import Core, attention_map, build_core
from vitruvius.heads import Heads, RecordedHeads
from vitruvius.surgery._dry_run import Size
from vitruvius.surgery._sites import Where, select, survey
from vitruvius.surgery._socket import Socket, inner
from vitruvius.surgery.rewiring import plug, refuse_compiled, unplug

OnHeads = Callable[[str, Heads], None]


@contextmanager
def record(
    model: nn.Module,
    where: Where = "*",
    *,
    on_heads: OnHeads | None = None,
    detach: bool = True,
    input_size: Size | None = None,
) -> Iterator[dict[str, Heads]]:
    """While open, every run of `model` leaves the Heads of each matching site in the dictionary it yields.

    `where` is a glob over site names, or several (default: every site). The last run wins. With
    `on_heads(name, heads)` nothing is kept: it gets each Heads as it comes (under activation checkpointing once
    more in the backward pass). `detach` cuts the recorded tensors off from autograd (default: yes). `input_size` is
    the size of an image, (channels, rows, columns), for models that do not know it themselves. Bare sites hold a
    softmax core meanwhile and are upstream's again on leaving, also on an exception.
    """
    refuse_compiled(model)
    root = inner(model)
    chosen = select(model, survey(model, input_size=input_size), where)
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
        _take_back(bare, lent)


def _take_back(bare: Mapping[str, Any], lent: Mapping[str, Core]) -> None:
    """Give sites back to upstream, unless somebody restored or rewired them meanwhile."""
    for name, module in bare.items():
        if getattr(module, "core", None) is lent[name]:
            unplug(module)


def core_of(model: nn.Module, name: str) -> Core | None:
    """The core at a site; None where upstream's own attention sits there.

    `model` may be wrapped; `name` is that of a site, as `survey` lists them.
    """
    core: Core | None = getattr(inner(model).get_submodule(name), "core", None)
    return core


def map_of(model: nn.Module, name: str, heads: Heads) -> Tensor:
    """The weights that the site `name` of `model` really gives to the values in `heads`, (B, H, N, M).

    `heads` is what enters the core, as `record` hands it over. Upstream's own attention is softmax. A core without
    a map (`Core.map`) is refused by the name of the part that cannot say what it does.
    """
    core = core_of(model, name)
    if core is None:
        return attention_map(heads)
    found = core.map(heads)
    if found is None:
        raise UnsuitableSite(
            f"the core {core.describe()} at {name!r} has no attention map: {core.part_without_map(heads)!r} does not "
            "say which weights it gives to the values. Choose other sites with where=…"
        )
    return found


def _watch(module: Any, name: str, keep: OnHeads, detach: bool) -> Any:
    takes_context: bool = getattr(module.core, "takes_context", False)

    def look(_: nn.Module, args: tuple[Any, ...]) -> None:
        heads: Heads = args[0]
        if detach:
            heads = _detached(heads)
        if takes_context:
            heads = _with_context(heads, args, detach)
        keep(name, heads)

    return module.core.register_forward_pre_hook(look)


def _with_context(heads: Heads, args: tuple[Any, ...], detach: bool) -> RecordedHeads:
    """The same Heads, with the tokens and the states of the layer before."""
    _, x, states = (*args, None, None)[:3]
    recorded = RecordedHeads(*heads)
    recorded.x = x.detach() if detach and x is not None else x
    recorded.states = {name: state.detach() if detach else state for name, state in (states or {}).items()}
    return recorded


def _detached(heads: Heads) -> Heads:
    bias = heads.bias
    if bias is not None:
        bias = bias.detach()
    return heads._replace(q=heads.q.detach(), k=heads.k.detach(), v=heads.v.detach(), bias=bias)
