"""Running statistics of batch norms, kept aside so that a batch that is left out leaves no trace in them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


class Statistics:
    """A copy of the running means and variances of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.buffers = [
            buffer for module in model.modules() if isinstance(module, _NormBase) for buffer in module.buffers()
        ]
        self.copies = [buffer.clone() for buffer in self.buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """As they were."""
        for buffer, copy in zip(self.buffers, self.copies, strict=True):
            buffer.copy_(copy)
