"""Notes of a model's attention: rules that make it again, and how models of transformers carry them.

`save_pretrained` and `push_to_hub` write what the config holds, so the rules travel as `vitruvius` in config.json. A
plain `from_pretrained` would ignore them, and a core without weights with them; so such a model also has a buffer MARK,
which transformers then reports as an unexpected key, whether or not this package is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vitruvius._version import __version__
from vitruvius.attention.base import Core
from vitruvius.surgery.base import Socket, inner, socket_of

KEY = "vitruvius"
MARK = "rewired_by_vitruvius"


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
    for number, network in enumerate(_of_transformers(root)):
        rules = [] if number else attention_of(network)  # the outermost speaks for those inside
        if hasattr(network, MARK):
            delattr(network, MARK)
        if rules:
            setattr(network.config, KEY, {"version": __version__, "attention": rules})
            network.register_buffer(MARK, torch.zeros((), dtype=torch.uint8, device=network.device))
        elif not number and hasattr(network.config, KEY):
            delattr(network.config, KEY)


def _of_transformers(root: nn.Module) -> Iterator[Any]:
    transformers: Any = sys.modules.get("transformers")
    for module in root.modules() if transformers is not None else ():
        if isinstance(module, transformers.PreTrainedModel):
            yield module
