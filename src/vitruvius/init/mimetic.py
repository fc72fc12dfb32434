"""Mimetic init: attention begins as a noisy identity, values times projection as a noisy negative one.

Trockman & Kolter 2023, arXiv:2305.09828. In row-vector notation W_Q W_Kᵀ ≈ α Z + β I for every head and
W_V W_proj ≈ α′ Z − β′ I, with Z uniform of variance 1/C; each product is split evenly by its singular values.

A torch Linear stores transposes. The released code forgets that for W_V and W_proj, so that the map its network
applies is √S Vᵀ U √S instead of U S Vᵀ: same trace, but a diagonal that falls from twice the value to nothing.
`variant="released"` does the same, `variant="paper"` (the default) transposes.

Letters: H heads, D key width, E value width, C model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, UnsuitableSite
from vitruvius.init.base import Layer, inits, uniform

Noise = Callable[[int], Tensor]  # width → Z (C, C), uniform of variance 1/C
Variant = Literal["paper", "released"]


@inits.register("mimetic")
@torch.no_grad()
def mimetic(
    layers: Sequence[Layer],
    *,
    alpha: float = 0.7,
    beta: float = 0.7,
    value_alpha: float = 0.4,
    value_beta: float = 0.4,
    variant: Variant = "paper",
    generator: torch.Generator,
) -> None:
    """Query times key begins as a noisy identity, value times projection as a noisy negative one.

    `alpha` weighs the noise and `beta` the identity of query times key; `value_alpha`, `value_beta` those of
    value times projection. `variant`: "paper", or "released", which differ in the order of the factors of values and
    projection. Biases and all else stay as they are.
    """
    if variant not in ("paper", "released"):
        raise ConfigError(f"variant={variant!r}, expected 'paper' or 'released'.")
    for name, weight in (("alpha", alpha), ("beta", beta), ("value_alpha", value_alpha), ("value_beta", value_beta)):
        if not math.isfinite(weight):
            raise ConfigError(f"'mimetic' got {name}={weight}; expected a finite number.")

    def noise(dim: int) -> Tensor:
        like = torch.empty(dim, dim, dtype=torch.float64)
        return uniform(like, (3 / dim) ** 0.5, generator).cpu()

    for layer in layers:
        check_layer(layer)
    write_queries_and_keys(layers, alpha, beta, noise)
    write_values(layers, value_alpha, value_beta, noise, transpose=variant == "paper")


def check_layer(layer: Layer) -> None:
    """Refuse attention for which query times key is not a map between tokens, or whose heads are too wide."""
    site = layer.site
    site.require("mimetic", "tokens", "windows")
    if site.key_dim > site.dim or site.num_heads * site.value_dim != site.dim:
        raise UnsuitableSite(
            f"'mimetic' needs heads that together are as wide as the model; {site.name!r} has "
            f"{site.num_heads} heads of key width {site.key_dim}, value width {site.value_dim}, model width {site.dim}."
        )


def write_queries_and_keys(layers: Sequence[Layer], alpha: float, beta: float, noise: Noise) -> None:
    """For each layer and head the best approximation of rank D to α Z + β I."""
    for layer in layers:
        for q, k in zip(layer.weights.q, layer.weights.k, strict=True):  # each (D, C), a view
            left, right = even_factors(near_identity(noise(layer.site.dim), alpha, beta))
            q.copy_(left[:, : len(q)].mT)
            k.copy_(right[: len(k)])


def write_values(layers: Sequence[Layer], alpha: float, beta: float, noise: Noise, *, transpose: bool) -> None:
    """For each layer α′ Z − β′ I, over all heads; `transpose` puts the transposed factors in place."""
    for layer in layers:
        left, right = even_factors(near_identity(noise(layer.site.dim), alpha, -beta))
        if transpose:
            left, right = left.mT, right.mT
        layer.weights.v.copy_(left.reshape(layer.weights.v.shape))
        layer.weights.out.copy_(right.reshape(layer.weights.out.shape))


def near_identity(noise: Tensor, alpha: float, beta: float) -> Tensor:
    """α Z + β I."""
    return alpha * noise + beta * torch.eye(len(noise), dtype=noise.dtype, device=noise.device)


def even_factors(a: Tensor) -> tuple[Tensor, Tensor]:
    """L = U √S and R = √S Vᵀ, so that L R is the matrix itself."""
    u, s, v = torch.linalg.svd(a)
    return u * s.sqrt(), s.sqrt()[:, None] * v
