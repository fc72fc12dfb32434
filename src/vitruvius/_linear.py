"""Linear layers in float32 on AMD processors, multiplied by oneDNN instead of MKL.

PyTorch multiplies float32 matrices on a CPU by MKL, which leaves half the width of AMD's AVX-512 units unused. oneDNN,
which PyTorch brings along, takes half the time there (docs/speed.md).
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

LEAST_PRODUCT = 2**21  # multiplications of a layer; smaller ones gain less than oneDNN takes to start
LEAST_WORK = 2**19  # multiplications of all layers for each module; with fewer, looking at every call costs more


class _Work(NamedTuple):
    """What the linear layers of a model have to do."""

    modules: int
    weights: int  # entries of float32 in linear layers
    patch: int  # pixels that make a token, by the first convolution; 0: a row for each image


_known: WeakKeyDictionary[nn.Module, _Work] = WeakKeyDictionary()


def fast_linear(model: object, x: Tensor) -> AbstractContextManager[Any]:
    """Inside, `F.linear` (and so `nn.Linear`) in float32 is multiplied by the faster library, gradients too.

    `model` is about to see the images `x`. Only the plain case is changed: no transform, trace, compilation, autocast
    or mode of others that wants to see PyTorch's own operation; and only where layers are large enough for the batch.
    """
    traced = torch.compiler.is_compiling() or torch._C._is_tracing()
    if traced or x.device.type != "cpu" or x.dtype != torch.float32 or not isinstance(model, nn.Module):
        return nullcontext()
    return _ByOneDNN() if onednn_is_faster() and _pays(model, x) and not _others_watch() else nullcontext()


def _pays(model: nn.Module, x: Tensor) -> bool:
    """By counting, not by a clock: the same model and batch are multiplied alike in every run."""
    if model not in _known:
        _known[model] = _work(model)
    modules, weights, patch = _known[model]
    rows = x.numel() // patch if patch else len(x)
    return weights * rows >= LEAST_WORK * modules


def _work(model: nn.Module) -> _Work:
    modules = list(model.modules())
    weights = [m.weight for m in modules if isinstance(m, nn.Linear) and m.weight.dtype == torch.float32]
    convolutions = [m.weight for m in modules if isinstance(m, nn.Conv2d)]
    entries = sum(w.numel() for w in weights) if len(weights) > len(convolutions) else 0  # else a classifier, one row
    return _Work(len(modules), entries, convolutions[0][0].numel() if convolutions else 0)


def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 faster than MKL here; never while `torch.backends.mkldnn` is switched off."""
    return bool(torch._C._get_mkldnn_enabled()) and _amd_with_avx512()


@functools.cache
def _amd_with_avx512() -> bool:
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    info = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (info.read_text(encoding="utf8") if info.exists() else platform.processor())


def _others_watch() -> bool:
    return (
        torch._C._len_torch_function_stack() > 0
        or _get_current_dispatch_mode() is not None
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


class _ByOneDNN(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, with the names that `F.linear` gives its arguments."""
    plain = type(input) in (Tensor, nn.Parameter) and type(weight) in (Tensor, nn.Parameter) and weight.dim() == 2
    if not plain or input.dtype != torch.float32 or weight.dtype != torch.float32 or input.dim() < 2:
        return F.linear(input, weight, bias)
    if input.numel() * weight.shape[0] < LEAST_PRODUCT or torch.is_autocast_enabled("cpu"):
        return F.linear(input, weight, bias)
    return Linear.apply(input, weight, bias) if torch.is_grad_enabled() else product(input, weight, bias)


class Linear(torch.autograd.Function):
    """x Wᵀ + b by oneDNN, with its gradients, as often as one likes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        to_x, to_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if to_weight else None, weight if to_x else None)
        ctx.wide = weight.shape[0] > weight.shape[1]
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        again = Linear.apply if torch.is_grad_enabled() else product  # a gradient of this gradient may be wanted
        rows = grad.reshape(-1, grad.shape[-1])  # (n, O)
        to_x = to_weight = None
        if weight is not None:
            to_x = again(grad, weight.mT, None)
        if x is not None:
            inputs = x.reshape(-1, x.shape[-1])  # (n, C); oneDNN is fastest where the result has more columns than rows
            to_weight = again(inputs.mT, rows.mT, None).mT if ctx.wide else again(rows.mT, inputs.mT, None)
        return to_x, to_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, (…, O), for `x` (…, C) and `weight` (O, C), by oneDNN, which copies an `x` that is not contiguous.

    Of a weight, neither whose rows nor whose columns lie in order, it takes a hundred times as long.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
