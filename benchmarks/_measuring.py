"""Heads on the GPU, both clocks, and a row of a table: what the benchmarks of attention share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitruvius.heads import Heads, Site

Attend = Callable[[Heads], Tensor]
Row = dict[str, Any]
_timed = True


def untimed() -> None:
    """From now on calls are made once, to fill the compilers' caches."""
    global _timed
    _timed = False


def make_heads(batch: int, N: int, *, H: int = 3, D: int = 64, dtype: torch.dtype = torch.bfloat16) -> Heads:
    torch.manual_seed(0)
    qkv = 0.5 * torch.randn(batch, N, 3, H, D, device="cuda", dtype=dtype)
    q, k, v = (x.requires_grad_() for x in qkv.permute(2, 0, 3, 1, 4).unbind(0))
    return Heads(q, k, v, None, D**-0.5)


def site_of(heads: Heads) -> Site:
    _, H, N, D = heads.k.shape
    return Site(
        name="bench", family="vit", attends="tokens", num_heads=H, num_queries=N, num_keys=N, key_dim=D, value_dim=D,
        dim=H * D,
    )  # fmt: skip


def median(call: Callable[[], Any]) -> tuple[float, float]:
    """(events, graph) in milliseconds."""
    from triton.testing import do_bench, do_bench_cudagraph

    if not _timed:
        call()
        return 0.0, 0.0
    events = do_bench(call, warmup=15, rep=60, return_mode="median")
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return events, do_bench_cudagraph(call, rep=15, return_mode="median")
    except RuntimeError:  # what cannot be captured
        torch.cuda.synchronize()
        return events, float("nan")


def relative(found: Tensor, true: Tensor) -> float:
    return float((found.detach().double() - true.detach()).norm() / true.detach().norm())


def measure(name: str, attend: Attend, oracle: Attend, heads: Heads, few: int = 4) -> Row:
    """Forward, forward and backward, and the errors of the first images."""
    torch.manual_seed(1)
    grad_out = torch.randn_like(heads.q)
    tensors = list(heads[:3])

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(heads), tensors, grad_out, allow_unused=True)

    small = [x[:few].detach().double().requires_grad_() for x in heads[:3]]
    true = oracle(Heads(*small, None, heads.scale))
    expected = torch.autograd.grad(true, small, grad_out[:few].double(), allow_unused=True)
    error = relative(attend(heads)[:few], true)
    back = max(relative(a[:few], b) for a, b in zip(both(), expected, strict=True) if b is not None)
    with torch.no_grad():
        forward = median(lambda: attend(heads))
    N = heads.k.shape[2]
    return {
        "what": name,
        "tokens": N,
        "batch": len(heads.k),
        "forward": forward,
        "both": median(both),
        "error": error,
        "error_back": back,
    }


def show(title: str, rows: list[Row]) -> list[Row]:
    print(f"\n{title}\n{'':34s}forward ms (graph)    forward+backward    error: out      gradients")
    for row in rows:
        (f, fg), (b, bg) = row["forward"], row["both"]
        print(f"{row['what']:34s}{f:8.4f} ({fg:.4f}){b:11.4f} ({bg:.4f}){row['error']:12.1e}{row['error_back']:14.1e}")
    sys.stdout.flush()
    return rows
