"""Sites: where attention sits in a model, with all sizes, and how a pattern picks some of them."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from vitruvius._errors import NoSiteError, SurgeryError
from vitruvius.heads import Heads, Site
from vitruvius.surgery._dry_run import Size, dry_run
from vitruvius.surgery._socket import Socket, inner
from vitruvius.surgery.blocks import is_chained

Where = str | Iterable[str]  # a glob over site names, or several


def survey(model: nn.Module, *, input_size: Size | None = None) -> dict[str, Site]:
    """Every attention site of a model, by name as in `model.get_submodule`, learned by one dry run.

    The run happens on a copy without numbers: the model is not touched. `input_size` is the size of an
    image, (channels, rows, columns), for models that do not know it themselves.
    """
    root = inner(model)
    size, seen = dry_run(root, input_size)
    if not seen:
        raise NoSiteError(_no_site(root))
    return {name: _site(name, socket, heads, root, size) for name, (socket, heads) in seen.items()}


def select(model: nn.Module, sites: Mapping[str, Site], where: Where) -> dict[str, Site]:
    """The sites whose names `where` matches.

    `model` owns the `sites`; `where` is a glob over their names, or several; one that matches nothing is an error.
    """
    return {name: sites[name] for name in match(model, list(sites), where)}


def match(model: nn.Module, names: list[str], where: Where) -> list[str]:
    """The names that any glob matches, in the model's order; a glob that matches nothing is an error.

    `model` owns the sites with these `names`; `where` is a glob, or several.
    """
    root = inner(model)
    if not names:
        raise NoSiteError(_no_site(root))
    matched: set[str] = set()
    for glob in _globs(where):
        found = [name for name in names if fnmatch.fnmatchcase(name, glob)]
        if not found:
            raise NoSiteError(
                f"where={glob!r} matches none of the {len(names)} attention sites of {type(root).__name__}.\n"
                f"Sites: {abridge(names)}"
            )
        matched.update(found)
    return [name for name in names if name in matched]


def _globs(where: Where) -> list[str]:
    """One glob or several as a list; no glob at all is one that matches nothing."""
    if isinstance(where, str):
        return [where]
    return list(where) or [""]


def abridge(names: Iterable[str]) -> str:
    """`blocks.0.attn … blocks.11.attn`: of `names` that differ in numbers only, first and last."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return ", ".join(" … ".join(dict.fromkeys((group[0], group[-1]))) for group in kinds.values())


def _site(name: str, socket: Socket, heads: Heads, root: nn.Module, size: Size) -> Site:
    items = heads.k.shape[-2]
    own = socket.grid()
    if own is not None and math.prod(own) != items:
        raise SurgeryError(
            f"{name!r} was built for {own[0]} x {own[1]} items, an image of size {size} brings {items}. "
            "Say for which images the model was built: input_size=(channels, rows, columns)."
        )
    prefix, grid = 0, own
    if own is None:
        prefix, grid = _layout(root, socket.attends, items, size)
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
        num_answering=_num_answering(root),
        grid=grid,
        biased=heads.bias is not None,
        knows_input=bool(getattr(socket.core, "knows_input", False)),
        chained=is_chained(root, name),
    )


def _layout(root: Any, attends: str, items: int, size: Size) -> tuple[int, tuple[int, int] | None]:
    """Prefix tokens and grid of patches, where the number of tokens agrees with what the model says of itself."""
    if attends not in ("tokens", "class"):
        return 0, None
    known = int(getattr(root, "num_prefix_tokens", 1))
    possible = [known, 0]
    if attends == "class":
        possible.insert(0, 1)
    for prefix in possible:
        grid = _grid(root, items - prefix, size)
        if grid is not None:
            return prefix, grid
    if attends == "tokens" and hasattr(root, "num_prefix_tokens"):
        return known, None
    return 0, None


def _num_answering(root: Any) -> int:
    """Prefix tokens that the head sees: none where it averages patches; registers have no say."""
    if getattr(root, "global_pool", "token") != "token":
        return 0
    if getattr(root, "dist_token", None) is None:
        return 1
    return 2


def _grid(root: Any, patches: int, size: Size) -> tuple[int, int] | None:
    """Rows and columns that make `patches`: as built, else in the proportions of the image."""
    built = getattr(getattr(root, "patch_embed", None), "grid_size", None)
    if isinstance(built, tuple) and math.prod(built) == patches:
        return built[0], built[1]
    rows = math.isqrt(max(patches, 0) * size[1] // size[2])
    if rows and patches % rows == 0 and rows * size[2] == patches // rows * size[1]:
        return rows, patches // rows
    return None


def _no_site(root: nn.Module) -> str:
    alike = re.compile(r"Att(n|ention)|Parallel.*Block")
    found = sorted({type(module).__name__ for module in root.modules() if alike.search(type(module).__name__)})
    holds = "nothing that looks like attention"
    if found:
        holds = f"{', '.join(found)}, for which there is no socket"
    return (
        f"{type(root).__name__} has no attention that can be rewired. It holds {holds}. "
        "Families that can be rewired: `vitruvius list sockets`."
    )
