"""Sites: where attention sits in a model, with all sizes, and how a pattern picks some of them.

The sizes come from one run of a ghost, the model copied without its numbers: it lives on the meta device, its tensors
have shapes and no storage, so the run costs nothing and the model itself (mode, buffers, caches, hooks, random state)
is never touched.
"""

from __future__ import annotations

import copy
import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitruvius._errors import ConfigError, NoSiteError, SurgeryError
from vitruvius.heads import Heads, Site
from vitruvius.surgery.base import Socket, inner, socket_of
from vitruvius.surgery.vit import is_chained

Size = tuple[int, int, int]  # channels, rows, columns of an image
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
    """The `sites` of `model` whose names `where` matches; a glob that matches nothing is an error."""
    return {name: sites[name] for name in match(model, list(sites), where)}


def match(model: nn.Module, names: list[str], where: Where) -> list[str]:
    """Of the `names` of a model's sites those that any glob matches, in its order; a glob for nothing is an error."""
    root = inner(model)
    if not names:
        raise NoSiteError(_no_site(root))
    globs = list(where) if isinstance(where, Iterable) and not isinstance(where, str) else [where]
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise ConfigError(
            f"where={where!r}, expected globs over names of sites, such as where={names[0]!r}. Sites: {abridge(names)}."
        )
    matched: set[str] = set()
    for glob in globs:
        of_glob = [name for name in names if fnmatch.fnmatchcase(name, glob)]
        if not of_glob:
            raise NoSiteError(
                f"where={glob!r} matches none of the {len(names)} attention sites of {type(root).__name__}.\n"
                f"Sites: {abridge(names)}"
            )
        matched.update(of_glob)
    return [name for name in names if name in matched]


def abridge(names: Iterable[str]) -> str:
    """`blocks.0.attn … blocks.11.attn`: of `names` that differ in numbers only, first and last."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return ", ".join(" … ".join(dict.fromkeys((group[0], group[-1]))) for group in kinds.values())


def _site(name: str, socket: Socket, heads: Heads, root: nn.Module, size: Size) -> Site:
    items = heads.k.shape[-2]
    answering = 1 if getattr(root, "dist_token", None) is None else 2  # registers have no say
    if getattr(root, "global_pool", "token") != "token":  # the head averages patches
        answering = 0
    prefix, grid = 0, socket.grid()
    if grid is None:
        prefix, grid = _layout(root, socket.attends, items, size)
    elif math.prod(grid) != items:
        raise SurgeryError(
            f"{name!r} was built for {grid[0]} x {grid[1]} items, an image of size {size} brings {items}. "
            "Say for which images the model was built: input_size=(channels, rows, columns)."
        )
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
        num_answering=answering,
        grid=grid,
        biased=heads.bias is not None,
        knows_input=bool(getattr(socket.core, "knows_input", False)),
        chained=is_chained(root, name),
    )


def _layout(root: Any, attends: str, items: int, size: Size) -> tuple[int, tuple[int, int] | None]:
    """Prefix tokens and grid of patches, where the number of tokens agrees with what the model says of itself."""
    if attends not in ("tokens", "class"):
        return 0, None
    declared = prefix_tokens(root)
    for prefix in (1, declared, 0) if attends == "class" else (declared, 0):
        grid = _grid(root, items - prefix, size)
        if grid is not None:
            return prefix, grid
    if attends == "tokens" and hasattr(root, "num_prefix_tokens"):
        return declared, None
    return 0, None


def prefix_tokens(model: Any) -> int:
    """Tokens before the patches, as timm's `model` says, or the config of one of transformers."""
    kind = getattr(getattr(model, "config", None), "model_type", "")
    registers = int(getattr(getattr(model, "config", None), "num_register_tokens", 0) or 0)
    return int(getattr(model, "num_prefix_tokens", 1 + (kind == "deit") + registers))


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
    kinds = sorted({type(module).__name__ for module in root.modules() if alike.search(type(module).__name__)})
    holds = f"{', '.join(kinds)}, for which there is no socket" if kinds else "nothing that looks like attention"
    return (
        f"{type(root).__name__} has no attention that can be rewired. It holds {holds}. "
        "Families that can be rewired: `vitruvius list sockets`."
    )


class Probe(nn.Module):
    """A core that remembers the shapes it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Heads | None = None
        self.knows_input = False

    def forward(self, heads: Heads, x: Tensor | None = None, states: Any = None) -> Tensor:
        self.seen, self.knows_input = heads, x is not None
        return heads.v.new_empty(*heads.q.shape[:-1], heads.v.shape[-1])

    def after(self, tokens: Tensor, heads: Heads, x: Tensor, states: Any) -> tuple[Tensor, Any]:
        return tokens, {}


def dry_run(model: nn.Module, input_size: Size | None) -> tuple[Size, dict[str, tuple[Socket, Heads]]]:
    """The image size used, and what every site that ran was given, in the order of the model's modules."""
    size = input_size or guess_input_size(model)
    ghost = ghost_of(model).eval()
    probed: dict[str, Any] = {}
    for name, module in ghost.named_modules():
        socket = socket_of(module)
        if socket is not None:
            module.__class__, module.core = socket, Probe()
            probed[name] = module
    if probed:
        weight = next(p for p in ghost.parameters() if p.is_floating_point())
        try:
            with torch.no_grad():
                ghost(weight.new_zeros(1, *size))
        except Exception as error:
            raise SurgeryError(
                f"a dry run of {type(model).__name__} on one image of size {size} failed: {error}. "
                "If the model wants another size, say so: input_size=(channels, rows, columns)."
            ) from error
    return size, {name: (module, module.core.seen) for name, module in probed.items() if module.core.seen is not None}


def ghost_of(model: nn.Module) -> Any:
    """A deep copy on the meta device, without hooks."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _tensors(vars(module)):
            ghost = torch.empty_like(tensor, device="meta", requires_grad=False)
            memo[id(tensor)] = nn.Parameter(ghost, requires_grad=False) if isinstance(tensor, nn.Parameter) else ghost
        for name, value in vars(module).items():
            if "_hooks" in name and isinstance(value, dict):
                memo[id(value)] = type(value)()
    return copy.deepcopy(model, memo)


def guess_input_size(model: nn.Module) -> Size:
    """Channels, rows and columns as the model was built, else as timm's configuration says."""
    if hasattr(model, "feature_info") and isinstance(getattr(model, "model", None), nn.Module):
        model = cast(nn.Module, model.model)  # inside timm's feature extractor (`features_only=True`)
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    hugging: Any = getattr(model, "config", None)  # of a model of transformers, or of its part for images
    hugging = getattr(hugging, "vision_config", hugging)
    size = getattr(hugging, "image_size", None)
    stated = (int(getattr(hugging, "num_channels", 3)), *to_2tuple(size)) if size else (3, 224, 224)
    configured = config.get("input_size") or stated
    convolutions = (module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d))
    channels = getattr(model, "in_chans", None) or next(convolutions, None) or configured[0]
    rows, columns = _built_size(model) or configured[1:]
    return channels, rows, columns


def _built_size(model: Any) -> tuple[int, int] | None:
    """The image size a model was built for, where it remembers one."""
    for holder in (getattr(model, "patch_embed", None), model):
        size = getattr(holder, "img_size", None)
        if isinstance(size, tuple) and len(size) == 2:
            return size
    stride = getattr(getattr(model, "stem", None), "stride", None)
    if not isinstance(stride, int):
        return None
    for module in model.modules():  # LeViT: a stem of known stride, then attention of fixed resolution
        if socket_of(module) is not None and hasattr(module, "resolution"):
            rows, columns = module.resolution
            return rows * stride, columns * stride
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in an object's dictionary, and in the dictionaries therein (parameters, buffers, caches)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
