"""Let the auto-encoders of a model begin as the principal components of the activations they will see.

H heads, r rank
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import in_eval_mode
from vitruvius._errors import DataError, SurgeryError
from vitruvius.attention.low_rank import LowRank, principal_heads
from vitruvius.heads import Heads


class Moments:
    """Mean and covariance of heads over samples, tokens and width, streamed in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.total = torch.zeros(())
        self.gram = torch.zeros(())

    def add(self, x: Tensor) -> None:
        rows = x.detach().double().transpose(0, 1).flatten(1)  # (H, B N D)
        self.count += rows.shape[1]
        self.total = self.total.to(rows.device) + rows.sum(1)
        self.gram = self.gram.to(rows.device) + rows @ rows.mT

    def mean(self) -> Tensor:
        return self.total / self.count

    def covariance(self) -> Tensor:
        return self.gram / self.count - torch.outer(self.mean(), self.mean())


@torch.no_grad()
def fit_low_rank(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """Start every `low_rank` of `model` from what flows through it on `batches` of input; in place, returns the model.

    While it looks, the stages pass their input on unchanged, so each sees the pretrained activations.
    """
    stages = {name: module for name, module in model.named_modules() if isinstance(module, LowRank)}
    if not stages:
        raise SurgeryError("the model has no 'low_rank' part to fit; rewire it first.")
    moments = _observe(model, stages, batches)
    for (name, tensor), seen in moments.items():
        _start(stages[name], tensor, seen, name)
    return model


def _observe(
    model: nn.Module, stages: Mapping[str, LowRank], batches: Iterable[Tensor]
) -> dict[tuple[str, str], Moments]:
    """Moments of what each stage is given, by site and tensor."""
    moments = {(name, tensor): Moments() for name, stage in stages.items() for tensor in stage.tensors}
    hooks = [stage.register_forward_hook(_observer(name, moments)) for name, stage in stages.items()]
    try:
        with in_eval_mode(model):
            for batch in batches:
                model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return moments


def _observer(name: str, moments: dict[tuple[str, str], Moments]) -> Any:
    def look(stage: LowRank, args: tuple[Heads], _: Heads) -> Heads:
        for tensor in stage.tensors:
            moments[name, tensor].add(getattr(args[0], tensor))
        return args[0]

    return look


def _start(stage: LowRank, tensor: str, seen: Moments, name: str) -> None:
    if seen.count == 0:
        raise DataError(f"no batch reached {name!r}; fitting needs at least one.")
    rank = stage.get_parameter(f"{tensor}.0.weight").shape[0]
    stage.set_projection(tensor, principal_heads(seen.covariance(), rank), seen.mean())
