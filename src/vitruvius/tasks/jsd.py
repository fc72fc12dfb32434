"""AugMix's consistency: cross-entropy on the image, and answers that agree over its augmented versions
(Hendrycks et al. 2020, arXiv:1912.02781, equation 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timm.loss import JsdCrossEntropy
from torch import Tensor, nn

from vitruvius._checks import check_weight
from vitruvius._config import key
from vitruvius._errors import ConfigError, DataError
from vitruvius.tasks.base import Objective, tasks


@tasks.register("jsd")
@dataclass(eq=False, repr=False, kw_only=True)
class JSD(Objective):
    """Cross-entropy on the first split plus alpha times the Jensen-Shannon divergence between all splits.

    A batch holds `splits` blocks, first the images as they are, then as many augmented ones in the same order
    (data.aug_splits); labels for the first block, or for all.
    """

    splits: int = key(3, "versions of each image in a batch, the clean one included; as data.aug_splits")
    alpha: float = key(12.0, "weight of the divergence")

    def __post_init__(self, model: nn.Module) -> None:
        if self.splits < 2:
            raise ConfigError(f"task.splits = {self.splits}, expected at least 2: the images and an augmented version.")
        check_weight(self.alpha, "task.alpha")
        super().__post_init__(model)
        cross_entropy: Any = self.criterion
        self.criterion: nn.Module = JsdCrossEntropy(num_splits=self.splits, alpha=self.alpha, smoothing=0.0)
        self.criterion.cross_entropy_loss = cross_entropy  # soft labels too

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        images = len(input) // self.splits
        if images * self.splits != len(input) or len(target) not in (images, len(input)):
            raise DataError(
                f"task.splits = {self.splits}, but a batch has {len(input)} images and {len(target)} labels; "
                f"set data.aug_splits={self.splits}."
            )
        output, penalty = self.call_model(input)
        return self.total(self.criterion(output, target), output[: len(target)], penalty)
