"""Base inits: starts for a whole model, all of whose numbers come from `generator`.

A base init writes the weights and biases of linear layers, convolutions and norms, and the tables of positions and
tokens. It leaves alone what is frozen (fixed sin-cos positions), what it does not know (layer scales, relative position
tables, temperatures) and the parts plugged in by surgery (`….core.…`), which start in their own way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.init.base import bases, normal, truncated_normal, uniform

CLASS_TOKENS = ("cls_token", "dist_token", "reg_token")
UNIT = 0.87962566103423978  # std of a standard normal cut at ±2
LinearOrConv = nn.Linear | nn.Conv1d | nn.Conv2d


@bases.register("timm")
@torch.no_grad()
def timm(model: nn.Module, *, generator: torch.Generator) -> None:
    """timm's default for ViTs: linear weights N(0, 0.02²), zero biases, convolutions as PyTorch constructs them."""
    draw_tokens(model, generator)
    for _, module in walk(model):
        if isinstance(module, nn.Linear):
            write(module, truncated_normal(module.weight, 0.02, 2.0, generator))
        else:
            reset(module, generator)


@bases.register("trunc_normal")
@torch.no_grad()
def trunc_normal(model: nn.Module, *, std: float = 0.02, generator: torch.Generator) -> None:
    """Linear layers and convolutions N(0, std²) cut at two std, zero biases; positions and tokens as timm's."""
    if std <= 0:
        raise ConfigError(f"std={std}, expected a positive number.")
    draw_tokens(model, generator)
    for _, module in walk(model):
        if isinstance(module, LinearOrConv):
            write(module, truncated_normal(module.weight, std, 2 * std, generator))
        else:
            reset(module, generator)


@bases.register("jax")
@torch.no_grad()
def jax(model: nn.Module, *, negative_log_head_bias: bool = False, generator: torch.Generator) -> None:
    """Xavier-uniform linear layers, tiny MLP biases, LeCun-normal convolutions, a head of zeros.

    The start of the original JAX ViTs (Dosovitskiy et al. 2021, arXiv:2010.11929), as timm carries it over.
    `negative_log_head_bias` starts the head's bias at −ln(classes), for losses of many binary classes (timm's
    `jax_nlhb`).
    """
    draw_tokens(model, generator)
    for name, module in walk(model):
        if isinstance(module, nn.Linear) and name.startswith("head"):
            write(module, torch.zeros_like(module.weight))
            if negative_log_head_bias and module.bias is not None:
                module.bias.fill_(-math.log(module.out_features))
        elif isinstance(module, nn.Linear):
            bound = math.sqrt(6 / (fan_in(module) + fan_out(module)))
            write(module, uniform(module.weight, bound, generator))
            if "mlp" in name and module.bias is not None:
                module.bias.copy_(normal(module.bias, 1e-6, generator))
        elif isinstance(module, nn.Conv2d):
            std = fan_in(module) ** -0.5 / UNIT
            write(module, std * truncated_normal(module.weight, 1.0, 2.0, generator))
        else:
            reset(module, generator)


@bases.register("moco")
@torch.no_grad()
def moco(model: nn.Module, *, generator: torch.Generator) -> None:
    """Xavier-uniform linear layers with q, k and v counted apart, zero biases, convolutions as PyTorch's.

    The start of MoCo v3 (Chen et al. 2021, arXiv:2104.02057), as timm carries it over.
    """
    draw_tokens(model, generator)
    for name, module in walk(model):
        if isinstance(module, nn.Linear):
            outputs = fan_out(module) // 3 if "qkv" in name else fan_out(module)
            bound = math.sqrt(6 / (outputs + fan_in(module)))
            write(module, uniform(module.weight, bound, generator))
        else:
            reset(module, generator)


@bases.register("orthogonal")
@torch.no_grad()
def orthogonal(model: nn.Module, *, gain: float = 1.0, generator: torch.Generator) -> None:
    """Linear layers and convolutions with orthonormal rows or columns times gain, zero biases; tokens as timm's.

    Saxe et al. 2014, arXiv:1312.6120. q, k and v of one fused projection are each orthogonal.
    """
    if gain <= 0:
        raise ConfigError(f"gain={gain}, expected a positive number.")
    draw_tokens(model, generator)
    for name, module in walk(model):
        if isinstance(module, LinearOrConv):
            blocks = module.weight.chunk(3) if "qkv" in name else (module.weight,)
            drawn = [gain * random_orthogonal(block.flatten(1), generator).view_as(block) for block in blocks]
            write(module, torch.cat(drawn))
        else:
            reset(module, generator)


@bases.register("skip")
@torch.no_grad()
def skip(model: nn.Module, *, generator: torch.Generator) -> None:
    """PyTorch's constructor values: uniform within ±1/√fan_in, biases too; positions N(0, 0.02²), tokens zero.

    timm calls it `skip`; the released impulse and mimetic inits start from it.
    """
    for name, token in tokens(model):
        if name == "pos_embed":
            token.copy_(normal(token, 0.02, generator))
        else:
            token.zero_()
    for _, module in walk(model):
        reset(module, generator)


def random_orthogonal(like: Tensor, generator: torch.Generator) -> Tensor:
    """A uniformly random matrix whose shorter side is orthonormal: QR of a normal one, its signs made uniform."""
    rows, columns = like.shape
    tall = like.new_empty(max(rows, columns), min(rows, columns))
    q, r = torch.linalg.qr(normal(tall, 1.0, generator))
    q = q * r.diagonal().sign()
    return q.mT if rows < columns else q


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
            yield name, value


def draw_tokens(model: nn.Module, generator: torch.Generator) -> None:
    """timm's start: positions of std 0.02, tokens of std 1e-6."""
    for name, token in tokens(model):
        if name == "pos_embed":
            token.copy_(truncated_normal(token, 0.02, 2.0, generator))
        else:
            token.copy_(normal(token, 1e-6, generator))


def reset(module: nn.Module, generator: torch.Generator) -> None:
    """What PyTorch's constructor does: uniform within ±1/√fan_in for layers, ones and zeros for norms."""
    parameters = dict(module.named_parameters(recurse=False))
    if isinstance(module, LinearOrConv):
        bound = 1 / math.sqrt(fan_in(module))
        for name in ("weight", "bias"):
            if name in parameters:
                parameters[name].copy_(uniform(parameters[name], bound, generator))
    elif "norm" in type(module).__name__.lower() and "weight" in parameters and parameters["weight"].ndim == 1:
        parameters["weight"].fill_(1.0)
        if "bias" in parameters:
            parameters["bias"].zero_()


def write(module: LinearOrConv, weight: Tensor) -> None:
    """A weight, and a bias of zeros where there is one."""
    module.weight.copy_(weight)
    if module.bias is not None:
        module.bias.zero_()


def fan_in(module: LinearOrConv) -> int:
    """Inputs of one output: C for a linear layer, C·rows·columns / groups for a convolution."""
    return module.weight[0].numel()


def fan_out(module: LinearOrConv) -> int:
    return module.weight.shape[0] * module.weight[0, 0].numel()
