"""Launches of the pursuit's kernels for Hopper GPUs: which heads they take, their grids and scratch.

B batch, H heads, N tokens, D width
"""

from __future__ import annotations

import math

from torch import Tensor

from vitruvius.attention.fused._launch import power_of_two, slots
from vitruvius.attention.fused.hopper._dispatch import on_hopper

TOKENS, WIDEST = range(32, 257), 64
KEYS = 32
ROWS_BACK, PROGRAMS_BACK = 64, 2  # a tile of the backward pass; programs a multiprocessor, by their registers


def takes(q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels can have these heads: the keys ask, no bias, few tokens, a Hopper GPU."""
    return q is None and bias is None and k.shape[2] in TOKENS and k.shape[3] <= WIDEST and on_hopper(k, v)


def pursue(
    k: Tensor, v: Tensor, out: Tensor, low: Tensor, sums: Tensor, taus: Tensor, flags: Tensor,
    iterations: int, coefficient: float, inverse: bool, sign: int, scale: float,
) -> None:  # fmt: skip
    """Fill out, L, log-sums, tau and flags: odd where a kernel that seeks maxima must do a head again."""
    from vitruvius.attention.fused.hopper import _pursuit as kernels

    B, H, N, D = k.shape
    rows = max(64, power_of_two(N))
    kernels.pursue[(min(B * H, slots(k, 256 // rows)),)](
        k, v, out, low, sums, taus, flags, *k.stride()[:3], *v.stride()[:3], out.numel(), B * H, iterations,
        coefficient, scale, N=N, D=D, W=power_of_two(D), H=H, ROWS=rows, KEYS=KEYS, TAIL=-(-(N % KEYS) // 16) * 16,
        SIGN=sign, CLIP=not math.isinf(coefficient), INVERSE=inverse, num_warps=rows // 16, maxnreg=128,
        enable_fp_fusion=True,
    )  # fmt: skip


def pursue_back(
    grad_out: Tensor, k: Tensor, v: Tensor, out: Tensor, low: Tensor, sums: Tensor, taus: Tensor, flags: Tensor,
    grad_k: Tensor, grad_v: Tensor, iterations: int, coefficient: float, inverse: bool, sign: int, scale: float,
) -> None:  # fmt: skip
    """Fill the gradients of k and v."""
    from vitruvius.attention.fused.hopper import _pursuit_back as kernels

    B, H, N, D = k.shape
    programs = min(B * H, slots(k, PROGRAMS_BACK))
    scratch, deltas = k.new_empty(programs, 2 * iterations + 2, N, D), sums.new_empty(programs, N)
    kernels.pursue_back[(programs,)](
        k, v, out, low, sums, taus, flags, grad_out, grad_k, grad_v, scratch, deltas, *k.stride()[:3], *v.stride()[:3],
        *grad_out.stride()[:3], out.numel(), B * H, iterations, coefficient, scale, N=N, D=D, W=power_of_two(D), H=H,
        TILES=-(-N // ROWS_BACK), KEYS=KEYS, SIGN=sign, CLIP=not math.isinf(coefficient), INVERSE=inverse,
        num_warps=ROWS_BACK // 16, enable_fp_fusion=True,
    )  # fmt: skip
