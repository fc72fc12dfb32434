"""Compile by region: the blocks that a model repeats are compiled once, and only while a training step runs.

`torch.compile` of a whole transformer unrolls its blocks: a minute for twelve copies of one graph. Compiled one by
one, blocks of the same shape share one graph. Weights and their names stay as they are.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Regions:
    """The repeated blocks of a model, each with a compiled form that is switched on inside `compiled()`."""

    def __init__(self, model: nn.Module, *, backend: str = "inductor") -> None:
        self.blocks = repeated_blocks(model)
        self._forms = [torch.compile(block._call_impl, backend=backend, dynamic=False) for block in self.blocks]

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Inside, calling a block calls its compiled form: a training step, and nothing else.

        Evaluation comes in batches of other sizes, each of which would be compiled anew.
        """
        for block, form in zip(self.blocks, self._forms, strict=True):
            block._compiled_call_impl = form
        try:
            with warnings.catch_warnings():  # of the compiler looking at the inputs of a block
                warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
                yield
        finally:
            for block in self.blocks:
                block._compiled_call_impl = None


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The innermost modules that stand in a row with others of their class: a transformer's or a ResNet's blocks."""
    rows = Counter(type(child) for module in model.modules() for child in _row(module))
    found: list[nn.Module] = []
    _collect(model, {kind for kind, count in rows.items() if count > 1}, found)
    return found


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
