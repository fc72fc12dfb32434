"""ProTransformer: attention as a robust average, so that a few disturbed values cannot carry the output away.

Hou et al. 2024, "ProTransformer: Robustify Transformers via Plug-and-Play Paradigm", arXiv:2410.23182.
Softmax attention is argmin_z Σ_j a_j ‖v_j − z‖². With another penalty ρ the minimum is approached by re-weighting:
    z ← Σ_j w_j a_j v_j / Σ_j w_j a_j,   w_j = ρ'(‖v_j − z‖) / (2 ‖v_j − z‖)
No parameters: it goes on pretrained weights. γ, δ, ε and the number of iterations are those of the authors' code.
B batch, H heads, N queries, M keys, E value width
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.attention.base import DenseKernel, at_least_float32, attention_map, attentions
from vitruvius.heads import Heads, Site

Penalty = Literal["mcp", "l1", "huber", "huber_mcp"]


@attentions.register("pro")
class Pro(DenseKernel):
    """ProTransformer: values far from the average count less, without training (Hou et al. 2024, arXiv:2410.23182).

    `penalty`: "mcp" (the paper's choice for images) lets values farther than `gamma` count next to nothing, "l1" weighs
    by 1 / distance, "huber" like softmax up to `delta`, "huber_mcp" both. `epsilon` keeps distances from 0 and weights
    from vanishing. `iterations` is the number of re-weightings; 0 is softmax.
    """

    map_text = "the weights of its last iteration"
    surrogate = ("softmax",)  # weights held at epsilon have no gradient

    def __init__(
        self,
        site: Site,
        *,
        penalty: Penalty = "mcp",
        gamma: float = 4.0,
        delta: float = 1.0,
        iterations: int = 3,
        epsilon: float = 1e-2,
    ) -> None:
        super().__init__()
        if iterations < 0:
            raise ConfigError(f"'pro' got iterations={iterations}; expected 0 (softmax) or more.")
        for name, value in (("gamma", gamma), ("delta", delta), ("epsilon", epsilon)):
            if not 0 < value < math.inf:
                raise ConfigError(f"'pro' got {name}={value}; it must be above 0, and finite.")
        if penalty == "huber_mcp" and not gamma > delta:
            raise ConfigError(f"'pro' with penalty='huber_mcp' got gamma={gamma}, delta={delta}; gamma must be larger.")
        self.penalty, self.gamma, self.delta = penalty, gamma, delta
        self.iterations, self.epsilon = iterations, epsilon

    def map(self, heads: Heads) -> Tensor:
        first = at_least_float32(attention_map(heads))
        values = at_least_float32(heads.v)
        weights = first
        for _ in range(self.iterations):
            far = distances(weights @ values, values) + self.epsilon
            weights = first * PENALTIES[self.penalty](self, far)
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        return weights.to(heads.v.dtype)


def distances(z: Tensor, v: Tensor) -> Tensor:
    """‖z_i − v_j‖, (…, N, M), of averages (…, N, E) and values (…, M, E); without a gradient where they coincide."""
    squares = z.square().sum(-1)[..., :, None] + v.square().sum(-1)[..., None, :] - 2 * z @ v.mT
    return squares.clamp(min=1e-8).sqrt()


PENALTIES: dict[str, Callable[[Pro, Tensor], Tensor]] = {
    "mcp": lambda pro, far: (1 / far - 1 / pro.gamma).clamp(min=pro.epsilon),
    "l1": lambda _, far: 1 / far,
    "huber": lambda pro, far: (pro.delta / far).clamp(max=1.0),
    "huber_mcp": lambda pro, far: (pro.delta / (pro.gamma - pro.delta) * (pro.gamma / far - 1)).clamp(
        min=pro.epsilon, max=1.0
    ),
}
