"""Record: watch Heads go by at the attention sites of a model, as they enter the cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from vitruvius.attention import build_core
from vitruvius.heads import Heads
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
    """While open, every run of the model leaves the Heads of each matching site in the dictionary it yields.

    The last run wins. With `on_heads(name, heads)` nothing is kept: each Heads is handed on as it comes
    (under activation checkpointing once more in the backward pass). Bare sites hold a softmax core
    meanwhile and are upstream's again on leaving, also on an exception.
    """
    refuse_compiled(model)
    root = inner(model)
    chosen = select(model, survey(model, input_size=input_size), where)
    bare: dict[str, Any] = {n: m for n in chosen if not isinstance(m := root.get_submodule(n), Socket)}
    plug(bare, {name: build_core((), chosen[name]) for name in bare})
    cores = {name: module.core for name, module in bare.items()}
    seen: dict[str, Heads] = {}
    keep = seen.__setitem__ if on_heads is None else on_heads
    handles: list[Any] = []
    try:
        handles += [_watch(root.get_submodule(name), name, keep, detach) for name in chosen]
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for name, module in bare.items():
            if getattr(module, "core", None) is cores[name]:  # unless somebody restored it meanwhile
                unplug(module)


def after_stages(model: nn.Module, name: str, heads: Heads) -> Heads:
    """What the kernel of a site receives: the heads after the stages of its core."""
    core: Any = getattr(inner(model).get_submodule(name), "core", None)
    for stage in list(core.children())[:-1] if core is not None else []:
        heads = stage(heads)
    return heads


def _watch(module: Any, name: str, keep: OnHeads, detach: bool) -> Any:
    def look(_: nn.Module, args: tuple[Heads]) -> None:
        keep(name, _detached(args[0]) if detach else args[0])

    return module.core.register_forward_pre_hook(look)


def _detached(heads: Heads) -> Heads:
    bias = None if heads.bias is None else heads.bias.detach()
    return heads._replace(q=heads.q.detach(), k=heads.k.detach(), v=heads.v.detach(), bias=bias)
