"""What inits share: random numbers, the walk through a model, and the values PyTorch's own constructors draw.

A base init writes the weights and biases of linear layers, convolutions and norms, and the tables of positions
and tokens. It leaves alone what is frozen (fixed sin-cos positions), what it does not know (layer scales,
relative position tables, temperatures) and the parts plugged in by surgery (`….core.…`), which begin in their
own way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

CLASS_TOKENS = ("cls_token", "dist_token", "reg_token")


def uniform(like: Tensor, bound: float, generator: torch.Generator) -> Tensor:
    """Uniform(−bound, bound)."""
    return _blank(like, generator).uniform_(-bound, bound, generator=generator)


def normal(like: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """N(0, std²)."""
    return _blank(like, generator).normal_(0.0, std, generator=generator)


def truncated_normal(like: Tensor, std: float, cut: float, generator: torch.Generator) -> Tensor:
    """N(0, std²) cut at ±cut, by the inverse of the distribution function: one uniform number per entry."""
    edge = math.erf(cut / std / math.sqrt(2))
    drawn = _blank(like, generator).uniform_(-edge, edge, generator=generator)
    most = 1 - torch.finfo(drawn.dtype).eps / 2  # one number in 2²⁴ is -1 itself, whose inverse is infinite
    return drawn.clamp_(-most, most).erfinv_().mul_(std * math.sqrt(2)).clamp_(-cut, cut)


def _blank(like: Tensor, generator: torch.Generator) -> Tensor:
    precision = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(like.shape, dtype=precision, device=generator.device)


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters of their own that are not frozen, by name, parts of surgery left out."""
    for name, module in model.named_modules():
        trainable = any(p.requires_grad for p in module.parameters(recurse=False))
        if trainable and "core" not in name.split("."):
            yield name, module


def tokens(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The learned tables and tokens of a model: `pos_embed`, then those of `CLASS_TOKENS` it has."""
    for name in ("pos_embed", *CLASS_TOKENS):
        value = getattr(model, name, None)
        if isinstance(value, nn.Parameter) and value.requires_grad:
            yield name, value.detach()


def draw_tokens(model: nn.Module, generator: torch.Generator) -> None:
    """timm's start: positions of std 0.02, tokens of std 1e-6."""
    for name, token in tokens(model):
        if name == "pos_embed":
            token.copy_(truncated_normal(token, 0.02, 2.0, generator))
        else:
            token.copy_(normal(token, 1e-6, generator))


def reset(module: nn.Module, generator: torch.Generator) -> None:
    """What PyTorch's constructor does: uniform within ±1/√fan_in for layers, ones and zeros for norms."""
    if is_layer(module):
        bound = 1 / math.sqrt(fan_in(module))
        weight(module).copy_(uniform(weight(module), bound, generator))
        if (bias := bias_of(module)) is not None:
            bias.copy_(uniform(bias, bound, generator))
    elif is_norm(module):
        weight(module).fill_(1.0)
        if (bias := bias_of(module)) is not None:
            bias.zero_()


def is_layer(module: nn.Module) -> bool:
    """A linear layer or a convolution."""
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)


def is_norm(module: nn.Module) -> bool:
    """A norm with a weight vector, whichever library made it."""
    own = dict(module.named_parameters(recurse=False))
    return "norm" in type(module).__name__.lower() and "weight" in own and own["weight"].ndim == 1


def weight(module: nn.Module) -> Tensor:
    value = module.weight
    assert isinstance(value, Tensor)
    return value.detach()


def bias_of(module: nn.Module) -> Tensor | None:
    value = getattr(module, "bias", None)
    return value.detach() if isinstance(value, nn.Parameter) else None


def zero_bias(module: nn.Module) -> None:
    if (bias := bias_of(module)) is not None:
        bias.zero_()


def fan_in(module: nn.Module) -> int:
    """Inputs of one output: C for a linear layer, C·rows·columns / groups for a convolution."""
    return weight(module)[0].numel()


def fan_out(module: nn.Module) -> int:
    return weight(module).shape[0] * weight(module)[0, 0].numel()
