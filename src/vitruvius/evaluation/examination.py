"""The sanity checks as a command runs them: a few hundred images, a surrogate for robust attention, findings kept.

Robust attention (`rpc`) may hide its gradient behind its thresholds, so it is also attacked through itself with plain
symmetric attention in its place: the same weights, a smooth path.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitruvius._checks import device_of
from vitruvius._files import atomic_write_text
from vitruvius.attention import Core
from vitruvius.attention.rpc import RPC
from vitruvius.evaluation._evaluate import numbered
from vitruvius.evaluation.sanity import Finding, Sanity
from vitruvius.surgery import Socket, inner, restore, rewire


def examine(model: nn.Module, loader: Iterable[Any], eps: float, *, images: int = 256, seed: int = 0) -> list[Finding]:
    """Every check on the first images of a loader; a model with `rpc` is attacked through a plain surrogate too."""
    batches = list(_first(loader, images))
    x, y, ids = (torch.cat(column)[:images] for column in zip(*batches, strict=True))
    device = device_of(model)
    checks = Sanity(eps=eps, seed=seed, surrogate=plain_surrogate(model), batch_size=len(batches[0][1]))
    return checks(model, x.to(device), y.to(device), ids=ids)


def plain_surrogate(model: nn.Module) -> nn.Module | None:
    """A copy with symmetric softmax where this one has `rpc`; None where it has none."""
    robust = [
        name
        for name, module in inner(model).named_modules()
        if isinstance(module, Socket)
        and isinstance(module.core, Core)
        and isinstance(list(module.core.children())[-1], RPC)
    ]
    if not robust:
        return None
    surrogate = copy.deepcopy(model)
    for name in robust:
        restore(surrogate, name)
        rewire(surrogate, "symmetric", "softmax", where=name)
    return surrogate


def save_findings(findings: list[Finding], path: str | Path) -> None:
    """As JSON, one object per check."""
    atomic_write_text(path, json.dumps([finding.to_dict() for finding in findings], indent=1) + "\n")


def _first(loader: Iterable[Any], images: int) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    seen = 0
    for batch in numbered(loader):
        yield batch
        seen += len(batch[1])
        if seen >= images:
            return
