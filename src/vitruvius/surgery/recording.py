"""Record: watch Heads go by at the attention sites of a model, as they enter the cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from vitruvius._notebook import Records, Shown, draw_tiles
from vitruvius.attention.base import Core, attention_map, build_core
from vitruvius.heads import Heads, RecordedHeads, Site
from vitruvius.surgery.base import Socket, inner, socket_of
from vitruvius.surgery.rewiring import plug, refuse_compiled, unplug
from vitruvius.surgery.sites import Where, match

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OnHeads = Callable[[str, Heads], None]


class Recording(Shown, dict[str, Heads]):
    """The Heads that entered each site of a model in its last run, by the name of the site."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def map(self, name: str) -> Tensor:
        """The weights that the site `name` really gives to its values, (B, H, N, M); see `map_of`."""
        return map_of(self._model, name, self[name])

    def _title(self) -> str:
        images = f", {max(len(heads.q) for heads in self.values())} images" if self else ""
        return f"what entered {len(self)} sites of {type(inner(self._model)).__name__}{images}"

    def _records(self) -> Records:
        rows = []
        for name, heads in self.items():
            (_, number, queries, width), peak = heads.q.shape, heads.weights().detach().amax(-1).mean()
            sizes = {"heads": number, "queries": queries, "keys": heads.k.shape[-2], "width": width}
            rows.append({"site": name, **sizes, "mean largest weight": float(peak)})
        return rows

    def _draw(self, axes: Axes, *, image: int = 0) -> None:
        """The true map of every site, mean over heads, of one image."""
        maps = [self.map(name)[image].mean(0).detach().float().cpu().numpy() for name in self]
        draw_tiles(axes, maps, list(self))
        axes.set_title("mean over heads, queries down, keys across")


@contextmanager
def record(
    model: nn.Module,
    where: Where = "*",
    *,
    on_heads: OnHeads | None = None,
    detach: bool = True,
    sites: Mapping[str, Site] | None = None,
) -> Iterator[Recording]:
    """While open, every run of `model` leaves the Heads of each matching site in the dictionary it yields.

    `where` is a glob over site names, or several (default: every site). The last run wins. With
    `on_heads(name, heads)` nothing is kept: it gets each Heads as it comes (under activation checkpointing once
    more in the backward pass). `detach` cuts the recorded tensors off from autograd (default: yes). `sites` are those
    to choose from (default: every module that attends). Bare sites hold a softmax core meanwhile and are upstream's
    again on leaving, also on an exception.
    """
    refuse_compiled(model)
    root = inner(model)
    names = sites or [name for name, module in root.named_modules() if socket_of(module) is not None]
    modules: dict[str, Any] = {name: root.get_submodule(name) for name in match(model, list(names), where)}
    bare = {name: module for name, module in modules.items() if not isinstance(module, Socket)}
    no_sizes: Any = dict.fromkeys(("num_heads", "num_queries", "num_keys", "key_dim", "value_dim", "dim"), 0)
    lent: dict[str, Core] = {}  # upstream's own attention as a core has no use for sizes, so no survey is needed
    for name, module in bare.items():
        kind: Any = socket_of(module)
        lent[name] = build_core((), Site(name=name, family=kind.family, attends=kind.attends, **no_sizes))
    plug(bare, lent)
    seen = Recording(model)
    try:
        with ExitStack() as hooks:
            for name, module in modules.items():
                hooks.enter_context(_watch(module, name, on_heads or seen.__setitem__, detach))
            yield seen
    finally:
        for name, module in bare.items():
            if getattr(module, "core", None) is lent[name]:  # it may have been restored or rewired meanwhile
                unplug(module)


def core_of(model: nn.Module, name: str) -> Core | None:
    """The core at the site `name` of `model`, which may be wrapped; None where upstream's own attention sits there."""
    return getattr(inner(model).get_submodule(name), "core", None)


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
