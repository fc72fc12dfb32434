"""Compile by region: the blocks that a model repeats are compiled once, and only while a training step runs.

`torch.compile` of a whole transformer unrolls its blocks: a minute for twelve copies of one graph. Compiled one by
one, blocks of the same shape share one graph. Three things would break that up, and are taken out of the way: drop
rates, which differ from block to block and become tensors inside; kinds of block of which a model has only a few; and
passes without a gradient, which a recorded step can afford as they are. Weights and their names stay as they are.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

FEW = 4  # kinds with this many times fewer blocks than the most frequent one are not worth a graph


class Regions:
    """The repeated blocks of a model, each with a compiled form that is switched on inside `compiled()`."""

    def __init__(self, model: nn.Module, *, backend: str = "inductor") -> None:
        self.blocks = frequent_blocks(repeated_blocks(model))
        self._forms = [_with_gradient(block, backend) for block in self.blocks]
        self._drops = _differing_drops(self.blocks)

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Inside, calling a block calls its compiled form: a training step, and nothing else.

        Evaluation comes in batches of other sizes, each of which would be compiled anew.
        """
        for block, form in zip(self.blocks, self._forms, strict=True):
            block._compiled_call_impl = form
        for drop in self._drops:
            drop.put_in()
        try:
            with warnings.catch_warnings():  # of the compiler looking at the inputs of a block
                warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
                yield
        finally:
            for drop in self._drops:
                drop.take_out()
            for block in self.blocks:
                block._compiled_call_impl = None


def _with_gradient(block: nn.Module, backend: str) -> Callable[..., Any]:
    """The block's compiled form where gradients are asked for, else the block as it is."""
    form = torch.compile(block._call_impl, backend=backend, dynamic=False)

    def call(*inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            return form(*inputs, **named)
        return block._call_impl(*inputs, **named)

    return call


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The innermost modules that stand in a row with others of their class: a transformer's or a ResNet's blocks."""
    rows = Counter(type(child) for module in model.modules() for child in _row(module))
    found: list[nn.Module] = []
    _collect(model, {kind for kind, count in rows.items() if count > 1}, found)
    return found


def frequent_blocks(blocks: list[nn.Module]) -> list[nn.Module]:
    """Blocks of the most frequent kinds: two class-attention layers beside twelve others are left as they are."""
    counts = Counter(type(block) for block in blocks)
    most = max(counts.values(), default=0)
    return [block for block in blocks if counts[type(block)] * FEW > most]


def _collect(module: nn.Module, kinds: set[type[nn.Module]], found: list[nn.Module]) -> None:
    for child in module.children():
        inside: list[nn.Module] = []
        _collect(child, kinds, inside)
        if inside:
            found.extend(inside)
        elif type(child) in kinds and child not in found:
            found.append(child)


def _row(module: nn.Module) -> list[nn.Module]:
    """The children of a list of modules that are themselves made of modules."""
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        return []
    containers = (nn.Sequential, nn.ModuleList)
    return [child for child in module.children() if any(child.children()) and not isinstance(child, containers)]


# Stochastic depth whose rate is data: as a number it would make a graph for every block.


class TensorDropPath(nn.Module):
    """timm's DropPath; its rate is a tensor, which compiled blocks take as an input."""

    keep: Tensor

    def __init__(self, keep: Tensor, *, scale: bool) -> None:
        """`keep`: () the probability that an image keeps the branch; `scale`: divide what is kept by it."""
        super().__init__()
        self.register_buffer("keep", keep, persistent=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = (torch.rand(len(x), device=x.device) < self.keep).float()  # (B,)
        if self.scale:
            kept = kept / self.keep
        return x * kept.to(x.dtype).view(-1, *[1] * (x.ndim - 1))


class _Drop:
    """A place in a block: what stands there, and what stands there inside `compiled()`."""

    def __init__(self, block: nn.Module, path: str) -> None:
        parent, _, self.name = path.rpartition(".")
        self.parent = block.get_submodule(parent)
        self.original = block.get_submodule(path)
        weight = next(block.parameters())
        keep = weight.new_tensor(1.0 - _rate(self.original), dtype=torch.float32)
        self.stand_in = TensorDropPath(keep, scale=getattr(self.original, "scale_by_keep", True))

    def put_in(self) -> None:
        self.stand_in.training = self.original.training
        self.parent._modules[self.name] = self.stand_in

    def take_out(self) -> None:
        self.parent._modules[self.name] = self.original


def _differing_drops(blocks: list[nn.Module]) -> list[_Drop]:
    """The places of stochastic depth whose rate is not the same in all blocks of a kind; no rate is an identity."""
    found: list[_Drop] = []
    for kind in {type(block) for block in blocks}:
        alike = [block for block in blocks if type(block) is kind]
        for path in _drop_paths(alike):
            if _rates_differ(alike, path):
                found += [_Drop(block, path) for block in alike]
    return found


def _rates_differ(blocks: list[nn.Module], path: str) -> bool:
    return len({_rate(block.get_submodule(path)) for block in blocks}) > 1


def _drop_paths(blocks: list[nn.Module]) -> list[str]:
    """Names under which some of the blocks have a DropPath and all others one too, or an identity."""
    named = [dict(block.named_modules()) for block in blocks]
    paths = {path for modules in named for path, module in modules.items() if type(module) is DropPath}
    return sorted(path for path in paths if _all_have_drop(named, path))


def _all_have_drop(named: list[dict[str, nn.Module]], path: str) -> bool:
    return all(type(modules.get(path)) in (DropPath, nn.Identity) for modules in named)


def _rate(module: nn.Module) -> float:
    """The probability with which an image loses the branch."""
    return float(getattr(module, "drop_prob", None) or 0.0)
