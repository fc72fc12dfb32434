"""AugMix's consistency: cross-entropy on the image, and answers that agree over its augmented versions
(Hendrycks et al. 2020, arXiv:1912.02781, equation 2).
"""

from __future__ import annotations

from timm.loss import JsdCrossEntropy
from torch import Tensor, nn

from vitruvius._checks import check_weight
from vitruvius._errors import ConfigError, DataError
from vitruvius.tasks._base import Objective, tasks
from vitruvius.tasks._losses import Criterion


@tasks.register("jsd")
class JSD(Objective):
    """Cross-entropy on the first split plus alpha times the Jensen-Shannon divergence between all splits.

    A batch holds `splits` blocks, first the images as they are, then as many augmented ones in the same order
    (data.aug_splits); labels for the first block, or for all.

    splits: versions of each image in a batch, the clean one included; as data.aug_splits
    alpha: weight of the divergence
    smoothing: label smoothing of hard labels; the data's if the recipe does not say
    binary: binary cross-entropy for each class instead of cross-entropy over the classes
    penalty: weight of the penalties of attention stages such as low_rank
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        splits: int = 3,
        alpha: float = 12.0,
        smoothing: float = 0.0,
        binary: bool = False,
        penalty: float = 0.0,
    ) -> None:
        if splits < 2:
            raise ConfigError(f"task.splits = {splits}, expected at least 2: the images and an augmented version.")
        check_weight(alpha, "task.alpha")
        criterion = JsdCrossEntropy(num_splits=splits, alpha=alpha, smoothing=0.0)
        criterion.cross_entropy_loss = Criterion(smoothing=smoothing, binary=binary)  # soft labels too
        super().__init__(model, criterion, penalty=penalty)
        self.splits = splits

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        images = len(input) // self.splits
        if images * self.splits != len(input) or len(target) not in (images, len(input)):
            raise DataError(
                f"task.splits = {self.splits}, but a batch has {len(input)} images and {len(target)} labels; "
                f"set data.aug_splits={self.splits}."
            )
        output, penalty = self.call_model(input)
        return self.total(self.criterion(output, target), output[: len(target)], penalty)
