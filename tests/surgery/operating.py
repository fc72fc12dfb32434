"""Tools for these tests: other cores, a wrapper, and what modules are called with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from families import FAMILIES, Family
from vitruvius.attention import Kernel
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site
from vitruvius.surgery import rewire
from vitruvius.surgery.base import Socket

BY_NAME = {family.name: family for family in FAMILIES}
VARIANTS = {"vit_narrow", "vit_qk_norm", "vit_gated", "vit_registers", "deit_distilled", "rope_mixed", "rope_separate",
            "rope_gated", "eva_fused", "eva_gated", "dinov3", "beit_shared", "relpos_shared", "maxvit_tf",
            "differential_norms"}  # fmt: skip
ONE_EACH = [family for family in FAMILIES if family.name not in VARIANTS]  # for the slower checks


class Zeros(Kernel):
    """Returns zeros: what remains is a model without attention."""

    def __init__(self, site: Site) -> None:
        super().__init__()

    def forward(self, heads: Heads) -> Tensor:
        return torch.zeros_like(attend(heads))


class Disturbed(Kernel):
    """Softmax attention, with one added to all that the first head says."""

    def __init__(self, site: Site) -> None:
        super().__init__()

    def forward(self, heads: Heads) -> Tensor:
        out = attend(heads).clone()
        out[:, 0] += 1
        return out


class Scaled(Kernel):
    """Attention times a parameter."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(site.num_heads, 1, 1))

    def forward(self, heads: Heads) -> Tensor:
        return attend(heads) * self.factor


class Wrapper(nn.Module):
    """A wrapper that surgery looks through."""

    looks_through = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


def rewired(model: nn.Module, family: Family, *parts: Any) -> nn.Module:
    return rewire(model, *(parts or ("softmax",)), input_size=family.input_size)


def inputs_of(model: nn.Module, x: Tensor, modules: list[nn.Module]) -> list[tuple[Any, Any]]:
    """What each module is called with when the model runs."""
    calls: dict[nn.Module, tuple[Any, Any]] = {}
    handles = [
        m.register_forward_pre_hook(lambda m, args, kwargs: calls.update({m: (args, kwargs)}), with_kwargs=True)
        for m in modules
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return [calls[m] for m in modules]


def heads_of(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """What the cores of a rewired model are given."""
    cores = {name: module.core for name, module in model.named_modules() if isinstance(module, Socket)}
    calls = inputs_of(model, x, list(cores.values()))
    return {name: args[0] for name, (args, _) in zip(cores, calls, strict=True)}


def gradient(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = model(x)
    sum(o.square().sum() for o in (out if isinstance(out, tuple) else (out,))).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]
