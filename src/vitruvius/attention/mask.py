"""A fixed sparse pattern: each query may look at the keys it keeps, and at no others.

You et al. 2023, "ViTCoD", arXiv:2210.09573.       H heads, N queries, M keys; True = kept
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, SurgeryError, UnsuitableSite, suggest
from vitruvius._files import StrPath, is_array, load_tensors, read_mask_arrays
from vitruvius.attention.base import Stage, attentions
from vitruvius.heads import Heads, Site


@attentions.register("mask")
class Mask(Stage):
    """Keep a fixed pattern of query-key pairs per head (ViTCoD, You et al. 2023, arXiv:2210.09573).

    The pattern comes from a safetensors file or a tensor, True = kept. `file` holds one bool tensor (H, N, M) a site,
    under the site's name; ViTCoD's arrays (info_0.9.npy, or a LeViT's folder of mask_*.npy) are read too. `keep` is
    such a tensor, or "all": everything is kept until a checkpoint brings its own pattern. The pattern travels in the
    checkpoint.
    """

    map_text = "the softmax of the pairs that are kept; removed ones are 0"
    discards = frozenset({"choice of keys"})
    keep: Tensor

    def __init__(self, site: Site, *, file: StrPath | None = None, keep: Tensor | Literal["all"] | None = None) -> None:
        super().__init__()
        if (file is None) == (keep is None):
            raise ConfigError(
                "'mask' needs one pattern: file='masks.safetensors', or keep= a bool tensor (H, N, M), "
                "or keep='all' when a checkpoint will bring it."
            )
        self.site_name = site.name
        if isinstance(keep, Tensor):
            pattern = check_keep(keep, site).clone()
        elif file is not None:
            masks = read_masks(file)
            if site.name not in masks:
                known = ", ".join(sorted(masks)[:4]) + (" …" if len(masks) > 4 else "")
                raise UnsuitableSite(
                    f"{file} has no mask for {site.name!r}{suggest(site.name, masks)} It has {len(masks)}: {known}. "
                    "Choose those sites with where=…"
                )
            pattern = check_keep(masks[site.name], site)
        else:
            pattern = torch.ones(site.num_heads, site.num_queries, site.num_keys, dtype=torch.bool)
        self.register_buffer("keep", pattern)

    def forward(self, heads: Heads) -> Heads:
        return hide_removed(heads, self.keep, f"'mask' at {self.site_name!r}")

    def extra_repr(self) -> str:
        return f"{tuple(self.keep.shape)}"


def hide_removed(heads: Heads, keep: Tensor, what: str) -> Heads:
    """`heads` whose bias hides what the pattern `keep` (H, N, M) removes; `what` is whose pattern it is, for errors."""
    require_size(heads, keep, what)
    return heads.add_bias(heads.q.new_zeros(keep.shape).masked_fill(~keep, -torch.inf))


def require_size(heads: Heads, keep: Tensor, what: str) -> None:
    """Refuse `heads` of another number of tokens than the pattern `keep` (H, N, M) is for."""
    if (heads.q.shape[-2], heads.k.shape[-2]) != keep.shape[-2:]:
        raise SurgeryError(
            f"{what} fixes the number of tokens: it is for {keep.shape[-2]} queries and {keep.shape[-1]} keys and met "
            f"{heads.q.shape[-2]} and {heads.k.shape[-2]}. Resample it with vitruvius.attention.interpolate."
        )


def check_keep(keep: Tensor, site: Site) -> Tensor:
    """The pattern (H, N, M) itself if it suits the site, else an error that says why."""
    shape = (site.num_heads, site.num_queries, site.num_keys)
    if keep.dtype != torch.bool:
        raise ConfigError(f"mask for {site.name!r} is {keep.dtype}; it must be bool, True = kept.")
    if tuple(keep.shape) != shape:
        raise ConfigError(
            f"mask for {site.name!r} has shape {tuple(keep.shape)}; this site needs {shape}: heads, queries, keys. "
            "A mask of another resolution can be resampled with vitruvius.attention.interpolate."
        )
    empty = ~keep.any(-1)  # (H, N)
    if empty.any():
        head = int(empty.any(-1).nonzero()[0])
        raise ConfigError(
            f"mask for {site.name!r} removes every key of {int(empty[head].sum())} queries in head {head}; "
            "a query must keep at least one key."
        )
    return keep


def read_masks(file: StrPath) -> dict[str, Tensor]:
    """The patterns in a `file` of masks by site, True = kept."""
    masks = read_mask_arrays(file) if is_array(file) else load_tensors(file)[0]
    return {name: keep for name, keep in masks.items() if ":" not in name}  # the others are permutations
