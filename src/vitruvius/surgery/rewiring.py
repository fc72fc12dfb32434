"""Rewire: find the attention sites of a model, plug cores into them, and take them out again."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import nn

from vitruvius._errors import NoSiteError, SurgeryError, UnsuitableSite
from vitruvius.attention import Core, Part, build_core
from vitruvius.heads import Heads, HeadWeights, Site
from vitruvius.surgery._dry_run import Size, dry_run
from vitruvius.surgery._socket import Socket, inner, socket_of

Where = str | Iterable[str]  # a glob over site names, or several


def rewire(model: nn.Module, *parts: str | Part, where: Where = "*", input_size: Size | None = None) -> nn.Module:
    """Plug a core made of `parts` into every site that `where` matches; in place, returns the model.

    Everything is checked and built before anything is touched, so a refusal leaves the model as it was.
    """
    refuse_compiled(model)
    chosen = select(model, survey(model, input_size=input_size), where)
    modules = {name: _bare(model, name) for name in chosen}
    cores = {name: build_core(parts, site) for name, site in chosen.items()}
    plug(modules, cores)
    return model


def restore(model: nn.Module, where: Where = "*") -> nn.Module:
    """Give the matching sites back to upstream, exactly; sites that are bare already stay as they are."""
    root = inner(model)
    for name in match(model, [n for n, m in root.named_modules() if socket_of(m) is not None], where):
        module = root.get_submodule(name)
        if isinstance(module, Socket):
            unplug(module)
    return model


def survey(model: nn.Module, *, input_size: Size | None = None) -> dict[str, Site]:
    """Every attention site of a model, by name as in `model.get_submodule`, learned by one dry run.

    The run happens on a copy without numbers: the model is not touched.
    """
    root = inner(model)
    size, seen = dry_run(root, input_size)
    if not seen:
        raise NoSiteError(_no_site(root))
    return {name: _site(name, socket, heads, root, size) for name, (socket, heads) in seen.items()}


def head_weights(
    model: nn.Module, where: Where = "*", *, input_size: Size | None = None
) -> dict[str, tuple[Site, HeadWeights]]:
    """Views into the projections of every matching site, rewired or bare; writing into them writes into the model."""
    views: dict[str, tuple[Site, HeadWeights]] = {}
    for name, site in select(model, survey(model, input_size=input_size), where).items():
        module: Any = inner(model).get_submodule(name)
        try:
            views[name] = site, cast(Any, socket_of(module)).head_weights(module)
        except UnsuitableSite as error:
            raise UnsuitableSite(
                f"{name!r} ({site.family}) has no views of its weights head by head: {error}"
            ) from None
    return views


def select(model: nn.Module, sites: Mapping[str, Site], where: Where) -> dict[str, Site]:
    """The sites whose names `where` matches."""
    return {name: sites[name] for name in match(model, list(sites), where)}


def match(model: nn.Module, names: list[str], where: Where) -> list[str]:
    """The names that any glob matches, in the model's order; a glob that matches nothing is an error."""
    globs = [where] if isinstance(where, str) else list(where)
    root = type(inner(model)).__name__
    if not names:
        raise NoSiteError(_no_site(inner(model)))
    for glob in globs:
        if not fnmatch.filter(names, glob):
            raise NoSiteError(
                f"where={glob!r} matches none of the {len(names)} attention sites of {root}.\nSites: {abridge(names)}"
            )
    return [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


def abridge(names: Iterable[str]) -> str:
    """`blocks.0.attn … blocks.11.attn`: names that differ in numbers only, first and last."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return ", ".join(group[0] if len(group) == 1 else f"{group[0]} … {group[-1]}" for group in kinds.values())


def refuse_compiled(model: nn.Module) -> None:
    """Surgery changes the code that a compiled model has already read."""
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise SurgeryError(
                f"{type(inner(model)).__name__} is compiled, and surgery would not reach the compiled code. "
                "Operate first, then torch.compile the result (the uncompiled model is ._orig_mod)."
            )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise SurgeryError(
            "the model is wrapped in DistributedDataParallel, which would not know new parameters. "
            "Operate first, then wrap (the model inside is .module)."
        )


def plug(modules: Mapping[str, Any], cores: Mapping[str, Core]) -> None:
    """Swap classes and attach cores, each on the device and in the precision of its site's weights."""
    for name, module in modules.items():
        weight = next(p for p in module.parameters() if p.is_floating_point())
        cores[name].to(weight).train(module.training)
    for name, module in modules.items():
        module.__class__ = socket_of(module)
        module.core = cores[name]


def unplug(module: Any) -> None:
    """Delete the core and give the class back."""
    del module.core
    module.__class__ = type(module).upstream


def _bare(model: nn.Module, name: str) -> nn.Module:
    module = inner(model).get_submodule(name)
    if isinstance(module, Socket):
        core = module.core.describe() if isinstance(module.core, Core) else type(module.core).__name__
        raise SurgeryError(
            f"{name!r} is already rewired with {core}. Call restore(model, where={name!r}) first, "
            "or name all parts in one rewire."
        )
    try:
        cast(Any, socket_of(module)).check(module)
    except UnsuitableSite as error:
        raise UnsuitableSite(f"{name!r} cannot be rewired: {error}") from None
    return module


def _site(name: str, socket: Socket, heads: Heads, root: nn.Module, size: Size) -> Site:
    items = heads.k.shape[-2]
    own = socket.grid()
    if own is not None and math.prod(own) != items:
        raise SurgeryError(
            f"{name!r} was built for {own[0]} x {own[1]} items, an image of size {size} brings {items}. "
            "Say for which images the model was built: input_size=(channels, rows, columns)."
        )
    prefix, grid = _layout(root, socket.attends, items, size) if own is None else (0, own)
    return Site(
        name=name,
        family=socket.family,
        attends=socket.attends,
        num_heads=heads.q.shape[1],
        num_queries=heads.q.shape[2],
        num_keys=items,
        key_dim=heads.q.shape[3],
        value_dim=heads.v.shape[3],
        dim=socket.width(),
        num_prefix_tokens=prefix,
        grid=grid,
    )


def _layout(root: Any, attends: str, items: int, size: Size) -> tuple[int, tuple[int, int] | None]:
    """Prefix tokens and grid of patches, where the number of tokens agrees with what the model says of itself."""
    if attends not in ("tokens", "class"):
        return 0, None
    tokens = int(getattr(root, "num_prefix_tokens", 1))
    for prefix in (1, tokens) if attends == "class" else (tokens, 0):
        grid = _grid(root, items - prefix, size)
        if grid is not None:
            return prefix, grid
    return (tokens if attends == "tokens" and hasattr(root, "num_prefix_tokens") else 0), None


def _grid(root: Any, patches: int, size: Size) -> tuple[int, int] | None:
    """Rows and columns that make `patches`: as built, else in the proportions of the image."""
    built = getattr(getattr(root, "patch_embed", None), "grid_size", None)
    if isinstance(built, tuple) and math.prod(built) == patches:
        return cast("tuple[int, int]", built)
    rows = math.isqrt(max(patches, 0) * size[1] // size[2])
    if rows and patches % rows == 0 and rows * size[2] == patches // rows * size[1]:
        return rows, patches // rows
    return None


def _no_site(root: nn.Module) -> str:
    alike = sorted(
        {type(m).__name__ for m in root.modules() if re.search(r"Att(n|ention)|Parallel.*Block", type(m).__name__)}
    )
    found = (
        f"It holds {', '.join(alike)}, for which there is no socket."
        if alike
        else "It holds nothing that looks like attention."
    )
    return f"{type(root).__name__} has no attention that can be rewired. {found} Families: `vitruvius list sockets`."
