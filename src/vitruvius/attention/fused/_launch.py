"""How kernels are launched: tile sizes, strides, and how many programs a GPU holds at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tiling(NamedTuple):
    """Rows and keys of a tile, warps and stages of a program, programs for each multiprocessor, registers a thread."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int
    registers: int | None = None


def tiling(k: Tensor, tiles: Tiling) -> dict[str, Any]:
    """The compile-time settings that all kernels share, for keys of shape (B, H, N, D)."""
    _, H, N, D = k.shape
    W = power_of_two(D)
    shrink = 2 if W > 64 or k.dtype == torch.float32 else 1
    rows = min(tiles.rows, max(16, power_of_two(N)))
    keys = min(tiles.keys // shrink, max(16, power_of_two(N)))
    tail = 0 if N % keys == 0 else max(16, power_of_two(N % keys))
    exact = "tf32x3" if k.dtype == torch.float32 else "tf32"
    return {
        "N": N, "D": D, "W": W, "H": H, "ROWS": rows, "KEYS": keys, "TAIL": tail, "EXACT": exact,
        "num_warps": tiles.warps, "num_stages": 1 if k.dtype == torch.float32 else tiles.stages,
        "maxnreg": tiles.registers if W <= 64 else None,  # wider heads would spill hundreds of bytes a thread
    }  # fmt: skip


def in_eager_mode(
    forward: Callable[..., Any], setup: Callable[..., None], backward_pass: Callable[..., Any]
) -> Callable[..., Any]:
    """Forward and backward as one autograd function: what a custom operator does, at a fraction of its cost."""

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            return forward(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            setup(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            if torch.is_grad_enabled():  # create_graph=True
                raise NotImplementedError(
                    "the fused kernels have no second derivative; take the plain path for it: "
                    "with vitruvius.attention.fused.use('plain'): …"
                )
            return backward_pass(ctx, *grads)

    return Eager.apply


def slots(x: Tensor, programs: int) -> int:
    """How many programs to start so that the GPU is full."""
    return programs * multiprocessors(x.device) if x.is_cuda else 2


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many the GPU has; some, without one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def strides(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[int, ...]:
    return (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *bias.stride()[:3])


def bias_of(bias: Tensor | None, k: Tensor) -> Tensor:
    """The bias as (B, H, N, N) with its last axis contiguous; without one, any tensor of four axes."""
    if bias is None:
        return k
    B, H, N, _ = k.shape
    bias = bias if bias.shape[-1] == N and bias.stride(-1) == 1 else bias.expand(*bias.shape[:-1], N).contiguous()
    return bias.expand(B, H, N, N)


def like_rows(k: Tensor) -> Tensor:
    """An empty (B, H, N, D) whose memory is (B, N, H, D), as the projection after attention wants it."""
    B, H, N, D = k.shape
    return k.new_empty(B, N, H, D).transpose(1, 2)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
