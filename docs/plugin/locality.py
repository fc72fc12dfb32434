"""Locality: attention that prefers near patches, with a strength each head learns.

B batch, H heads, N tokens on a grid. The logits of two patches lose strength · distance².
"""

import torch
from torch import nn

from vitruvius.attention import Stage, attentions
from vitruvius.heads import Heads, Site


@attentions.register("locality")
class Locality(Stage):
    """Prefer near patches; each head learns how much."""

    def __init__(self, site: Site, *, start: float = 0.1) -> None:
        super().__init__()
        site.require("locality", "tokens")
        rows, columns = site.grid
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        points = torch.stack([y.flatten(), x.flatten()], 1).float()  # (patches, 2)
        distance = torch.zeros(site.num_queries, site.num_keys)  # class tokens are near everything
        distance[site.num_prefix_tokens :, site.num_prefix_tokens :] = torch.cdist(points, points).square()
        self.register_buffer("distance", distance, persistent=False)
        self.strength = nn.Parameter(torch.full((site.num_heads, 1, 1), start))

    def forward(self, heads: Heads) -> Heads:
        bias = -self.strength * self.distance  # (H, N, N)
        return heads._replace(bias=bias if heads.bias is None else heads.bias + bias)
