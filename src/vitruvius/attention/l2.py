"""L2 attention: keys near the query count, softmax(−‖q − k‖² · scale) v; with tied q and k it is Lipschitz.

Kim, Papamakarios & Mnih 2021, "The Lipschitz Constant of Self-Attention", arXiv:2006.04710. A softmax does not feel
what all keys of a query share, so −‖q − k‖² is 2 q·k − ‖k‖²: twice the scale, and a bias for each key. The paper's
bound also ties the values to the projection of q; here they stay as they are.
B batch, H heads, M keys, D key width
"""

from __future__ import annotations

import math

from vitruvius._errors import ConfigError
from vitruvius.attention.base import Stage, at_least_float32, attentions
from vitruvius.attention.symmetric import require_keys_can_ask
from vitruvius.heads import Heads, Site


@attentions.register("l2")
class L2(Stage):
    """L2 attention, softmax(−‖q − k‖² · scale): near keys count (Kim et al. 2021, arXiv:2006.04710).

    `tied` lets the keys ask, as the paper's bound needs; tied=False keeps q. `strength` multiplies the squared
    distance: 1 is the paper's; 0.5 with tied=False is softmax up to the keys' lengths.
    """

    map_text = "the softmax of negative squared distances"

    def __init__(self, site: Site, *, tied: bool = True, strength: float = 1.0) -> None:
        super().__init__()
        if not strength > 0 or not math.isfinite(strength):
            raise ConfigError(f"'l2' got strength={strength}; it multiplies a squared distance and must be above 0.")
        if tied:
            require_keys_can_ask("l2", site, remedy="tied=False keeps q. ")
            self.discards = frozenset({"q"})
        elif site.family == "cait":
            raise site.unsuitable("l2", "measures q against k, and talking heads scale q by the mixing of heads")
        self.tied, self.strength = tied, strength

    def forward(self, heads: Heads) -> Heads:
        scale = heads.scale * self.strength
        lengths = at_least_float32(heads.k).square().sum(-1)[..., None, :]  # (B, H, 1, M)
        least = lengths.detach().amin(-1, keepdim=True)  # all keys share it; without it half precision says more
        bias = (-scale * (lengths - least)).to(heads.k.dtype)
        return heads.add_bias(bias)._replace(q=heads.k if self.tied else heads.q, scale=2 * scale)
