"""The one switch between the fused kernels and their plain twins, and the test whether a kernel can take some heads."""

from __future__ import annotations

import importlib.util
import os
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, suggest
from vitruvius.heads import Heads

Mode = Literal["auto", "plain", "fused"]
MODES = ("auto", "plain", "fused")
WIDTHS = range(32, 129, 16)
TYPES = (torch.bfloat16, torch.float16, torch.float32)

TRITON_IS_HERE = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU, slowly: for tests

_mode: Mode = "auto"


class use:
    """Choose kernels: "auto" takes fused ones where they were measured faster, "plain" never, "fused" always or raises.

    They were in half precision on a GPU, see docs/speed.md; in float32 "auto" takes the plain ones.

    Works at once; as a context manager it also gives back what was chosen before.

    `mode` is one of those three.
    """

    def __init__(self, mode: Mode) -> None:
        global _mode
        if mode not in MODES:
            raise ConfigError(f"use({mode!r}): no such choice{suggest(str(mode), MODES)} Known: {', '.join(MODES)}.")
        self.before = _mode
        _mode = mode

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _mode
        _mode = self.before


def wanted(heads: Heads, *, part: str) -> bool:
    """Whether the fused kernel shall take these heads. In mode "fused" a refusal is an error that says why.

    `heads` are about to be attended; `part` is the name of the attention that asks, for that error.
    """
    if _mode == "plain":
        return False
    hindrance = _hindrance(heads)
    if hindrance and _mode == "fused":
        raise ConfigError(f"the fused kernel of {part!r} cannot run: {hindrance}. Choose use('auto') or use('plain').")
    return not hindrance and (_mode == "fused" or heads.k.dtype.itemsize == 2)


def _hindrance(heads: Heads) -> str:
    """Why the fused kernels cannot take these heads, or nothing."""
    if not (heads.k.is_cuda or INTERPRETED):
        return f"the tensors are on {heads.k.device.type}, it needs a GPU"
    if not TRITON_IS_HERE:
        return "Triton is not installed"
    return _hindrance_of_tensors(heads) or _hindrance_of_options(heads)


def _hindrance_of_tensors(heads: Heads) -> str:
    q, k, v = heads[:3]
    if len({q.dtype, k.dtype, v.dtype}) > 1 or k.dtype not in TYPES:
        return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, it needs one of bfloat16, float16, float32"
    if k.shape[-1] != v.shape[-1] or k.shape[-1] not in WIDTHS:
        return f"keys and values have widths {k.shape[-1]} and {v.shape[-1]}, it needs one multiple of 16 in 32 … 128"
    if k.dim() != 4 or q.shape != k.shape or v.shape != k.shape:
        return f"q, k, v have shapes {(*q.shape,)}, {(*k.shape,)}, {(*v.shape,)}, it needs one shape (B, H, N, D)"
    return ""


def _hindrance_of_options(heads: Heads) -> str:
    if heads.dropout > 0:
        return f"dropout is {heads.dropout}, it needs 0"
    if not heads.scale > 0:
        return f"scale is {heads.scale}, it needs a positive number"
    if heads.bias is not None and heads.bias.requires_grad:
        return "the bias wants a gradient"
    return ""


def can_run() -> bool:
    """Whether this machine can run the kernels at all: then patterns are worth preparing."""
    return TRITON_IS_HERE and (torch.cuda.is_available() or INTERPRETED)


def rows_together(x: Tensor) -> Tensor:
    """`x` with its last axis contiguous, copied only if it is not."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()
