"""Whether the kernels for Hopper GPUs may have some tensors, and what happens when they do not compile.

They are written in Gluon, which Triton calls experimental: a later Triton may not take them. Then the general ones do.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import warnings

import torch
from torch import Tensor

from vitruvius.attention.fused._switch import INTERPRETED, TRITON_IS_HERE

_wanted = True


def on_hopper(*tensors: Tensor) -> bool:
    """Whether these bfloat16 tensors lie on a Hopper GPU, in rows that can be copied 16 bytes at a time."""
    return _wanted and not INTERPRETED and all(_suits(x) for x in tensors) and _gluon_is_here()


def given_up(error: Exception) -> None:
    """Take the general kernels from now on, unless the error has nothing to do with these."""
    global _wanted
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        raise error
    _wanted = False
    line = next(iter(str(error).splitlines()), type(error).__name__)
    warnings.warn(
        f"the kernels for Hopper GPUs do not compile with Triton {importlib.metadata.version('triton')}: {line}; "
        "the general ones are used, which are slower. Triton 3.6 and 3.9 (of torch 2.11 and 2.15) compile them.",
        stacklevel=3,
    )


def _suits(x: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and x.data_ptr() % 16 == 0
        and x.stride(-1) == 1
        and all(stride % 16 == 0 for stride in x.stride()[:-1])
        and _is_hopper(x.device)
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _gluon_is_here() -> bool:
    try:
        importlib.import_module("vitruvius.attention.fused.hopper._blocks")
    except (ImportError, AttributeError):
        return False
    return TRITON_IS_HERE
