"""Robust principal components: attention pursues keys = low rank + sparse, and attends on the cleaned keys.

Teo & Nguyen 2024, arXiv:2406.13762, algorithm "principal attention pursuit".

Per sample and head, with the dual Y and u = Y/mu, the paper repeats: S = shrink(k − L + u, tau); K' = k − S − u;
L = softmax(K' K'ᵀ · scale) v; u ← u + k − L − S. Since shrink(z, tau) = z − clip(z, tau), S drops out:
    c = clip(k − L + u, tau);   K' = c + L − 2u;   L' = softmax(K' K'ᵀ · scale) v;   u ← c + L − L'.
B batch, H heads, N tokens, D key width (equal to the value width here).
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.attention.base import Kernel, at_least_float32, attentions
from vitruvius.attention.fused import wanted
from vitruvius.attention.fused.rpc import pursue
from vitruvius.attention.softmax import attend, gradient_by_hand
from vitruvius.attention.symmetric import require_keys_can_ask
from vitruvius.heads import Heads, Site


@attentions.register("rpc")
class RPC(Kernel):
    """Robust principal components: attend on keys cleaned of sparse outliers (Teo & Nguyen 2024, arXiv:2406.13762).

    `sparsity` is the papers' lambda: large values call few entries corrupt. `variant` says what it means:
    "released" (the published code) clips at tau = lambda · H / (4 mean|k|), "paper" at tau = 4 lambda · mean|k|.
    `asymmetric` keeps the queries, softmax(q K'ᵀ) v (the paper's appendix). `dual_sign` = +1 takes
    K' = k − S + Y/mu, which minimises the printed Lagrangian; the paper and its code subtract.

    `iterations` is the number of steps of the pursuit; 1 with an infinite `sparsity` is symmetric softmax.
    """

    map_text = "the softmax of its last iteration, over the cleaned keys; q has no say unless asymmetric"

    def __init__(
        self,
        site: Site,
        *,
        iterations: int = 4,
        sparsity: float = 4.0,
        variant: Literal["released", "paper"] = "released",
        asymmetric: bool = False,
        dual_sign: Literal[-1, 1] = -1,
    ) -> None:
        super().__init__()
        if not isinstance(iterations, int) or iterations < 1:
            raise ConfigError(f"'rpc' got iterations={iterations!r}; it needs a whole number, at least 1.")
        if not sparsity >= 0:
            raise ConfigError(f"'rpc' got sparsity={sparsity!r} (the papers' lambda); it must be 0 or more.")
        if sparsity == 0:
            warnings.warn(
                "'rpc' with sparsity=0 calls every key corrupt: attention becomes uniform, the mean of the values.",
                stacklevel=2,
            )
        if asymmetric:
            site.require_self_attention("rpc")
        else:
            require_keys_can_ask("rpc", site, remedy="asymmetric=True keeps q. ")
        if site.key_dim != site.value_dim:
            raise site.unsuitable("rpc", "subtracts attention outputs from keys, so both need one width")
        self.iterations, self.sparsity, self.variant = iterations, float(sparsity), variant
        self.asymmetric, self.dual_sign = asymmetric, dual_sign
        self.discards = frozenset() if asymmetric else frozenset({"q"})
        self.surrogate = ("softmax",) if asymmetric else ("symmetric", "softmax")  # without its thresholds

    def forward(self, heads: Heads) -> Tensor:
        return self._fused(heads) if wanted(heads, part="rpc") else attend(self.last_softmax(heads))

    def last_softmax(self, heads: Heads) -> Heads:
        """The last iteration: the cleaned keys, and they or q as the queries."""
        keys = at_least_float32(heads.k)
        tau = threshold(keys, self.sparsity, self.variant)  # (B, H, 1, D)
        kept = clean = clip(keys, tau)  # c + L; L and u begin at 0
        for _ in range(1, self.iterations):
            low = attend(self._attended(heads, clean)._replace(dropout=0.0))
            kept, clean = step(keys, kept, low, tau, self.dual_sign)
        return self._attended(heads, clean)

    def _attended(self, heads: Heads, clean: Tensor) -> Heads:
        clean = clean.to(heads.k.dtype)
        return heads._replace(q=heads.q if self.asymmetric else clean, k=clean)

    def _fused(self, heads: Heads) -> Tensor:
        released = self.variant == "released"
        return pursue(
            heads,
            iterations=self.iterations,
            coefficient=self.sparsity * heads.k.shape[1] / 4 if released else 4 * self.sparsity,
            inverse=released,
            asymmetric=self.asymmetric,
            dual_sign=self.dual_sign,
        )


def clip(x: Tensor, tau: Tensor | None) -> Tensor:
    """`x` (B, H, N, D) limited to ±`tau` (B, H, 1, D), where there is one; tau gets its gradient too."""
    if tau is None:
        return x
    return _Clip.apply(x, tau) if gradient_by_hand(x, tau) else x.clamp(-tau, tau)


def step(keys: Tensor, kept: Tensor, low: Tensor, tau: Tensor | None, dual_sign: int) -> tuple[Tensor, Tensor]:
    """One step of the pursuit: c + L of this iteration and the cleaned keys of the next, both (B, H, N, D).

    `keys` are k, `kept` is c + L of the step before, `low` this iteration's L; `tau` and `dual_sign` as in `RPC`.
    """
    dual = kept - low
    free = (keys - low).add_(dual)
    clipped = free.clamp_(-tau, tau) if tau is not None and not free.requires_grad else clip(free, tau)
    kept = clipped.add_(low)
    return kept, torch.add(kept, dual, alpha=dual_sign - 1)


class _Clip(torch.autograd.Function):
    """Clipping whose backward pass needs one byte an entry instead of x, and no tensor of bool.

    A CPU takes four to twenty times as long over bools as over the same arithmetic in numbers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tau: Tensor) -> Tensor:
        clipped = x.clamp(-tau, tau)
        ctx.save_for_backward((x - clipped).sign_().to(torch.int8))  # -1 below, 0 within, 1 above
        return clipped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        side = ctx.saved_tensors[0].to(grad.dtype)
        beyond = grad * side
        return torch.addcmul(grad, beyond, side, value=-1), beyond.sum(-2, keepdim=True)


def threshold(keys: Tensor, sparsity: float, variant: str) -> Tensor | None:
    """tau of each head once for every channel, (B, H, 1, D), which a CPU compares eight at a time; None: infinite.

    keys: (B, H, N, D).
    sparsity: lambda.
    variant: released, lambda N C / (4 ‖k_h‖₁) with all heads' channels C; or paper, 4 lambda ‖k_h‖₁ / (N D).
    """
    if sparsity == math.inf:
        return None
    size = keys.abs().mean((-2, -1), keepdim=True).clamp(min=torch.finfo(keys.dtype).tiny ** 0.5)  # never 0
    tau = sparsity * keys.shape[1] / (4 * size) if variant == "released" else 4 * sparsity * size
    return tau.clamp(max=torch.finfo(tau.dtype).max).repeat(1, 1, 1, keys.shape[-1])
