"""Straight through: a model with the same answers whose operations without gradient pass it on (BPDA by itself).

Athalye et al. 2018, arXiv:1802.00420, section 4.1: where f(x) ≈ x, the backward pass of f is replaced by the identity.
Nothing of the model is changed or copied: while it runs, roundings, signs, steps, casts to whole numbers, one-hot
classes, `detach` and `no_grad` are watched for, and so are modules whose output has no gradient to their input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FLAT = {"round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside", "floor_divide"}
CUT = {"detach", "data.__get__"}
WHOLE = {"byte", "char", "short", "int", "long", "bool", "to", "type", "one_hot"}  # what makes whole numbers
WHOLE |= {"gt", "ge", "lt", "le", "__gt__", "__ge__", "__lt__", "__le__", "greater", "less"}
FLOATS = {"float", "double", "half", "bfloat16"}
CASTS = {"to", "type", "type_as"}
ARITHMETIC = {"div", "true_divide", "divide", "mul", "multiply", "add", "sub", "__truediv__", "__mul__", "__rmul__"}
ARITHMETIC |= {"__add__", "__radd__", "__sub__", "__rsub__"}


class StraightThrough(nn.Module):
    """Answers like `model`; gradients pass through whatever has none. `replaced` counts what was met in the last pass.

    model: in eval mode. modules: names of modules inside it that are passed through too (`modules_without_gradient`).
    smooth: leave out what has no gradient, so that the answer is another one: the model without its mask.
    """

    def __init__(self, model: nn.Module, modules: tuple[str, ...] = (), *, smooth: bool = False) -> None:
        super().__init__()
        self.model = model
        self.modules_passed = modules
        self.smooth = smooth
        self.training = model.training
        self.replaced = 0

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K) of images `x` (B, C, H, W)."""
        watch = _StraightThroughMode(self.smooth)

        def pass_through(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            return watch.pass_through(args[0], out)

        with ExitStack() as hooks, watch:
            for name in self.modules_passed:
                hooks.enter_context(self.model.get_submodule(name).register_forward_hook(pass_through))
            answer: Tensor = self.model(x * 1)  # x itself may be a leaf, which must not be changed in place
        answer = watch.as_float(answer)
        self.replaced = watch.replaced
        return answer


class ZeroGradient(nn.Module):
    """Answers like `model`, with a gradient of zero where it has none at all, so that it can be searched."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K) of images `x` (B, C, H, W)."""
        answer: Tensor = self.model(x)
        if answer.requires_grad or not x.requires_grad:
            return answer
        return answer + 0 * x.flatten(1).sum(1, keepdim=True)


class InFloat64(nn.Module):
    """A copy of a model in float64, whose gradient is scaled to 1 for each image before it is rounded to float32.

    So a gradient of 1e-100, as of a softmax that is all but one-hot, still points somewhere.
    """

    def __init__(self, copied: nn.Module) -> None:
        super().__init__()
        self.model = copied.double()
        self.training = copied.training

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K) of images `x` (B, C, H, W), in their precision."""
        double = x.double() * 1
        if double.requires_grad:
            double.register_hook(_scaled_to_one)
        answer: Tensor = self.model(double)
        return answer.to(x.dtype)


def modules_without_gradient(model: nn.Module, x: Tensor) -> tuple[str, ...]:
    """Names of the innermost modules whose output, of their input's shape, has no gradient or a zero one to it.

    model: in eval mode. x: a few images (B, …).
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        before = args[0] if args else None
        if isinstance(before, Tensor) and isinstance(out, Tensor) and before.shape == out.shape:
            seen[names[module]] = (before, out)

    names = {module: name for name, module in model.named_modules() if name}
    with ExitStack() as hooks, torch.enable_grad():
        for module in names:
            hooks.enter_context(module.register_forward_hook(watch))
        model(x.detach().requires_grad_())
    flat = [name for name, (before, after) in seen.items() if _is_flat(before, after)]
    return tuple(name for name in flat if not any(other.startswith(f"{name}.") for other in flat))


class _PassThrough(torch.autograd.Function):
    """The value of f(x) with the gradient of x."""

    @staticmethod
    def forward(_ctx: Any, _x: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _scaled_to_one(grad: Tensor) -> Tensor:
    """A gradient divided by its largest entry, image by image."""
    largest = grad.flatten(1).abs().amax(1)
    scale = torch.where(largest > 0, largest, 1.0)
    return grad / scale.view(-1, *[1] * (grad.ndim - 1))


class _StraightThroughMode(TorchFunctionMode):
    """Calls of torch, one by one: those without gradient are made to have that of the identity."""

    def __init__(self, smooth: bool) -> None:
        super().__init__()
        self.smooth = smooth
        self.replaced = 0
        self.sources: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of a whole tensor: itself, what it was made of

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = kwargs or {}
        name = _name_of(func)
        if name in ARITHMETIC:
            args = tuple(self.as_float(value) for value in args)
        if not args or not isinstance(args[0], Tensor):
            return func(*args, **settings)
        if _becomes_float(name, args, settings):
            args = (self.as_float(args[0]), *args[1:])
        value = self._call(func, args, settings)
        return self._passed_on(name, args[0], value)

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """What the call gives, with a gradient inside no_grad too."""
        hidden = not torch.is_grad_enabled() and _needs_gradient(args)
        self.replaced += hidden
        with torch.set_grad_enabled(torch.is_grad_enabled() or hidden):
            return func(*args, **settings)

    def as_float(self, value: Any) -> Any:
        """A whole tensor that was made of one with a gradient, as numbers with that gradient; all else as it is."""
        if not isinstance(value, Tensor) or id(value) not in self.sources:
            return value
        _, source = self.sources[id(value)]
        return self.pass_through(source, value.to(source.dtype))

    def pass_through(self, source: Tensor, value: Tensor) -> Tensor:
        """The value with the gradient of its source, or the source itself in its place."""
        self.replaced += 1
        if self.smooth:
            return source
        return _PassThrough.apply(source, value)

    def _passed_on(self, name: str, first: Tensor, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name in CUT and first.requires_grad:
            self.replaced += 1
            return first
        if name in FLAT and first.requires_grad and value.shape == first.shape:
            return self.pass_through(first, value.detach())
        if not value.is_floating_point():  # of what is it made: a comparison, a cast, a class that is then marked?
            made_of = self.sources.get(id(first), (first, first))[1]
            if made_of.requires_grad and (name == "argmax" or (name in WHOLE and value.shape == made_of.shape)):
                self.sources[id(value)] = (value, made_of)
        return value


def _name_of(func: Callable[..., Any]) -> str:
    """`round` for torch.round and Tensor.round; `data.__get__` for a property."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return f"{getattr(getattr(func, '__self__', None), '__name__', '')}.__get__"
    return name


def _needs_gradient(args: tuple[Any, ...]) -> bool:
    """Whether a tensor among the arguments, or in a list of them, has a gradient to pass on."""
    parts = itertools.chain.from_iterable(value if isinstance(value, list | tuple) else (value,) for value in args)
    return any(isinstance(part, Tensor) and part.requires_grad for part in parts)


def _becomes_float(name: str, args: tuple[Any, ...], settings: dict[str, Any]) -> bool:
    """Whether the call is a cast to a floating dtype."""
    if name not in CASTS:
        return name in FLOATS
    wanted = (value.dtype if isinstance(value, Tensor) else value for value in (*args[1:], *settings.values()))
    return next((value.is_floating_point for value in wanted if isinstance(value, torch.dtype)), False)


def _is_flat(before: Tensor, after: Tensor) -> bool:
    """Whether a change of what goes in would, by the gradient, change nothing of what comes out."""
    if not before.requires_grad or not after.is_floating_point() or after is before:
        return False
    if not after.requires_grad:
        return True
    generator = torch.Generator(after.device).manual_seed(0)
    weights = torch.randn(after.shape, generator=generator, device=after.device, dtype=after.dtype)
    (grad,) = torch.autograd.grad(after, before, weights, retain_graph=True, allow_unused=True)
    return grad is None or not bool(grad.any())
