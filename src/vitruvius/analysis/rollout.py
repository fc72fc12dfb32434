"""Attention rollout: attention through all layers, residual paths included (Abnar & Zuidema 2020, arXiv:2005.00928).

B images, N tokens, P patches
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, UnsuitableSite
from vitruvius.analysis.base import Attended, analyses, precise
from vitruvius.heads import Heads, Site


@analyses.register("rollout")
class Rollout:
    """Where the class token (or the average of tokens) looks in the end; `residual` is the share that stays."""

    def __init__(self, *, residual: float = 0.5) -> None:
        if not 0 <= residual <= 1:
            raise ConfigError(f"'rollout' got residual={residual}; expected a share, from 0 to 1.")
        self.residual = residual
        self.flow: Tensor | None = None  # (B, N, N)
        self.prefix = 0
        self.answering = slice(None)

    def see(self, heads: Heads, site: Site, attended: Attended | None = None) -> None:
        self.follow(site, (attended or Attended(precise(heads))).shares())

    def follow(self, site: Site, shares: Tensor) -> None:
        """One layer more, of which the shares of attention (B, H, N, N) are known."""
        site.require("rollout", "tokens")
        site.require_self_attention("rollout")
        weights = shares.mean(1)
        if self.flow is not None and self.flow.shape != weights.shape:
            raise UnsuitableSite(
                f"'rollout' follows {self.flow.shape[-1]} tokens; {site.name!r} has {weights.shape[-1]}."
            )
        stay = torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
        step = self.residual * stay + (1 - self.residual) * weights
        self.flow = step if self.flow is None else step @ self.flow
        self.prefix, self.answering = site.num_prefix_tokens, site.answering()

    def result(self) -> dict[str, Tensor]:
        assert self.flow is not None
        seen = self.flow[:, self.answering].mean(1)  # (B, N)
        patches = seen[:, self.prefix :]
        p = patches / patches.sum(-1, keepdim=True)
        nats = torch.special.entr(p).sum(-1)
        return {
            "relative_entropy": nats / math.log(max(p.shape[-1], 2)),
            "effective_patches": nats.exp(),
            "largest_share": p.amax(-1),
            "prefix": seen[:, : self.prefix].sum(-1),
            "map": p,
        }
