"""Socket: an upstream attention class, subclassed so that it calls `self.core`; the class is swapped in place.

Letters: H heads, D key width, E value width, C model width.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from typing import Any, ClassVar

from torch import Tensor, nn

from vitruvius._checks import check_model
from vitruvius._errors import UnsuitableSite
from vitruvius._registry import first_line
from vitruvius.attention.base import Core
from vitruvius.heads import Attends, HeadWeights

FEEDS_QUERIES = ("q_norm", "q_proj")  # modules of upstream's attention that only queries depend on

_SOCKETS: dict[type[nn.Module], type[Socket]] = {}


class Socket:
    """Mixin before the upstream class: `class ViTSocket(Socket, timm.layers.Attention)`.

    A subclass sets `family` and `attends`, repeats upstream's `forward` with its softmax replaced by
    `self.core(Heads(…))`, and says in `head_weights` where the projections lie, if not in `qkv` and `proj`. The methods
    other than `forward` must work on bare upstream modules too, so they use upstream's attributes only.
    """

    family: ClassVar[str]
    attends: ClassVar[Attends] = "tokens"
    upstream: ClassVar[type[nn.Module]]
    core: nn.Module

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.upstream = next(base for base in cls.__bases__ if issubclass(base, nn.Module))
        _SOCKETS[cls.upstream] = cls

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in FEEDS_QUERIES and isinstance(value, nn.Module) and getattr(self, "core", None) is not None:
            idle = [n for n, p in value.named_parameters() if p.requires_grad]
            if idle and getattr(self.core, "ignores_queries", False):
                warnings.warn(
                    f"{name} was given weights that train ({', '.join(idle)}), but the core of this attention ignores "
                    "the queries: they get no gradient, and distributed training stops at them. Rewire first, then "
                    "give LoRA and its like other layers, e.g. target_modules=['k_proj', 'v_proj'].",
                    stacklevel=2,
                )

    def check(self) -> None:
        """UnsuitableSite where this module cannot be rewired without changing what it computes."""

    def dropout_now(self) -> float:
        """Attention dropout of this moment: nothing in eval mode."""
        module: Any = self
        return float(module.attn_drop.p) if module.training else 0.0

    def reads_queries(self) -> bool:
        """Whether anybody looks at q: its core, or whoever watches what enters the core (`record`)."""
        return not getattr(self.core, "ignores_queries", False) or bool(self.core._forward_pre_hooks)

    def head_weights(self: Any) -> HeadWeights:
        """Views into the projections, head by head; UnsuitableSite where no view exists."""
        return fused_head_weights(self.qkv, self.proj, self.num_heads)

    def width(self) -> int:
        """C, the width of the tokens that come in."""
        return self.head_weights().q.shape[-1]

    def grid(self) -> tuple[int, int] | None:
        """Rows and columns of the items, where the module itself knows them."""
        return None


def socket_of(module: nn.Module) -> type[Socket] | None:
    """The socket for a module, bare or already swapped; exact types only, since a subclass may do something else."""
    kind = type(module)
    if issubclass(kind, Socket):
        return kind
    if kind.__module__.startswith("transformers.models."):  # which is imported, so its sockets cost nothing
        load_transformers_sockets()
    return _SOCKETS.get(kind)


@functools.cache
def load_transformers_sockets() -> None:
    """Make the sockets of transformers' models known; versions that lack one of the classes have none."""
    with contextlib.suppress(ImportError):
        importlib.import_module("vitruvius.surgery._transformers")


def sockets() -> list[tuple[str, str, str]]:
    """(family, upstream class, first line of the docstring) of every socket, by family; transformers' if installed."""
    load_transformers_sockets()
    rows = [
        (socket.family, f"{upstream.__module__}.{upstream.__qualname__}", first_line(socket))
        for upstream, socket in _SOCKETS.items()
    ]
    return sorted(rows)


def inner(model: nn.Module) -> nn.Module:
    """The timm model inside its wrappers, if any: PixelModel, a compiled model, DistributedDataParallel."""
    check_model(model)
    wrapped: Any = model
    while True:
        if getattr(type(wrapped), "looks_through", False):  # how our own wrappers declare themselves
            wrapped = wrapped.model
        elif isinstance(wrapped, nn.parallel.DistributedDataParallel):
            wrapped = wrapped.module
        elif getattr(wrapped, "_orig_mod", None) is not None:
            wrapped = wrapped._orig_mod
        else:
            return wrapped


def cores_of(model: nn.Module) -> dict[str, Core]:
    """The core of every rewired site of `model`, by the name of the site."""
    sockets = {name: module for name, module in inner(model).named_modules() if isinstance(module, Socket)}
    return {name: socket.core for name, socket in sockets.items() if isinstance(socket.core, Core)}


def gate_of(module: Any, x: Tensor) -> Tensor | None:
    """What the output of gated attention is multiplied by, in (0, 1); nothing where the module has no gate."""
    return None if module.gate is None else module.gate(x).sigmoid()


def rows(linear: Any, *shape: int) -> Tensor:
    """The weight of a linear layer or 1x1 convolution, its rows seen as `shape`: (*shape, C), a view."""
    weight: Tensor = linear.weight.detach()
    return weight.view(*shape, weight.shape[1])


def columns(linear: Any, *shape: int) -> Tensor:
    """The weight of a linear layer or 1x1 convolution, its columns seen as `shape`: (C, *shape), a view."""
    weight: Tensor = linear.weight.detach()
    return weight.view(weight.shape[0], *shape)


def biases(bias: Tensor | None, *shape: int) -> Tensor | None:
    """A bias seen as `shape`, a view; nothing stays nothing."""
    return None if bias is None else bias.detach().view(*shape)


def fused_biases(bias: Tensor | None, *shape: int, kind_axis: int = 0) -> tuple[Tensor | None, ...]:
    """The biases of q, k and v (or of k and v) in one bias, seen as `shape` with the kinds along `kind_axis`."""
    shaped = biases(bias, *shape)
    return (None,) * shape[kind_axis] if shaped is None else shaped.unbind(kind_axis)


def fused_head_weights(qkv: Any, proj: Any, num_heads: int) -> HeadWeights:
    """Views where one projection makes q, k and v, one after the other, each head by head."""
    if qkv.weight.shape[0] != 3 * proj.weight.shape[1]:
        raise UnsuitableSite(
            f"{type(qkv).__name__} has {qkv.weight.shape[0]} rows for an attention of width {proj.weight.shape[1]}: no "
            "queries of its own. Start, fold or calibrate the model it was made from, e.g. deit_tiny_patch16_224."
        )
    q, k, v = rows(qkv, 3, num_heads, qkv.weight.shape[0] // (3 * num_heads))  # each (H, D, C)
    q_bias, k_bias, v_bias = fused_biases(qkv.bias, 3, num_heads, q.shape[1])  # each (H, D)
    return HeadWeights(q, k, v, columns(proj, num_heads, v.shape[1]), q_bias, k_bias, v_bias)


def separate_head_weights(q: Any, k: Any, v: Any, proj: Any, num_heads: int) -> HeadWeights:
    """Views where q, k and v have a projection each."""
    shapes = [(num_heads, linear.weight.shape[0] // num_heads) for linear in (q, k, v)]
    q_rows, k_rows, v_rows = (rows(linear, *shape) for linear, shape in zip((q, k, v), shapes, strict=True))
    by_kind = [biases(linear.bias, *shape) for linear, shape in zip((q, k, v), shapes, strict=True)]
    return HeadWeights(q_rows, k_rows, v_rows, columns(proj, *shapes[2]), by_kind[0], by_kind[1], by_kind[2])


def is_plain_linear(module: nn.Module) -> bool:
    """Whether nothing but its weight and bias decides what this linear layer does, so that rows can be left out."""
    watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not watched


def split_heads(x: Tensor, kinds: int, num_heads: int) -> tuple[Tensor, ...]:
    """What a projection made, (B, N, kinds·H·D) → `kinds` tensors (B, H, N, D)."""
    B, N, _ = x.shape
    return x.reshape(B, N, kinds, num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def merge_heads(x: Tensor) -> Tensor:
    """What a core put out, (B, H, N, E) → (B, N, H·E)."""
    return x.transpose(1, 2).flatten(2)
