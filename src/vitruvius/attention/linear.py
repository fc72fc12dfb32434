"""Linear attention: φ(q) (φ(k)ᵀ v) / φ(q) Σφ(k), whose cost grows with the number of tokens and not its square.

features="elu": φ(x) = elu(x) + 1, Katharopoulos et al. 2020, arXiv:2006.16236. features="favor": positive random
features whose mean is the softmax, φ(x) = exp(Wx − ‖x‖²/2), Choromanski et al. 2021 ("Performers"), arXiv:2009.14794.
B batch, H heads, N queries, M keys, D key width, E value width, R random features
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, SurgeryError
from vitruvius.attention.base import Kernel, at_least_float32, attentions, generator_of
from vitruvius.heads import Heads, Site

TINY = 1e-20  # the least sum of a query's weights, which is small where scores are large


@attentions.register("linear")
class Linear(Kernel):
    """Linear attention, elu + 1 or Performer's random features (arXiv:2006.16236, arXiv:2009.14794).

    `features`: "elu", or "favor" with `count` random features (default 2 D log D, as the paper suggests) drawn from
    `seed` and the site's name; the more, the nearer to softmax. It has no pairs, so it refuses a bias and dropout.
    """

    map_text = "φ(q) φ(k)ᵀ, each row divided by its sum; written out for looking at only"
    directions: Tensor  # (R, D)

    def __init__(
        self, site: Site, *, features: Literal["elu", "favor"] = "elu", count: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        if site.biased:
            raise site.unsuitable("linear", "never forms pairs of a query and a key, and this site adds a bias to them")
        if count is not None and (count < 1 or features == "elu"):
            raise ConfigError(f"'linear' got count={count}, features={features!r}; count is for 'favor', 1 or more.")
        self.site_name, self.features = site.name, features
        if features == "favor":
            if count is None:
                width = torch.tensor(float(site.key_dim))
                count = max(1, round(float(2 * width * width.log().clamp(min=1))))
            self.register_buffer("directions", orthogonal_directions(count, site.key_dim, generator_of(site, seed)))

    def forward(self, heads: Heads) -> Tensor:
        self._refuse_pairs(heads)
        q, k = self._features(heads)
        values = at_least_float32(heads.v)
        summed = k.mT @ values  # (B, H, R, E)
        mass = q @ k.sum(-2)[..., None]  # (B, H, N, 1)
        return (q @ summed / mass.clamp(min=TINY)).to(heads.v.dtype)

    def map(self, heads: Heads) -> Tensor:
        self._refuse_pairs(heads)
        q, k = self._features(heads)
        pairs = q @ k.mT
        return (pairs / pairs.sum(-1, keepdim=True).clamp(min=TINY)).to(heads.v.dtype)

    def _features(self, heads: Heads) -> tuple[Tensor, Tensor]:
        root = heads.scale**0.5
        q, k = at_least_float32(heads.q) * root, at_least_float32(heads.k) * root
        if (
            self.features == "elu"
        ):  # elu + 1, by functions whose gradients keep the layout that a traced backward expects
            q, k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (q, k))
            return q, k
        directions = self.directions.to(q.dtype).mT  # (D, R)
        q, k = (x @ directions - x.square().sum(-1, keepdim=True) / 2 for x in (q, k))
        q = (q - q.detach().amax(-1, keepdim=True)).exp()  # a factor of each query, and one of all keys, divide out
        k = (k - k.detach().amax((-2, -1), keepdim=True)).exp()
        return q, k

    def _refuse_pairs(self, heads: Heads) -> None:
        what = "a bias" if heads.bias is not None else "dropout" if heads.dropout > 0 else ""
        if what:
            raise SurgeryError(
                f"'linear' at {self.site_name!r} never forms pairs of a query and a key, and met {what} for them. "
                "Leave out stages that write a bias (mask, l2, top_k), and build the model with attn_drop_rate=0."
            )


def orthogonal_directions(count: int, width: int, generator: torch.Generator) -> Tensor:
    """(`count`, `width`): blocks of orthogonal rows, each as long as a normal vector would be."""
    blocks = []
    for _ in range(-(-count // width)):
        drawn = torch.randn(width, width, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(drawn)
        blocks.append((q * r.diagonal().sign()).mT)  # uniform: without the signs its first entries are all negative
    rows = torch.cat(blocks)[:count]
    lengths = torch.randn(count, width, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    return (rows * lengths).float()
