"""Mean attention distance: how far a query looks, in patches (Dosovitskiy et al. 2021, arXiv:2010.11929, appendix D).

B batch, H heads, P patches
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvius._errors import UnsuitableSite
from vitruvius.analysis.base import Attended, Statistics, analyses, precise
from vitruvius.heads import Heads, Site


@analyses.register("distance")
def distance(heads: Heads, site: Site, attended: Attended | None = None) -> Statistics:
    """Attention-weighted distance between patches; `relative` divides by that of uniform attention.

    Of a map that is not a distribution the shares |weight| / Σ |weights| count.
    """
    far = patch_distances(site, heads.k)  # (P, P)
    shares = (attended or Attended(precise(heads))).shares()
    weights = shares[..., site.num_prefix_tokens :, site.num_prefix_tokens :]
    if weights.shape[-1] != len(far):
        raise UnsuitableSite(
            f"'distance' needs the {len(far)} patches of {site.name!r}; {weights.shape[-1]} tokens were left of them."
        )
    on_patches = weights.sum(-1)  # (B, H, P)
    mean = ((weights * far).sum(-1) / on_patches).mean(-1)
    near = ((weights * (far < 1.5)).sum(-1) / on_patches).mean(-1)
    return {"patches": mean, "relative": mean / far.mean(), "neighbours": near}


def patch_distances(site: Site, like: Tensor) -> Tensor:
    """Euclidean distances of the patches of a site, (P, P), on the device of `like`."""
    if site.grid is None or site.num_queries != site.num_keys:
        raise UnsuitableSite(
            f"'distance' needs queries and keys on one grid of patches; {site.name!r} ({site.family}) attends over "
            f"{site.attends} from {site.num_queries} to {site.num_keys}."
        )
    rows, columns = (torch.arange(side, device=like.device, dtype=torch.float64) for side in site.grid)
    places = torch.cartesian_prod(rows, columns).view(-1, 2)
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")
