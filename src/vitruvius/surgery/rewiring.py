"""Rewire: plug cores into the attention sites of a model, take them out again, look at the weights before them.

`save_pretrained` and `push_to_hub` of transformers write what a model's config holds, so the rules of its attention
travel as `vitruvius` in config.json. A plain `from_pretrained` would ignore them, and a core without weights with them;
so such a model also has a buffer MARK, which transformers then reports as an unexpected key, whoever reads it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from timm.layers import register_notrace_module
from torch import nn

from vitruvius._checks import check_model
from vitruvius._errors import ConfigError, SurgeryError, UnsuitableSite
from vitruvius._notebook import show_briefly
from vitruvius._registry import piece_of
from vitruvius._version import __version__
from vitruvius.attention.base import Core, PartMaker, PartSpec, build_core, part
from vitruvius.attention.mask import Mask, read_masks
from vitruvius.heads import HeadWeights, Site
from vitruvius.surgery.base import FEEDS_QUERIES, Socket, inner, socket_of
from vitruvius.surgery.sites import Size, Where, match, select, survey
from vitruvius.surgery.vit import link_blocks

register_notrace_module(Core)  # to timm's FX tracing a core is one node, as its own attention is to others

KEY = "vitruvius"
MARK = "rewired_by_vitruvius"


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
    note_in_configs(inner(model))
    if "IPython" in sys.modules:
        show_briefly(type(model))
    return model


def attend_through_sockets(model: nn.Module) -> nn.Module:
    """Plug softmax into a model without sockets, in place, if its attention is known; returns the model.

    On a CPU in bfloat16 a socket computes by products, several times faster than timm's own attention.
    """
    if not any(isinstance(module, Core) for module in model.modules()):
        with contextlib.suppress(RuntimeError, TypeError, ValueError):  # no attention, or none that we know
            rewire(model, "softmax")
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
    note_in_configs(root)
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
    """Swap classes and attach cores, each on the device and in the precision of its site's weights."""
    for name, module in modules.items():
        weight = next(p for p in module.parameters() if p.is_floating_point())
        cores[name].to(weight).train(module.training)
    for name, module in modules.items():
        module.__class__ = socket_of(module)
        module.core = cores[name]
        if module.core.ignores_queries:  # what feeds only those gets no gradient, which stops distributed training
            fed = [(n, p) for n, p in module.named_parameters() if n.partition(".")[0] in FEEDS_QUERIES]
            module.core.froze = tuple(n for n, p in fed if p.requires_grad)
            for _, parameter in fed:
                parameter.requires_grad_(False)


def unplug(module: Any) -> None:
    """Delete the core of a socket, give its class back and thaw what `plug` froze."""
    for name in getattr(module.core, "froze", ()):
        module.get_parameter(name).requires_grad_(True)
    del module.core
    module.__class__ = type(module).upstream


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


def attention_of(model: nn.Module) -> list[dict[str, Any]]:
    """Rules `{"where": …, "parts": […]}` that give a bare `model` the attention that it has; none where it is bare.

    Masks are written as `keep: all`: their patterns lie among the weights.
    """
    parts: dict[str, list[Any]] = {}
    bare = 0
    for name, module in inner(model).named_modules():
        if isinstance(module, Socket) and isinstance(module.core, Core):
            parts[name] = module.core.specs
        else:
            bare += socket_of(module) is not None
    different = [spec for spec in parts.values() if spec != next(iter(parts.values()))]
    if parts and not bare and not different:
        return [{"where": "*", "parts": next(iter(parts.values()))}]
    return [{"where": name, "parts": spec} for name, spec in parts.items()]


def note_in_configs(root: nn.Module) -> None:
    """Write the attention of every model of transformers within `root` into its config, or take it out again."""
    transformers: Any = sys.modules.get("transformers")
    networks: Any = root.modules() if transformers is not None else ()
    networks = [module for module in networks if isinstance(module, transformers.PreTrainedModel)]
    for number, network in enumerate(networks):
        rules = [] if number else attention_of(network)  # the outermost speaks for those inside
        if hasattr(network, MARK):
            delattr(network, MARK)
        if rules:
            setattr(network.config, KEY, {"version": __version__, "attention": rules})
            network.register_buffer(MARK, torch.zeros((), dtype=torch.uint8, device=network.device))
        elif not number and hasattr(network.config, KEY):
            delattr(network.config, KEY)
