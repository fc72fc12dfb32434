"""Supervised classification: cross-entropy on hard or soft labels, plus the penalties of attention stages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.task import ClassificationTask
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.tasks._base import Penalties, tasks


@tasks.register("supervised")
class Supervised(ClassificationTask):
    """Cross-entropy; `penalty` weighs what stages such as low_rank ask to keep small."""

    def __init__(self, model: nn.Module, *, smoothing: float = 0.0, binary: bool = False, penalty: float = 0.0) -> None:
        if not 0 <= smoothing < 1:
            raise ConfigError(f"task.smoothing = {smoothing}, expected a number from 0 to below 1.")
        super().__init__(model, Criterion(smoothing=smoothing, binary=binary), verbose=False)
        self.penalty = penalty
        self.penalties = Penalties(model) if penalty else None
        if self.penalties is not None and not self.penalties.stages:
            raise ConfigError(
                f"task.penalty = {penalty}, but no part of the model's attention has a penalty. "
                "Leave it out, or add a part such as low_rank."
            )

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        if self.penalties is None:
            output = self.trainable_module(input)
            return {"loss": self.criterion(output, target), "output": output}
        with self.penalties.collecting() as terms:
            output = self.trainable_module(input)
        penalty = torch.stack(terms).sum()
        loss = self.criterion(output, target) + self.penalty * penalty
        return {"loss": loss, "output": output, "penalty": penalty}


class Criterion(nn.Module):
    """Cross-entropy, or binary cross-entropy a class, on labels (B) or distributions (B, K)."""

    def __init__(self, *, smoothing: float = 0.0, binary: bool = False) -> None:
        super().__init__()
        self.smoothing, self.binary = smoothing, binary

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        if not self.binary:
            return F.cross_entropy(logits, target, label_smoothing=self.smoothing if target.dim() == 1 else 0.0)
        if target.dim() == 1:
            target = F.one_hot(target, logits.shape[1]).to(logits)
            target = target * (1 - self.smoothing) + self.smoothing / logits.shape[1]
        return F.binary_cross_entropy_with_logits(logits, target)
