"""XCiT: timm.models.xcit.XCA, attention among the channels of a head (El-Nouby et al. 2021, arXiv:2106.09681).

B batch, H heads, D channels of a head, N tokens: the items are channels, each described by its values on the tokens.
"""

from __future__ import annotations

import torch.nn.functional as F
from timm.models.xcit import XCA
from torch import Tensor

from vitruvius.heads import Heads
from vitruvius.surgery.base import Socket


class XCASocket(Socket, XCA):
    """XCiT: cross-covariance attention, whose items are channels."""

    family = "xcit"
    attends = "channels"

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 4, 1).unbind(0)  # each (B, H, D, N)
        q = (F.normalize(q, dim=-1) * self.temperature).type_as(v)
        k = F.normalize(k, dim=-1).type_as(v)
        x = self.core(Heads(q, k, v, None, 1.0, self.dropout_now()))
        return self.proj_drop(self.proj(x.permute(0, 3, 1, 2).reshape(B, N, C)))
