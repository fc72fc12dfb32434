"""Rewire: plug cores into the attention sites of a model, take them out again, look at the weights before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from timm.layers import register_notrace_module
from torch import nn

from vitruvius._checks import check_model
from vitruvius._errors import ConfigError, SurgeryError, UnsuitableSite
from vitruvius._notebook import show_briefly
from vitruvius._registry import piece_of
from vitruvius.attention.base import Core, PartMaker, PartSpec, build_core, part
from vitruvius.attention.mask import Mask, read_masks
from vitruvius.heads import HeadWeights, Site
from vitruvius.surgery.base import Socket, inner, socket_of
from vitruvius.surgery.blocks import link_blocks
from vitruvius.surgery.sites import Size, Where, match, select, survey

register_notrace_module(Core)  # to timm's FX tracing a core is one node, as its own attention is to others

FEEDS_QUERIES = ("q_norm.", "q_proj.")  # parameters of upstream's attention that only queries depend on


def rewire(model: nn.Module, *parts: PartSpec, where: Where = "*", input_size: Size | None = None) -> nn.Module:
    """Plug a core made of `parts` into every site that `where` matches; in place, returns the model.

    `model` is a timm model, or a PixelModel around one. Each of `parts` is `"rpc"`, `"rpc:iterations=2"`,
    `{"use": "rpc", "iterations": 2}` or a part itself, in reading order: stages, then at most one kernel; without
    one, softmax ends the chain (`vitruvius list attentions` shows what there is). `where` is a glob over site
    names, or several (default: every site). `input_size` is the size of an image, (channels, rows, columns), for
    models that do not know it themselves.

    Where a core ignores the queries (`symmetric`, `rpc`), parameters that feed nothing else are frozen until `restore`.
    Everything is checked and built before anything is touched, so a refusal leaves the model as it was.
    """
    refuse_compiled(model)
    makers = [part(item) for item in parts]
    sites = survey(model, input_size=input_size)
    chosen = select(model, sites, where)
    _check_mask_files(makers, sites)
    modules = {name: _bare(model, name) for name in chosen}
    cores = {name: build_core(makers, site) for name, site in chosen.items()}
    plug(modules, cores)
    link_blocks(inner(model))
    show_briefly(type(model))
    return model


def _check_mask_files(makers: Sequence[PartMaker], sites: Mapping[str, Site]) -> None:
    """Refuse a file of masks with sites that the model lacks: it is of another model, and some would be left out."""
    for maker in makers:
        file = getattr(maker, "keywords", {}).get("file")
        if piece_of(maker) is Mask and file is not None:
            strange = [name for name in read_masks(file) if name not in sites]
            if strange:
                raise ConfigError(
                    f"{file} has masks for {len(strange)} sites that the model lacks, {strange[0]!r} among them; the "
                    f"model has {len(sites)} sites. Make masks from its own maps."
                )


def restore(model: nn.Module, where: Where = "*") -> nn.Module:
    """Give the sites of `model` that `where` (a glob, or several; default: all) matches back to upstream, exactly.

    Sites that are bare already stay as they are. In place, returns the model.
    """
    refuse_compiled(model)
    root = inner(model)
    for name in match(model, [n for n, m in root.named_modules() if socket_of(m) is not None], where):
        module = root.get_submodule(name)
        if isinstance(module, Socket):
            unplug(module)
    link_blocks(root)
    return model


def head_weights(
    model: nn.Module, where: Where = "*", *, input_size: Size | None = None
) -> dict[str, tuple[Site, HeadWeights]]:
    """Views into the projections of every site that `where` matches; writing into them writes into the model.

    `model` may be rewired or bare; `where` is a glob over site names, or several (default: all); `input_size` is
    the size of an image, (channels, rows, columns), for models that do not know it themselves.
    """
    views: dict[str, tuple[Site, HeadWeights]] = {}
    for name, site in select(model, survey(model, input_size=input_size), where).items():
        module: Any = inner(model).get_submodule(name)
        try:
            views[name] = site, cast(Any, socket_of(module)).head_weights(module)
        except UnsuitableSite as error:
            raise UnsuitableSite(f"{name!r} ({site.family}) has no weights head by head: {error}") from None
    return views


def refuse_compiled(model: nn.Module) -> None:
    """Refuse a model that is compiled, or wrapped for several GPUs, in whole or in part: it would not see a change."""
    check_model(model)
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise SurgeryError(
                f"{type(inner(model)).__name__} is compiled, and surgery would not reach the compiled code. "
                "Operate first, then torch.compile the result (the model before compiling is ._orig_mod)."
            )
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise SurgeryError(
                f"{type(inner(model)).__name__} is wrapped in DistributedDataParallel, which would not know new "
                "parameters. Operate first, then wrap (the model inside is .module)."
            )


def plug(modules: Mapping[str, Any], cores: Mapping[str, Core]) -> None:
    """Swap classes and attach cores, each on the device and in the precision of its site's weights.

    `modules` are upstream's, or sockets already; both are by the name of the site.
    """
    for name, module in modules.items():
        weight = next(p for p in module.parameters() if p.is_floating_point())
        cores[name].to(weight).train(module.training)
    for name, module in modules.items():
        module.__class__ = socket_of(module)
        module.core = cores[name]
        _freeze_idle(module)


def unplug(module: Any) -> None:
    """Delete the core of a socket, give its class back and thaw what `plug` froze."""
    for name in getattr(module.core, "froze", ()):
        module.get_parameter(name).requires_grad_(True)
    del module.core
    module.__class__ = type(module).upstream


def _freeze_idle(module: Any) -> None:
    """Freeze what feeds only queries that the core ignores: without a gradient it would stop distributed training."""
    idle: list[str] = []
    if getattr(module.core, "ignores_queries", False):
        idle = [n for n, p in module.named_parameters() if n.startswith(FEEDS_QUERIES) and p.requires_grad]
    for name in idle:
        module.get_parameter(name).requires_grad_(False)
    module.core.froze = tuple(idle)


def _bare(model: nn.Module, name: str) -> nn.Module:
    """The module at a site, if nothing speaks against rewiring it."""
    module = inner(model).get_submodule(name)
    if isinstance(module, Socket):
        core = module.core
        present = core.describe() if isinstance(core, Core) else type(core).__name__
        raise SurgeryError(
            f"{name!r} is already rewired with {present}. Call restore(model, where={name!r}) first, "
            "or name all parts in one rewire."
        )
    try:
        cast(Any, socket_of(module)).check(module)
    except UnsuitableSite as error:
        raise UnsuitableSite(f"{name!r} cannot be rewired: {error}") from None
    return module
