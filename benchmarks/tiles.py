"""Whole tiles of 16 × 16 pairs removed: attention alone and DeiT-Tiny whole, against dense SDPA, from one call.

    python -m benchmarks tiles --results tiles.jsonl            a GPU: bf16, 197 and 785 tokens, one to two minutes
    python -m benchmarks tiles --tiny                           a CPU: does everything run?

90 % of the pairs are removed (`masks --tiles 16`) of attention that falls off with distance; protected class token.
Attention: q, k and v as DeiT-Tiny's projection leaves them; forward, and forward with backward. Model: the forward pass
from pixels, with unpatched timm's as the dense one. Milliseconds are medians: *events* times a call from Python,
*graph* replays it as a CUDA graph; on a CPU the processor's time, by turns. *first* are the seconds of the first call,
compiling included. Errors are relative, against float64, of the masked formula for the masked ways. "N rows": the
general kernel with tiles of that many queries. No row begins once `--seconds` are over; rows come as they are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from _measuring import median, relative
from sparse_cpu import alternate, site_of, tiles
from torch import Tensor, nn

import vitruvius
from vitruvius._processes import choose_device
from vitruvius.attention import part
from vitruvius.attention.base import build_core
from vitruvius.attention.fused import masked
from vitruvius.compression.sparse import use_sparse
from vitruvius.heads import Heads

DENSE = "dense SDPA, nothing removed"
Row = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    sizes: tuple[int, ...]  # of the images
    batches: tuple[int, ...]
    depth: int
    repeats: int  # on a CPU
    sparsity: float


LARGE = Scale(sizes=(224, 448), batches=(256, 64), depth=12, repeats=15, sparsity=0.9)
TINY = Scale(sizes=(160,), batches=(2,), depth=1, repeats=2, sparsity=0.8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sparsity", type=float, help="share of the pairs that is removed; 0.9 by default, 0.8 with --tiny")
    add("--only", nargs="+", default=["attention", "model"], choices=["attention", "model"], help="by default both")
    add("--compile", action="store_true", help="whole models by torch.compile too")
    add("--seconds", type=float, default=240.0, help="begin no row after this many seconds; 240 by default")
    add("--results", type=Path, help="write every row here as it comes, a JSON object per line")
    add("--tiny", action="store_true", help="one small size, two blocks")
    options = parser.parse_args()
    device = choose_device()
    scale = TINY if options.tiny else LARGE
    print(f"torch {torch.__version__}, {device}", flush=True)
    deadline = time.perf_counter() + options.seconds
    rows: list[Row] = []
    for row in measure(scale, options, device):
        rows.append(row)
        note(options, row)
        if time.perf_counter() > deadline:
            print("the time is over: what is left was not measured", flush=True)
            break
    print_table(rows)


def measure(scale: Scale, options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Row by row: attention and model at the first size, then at the next."""
    for size, batch in zip(scale.sizes, scale.batches, strict=True):
        keep = tiles(size // 16, sparsity=options.sparsity or scale.sparsity)
        if "attention" in options.only:
            yield from attention_rows(keep, batch, scale, device)
        if "model" in options.only:
            yield from model_rows(size, keep, batch, scale, options, device)


def attention_rows(keep: Tensor, batch: int, scale: Scale, device: torch.device) -> Iterator[Row]:
    heads = heads_of(keep.shape[1], batch, device)
    pattern = keep.to(device)
    hidden = torch.zeros(keep.shape, device=device, dtype=heads.q.dtype).masked_fill(~pattern, -torch.inf)
    core = build_core([part("sparse_softmax", keep=keep)], site_of(math.isqrt(keep.shape[1]))).to(device)
    ways: dict[str, Callable[[Heads], Tensor]] = {
        DENSE: dense,
        "sparse_softmax": core,
        "SDPA with the mask as bias": lambda given: dense(given._replace(bias=hidden)),
    }
    if device.type == "cuda":
        ways |= {f"general kernel, {rows} rows": general(keep, rows, device) for rows in (16, 32, 64)}
    base = {"what": "attention", "tokens": keep.shape[1], "batch": batch, "removed": removed(keep)}
    for name, way in ways.items():
        q, k, v = (x[:2].detach().double() for x in heads[:3])
        few = Heads(q, k, v, None, heads.scale)
        if name != DENSE:
            few = few._replace(bias=hidden.double())
        yield {**base, "way": name, **guarded(functools.partial(time_attention, way, heads, dense(few), scale))}


def model_rows(
    size: int, keep: Tensor, batch: int, scale: Scale, options: argparse.Namespace, device: torch.device
) -> Iterator[Row]:
    x = torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    plain, under_mask, sparse = (deit(size, scale.depth) for _ in range(3))
    vitruvius.rewire(under_mask, part("mask", keep=keep))
    use_sparse(vitruvius.rewire(sparse, part("mask", keep=keep)))
    with torch.no_grad():
        true = {False: plain.double().to(device)(x[:2].double()), True: under_mask.double().to(device)(x[:2].double())}
    ways: dict[str, nn.Module] = {DENSE: plain, "sparse_softmax": sparse, "mask → softmax": under_mask}
    ways = {name: model.to(device, precision(device)) for name, model in ways.items()}
    if options.compile:
        ways |= {f"{name}, compiled": torch.compile(ways[name]) for name in (DENSE, "sparse_softmax")}  # type: ignore[misc]
    x = x.to(precision(device))
    base = {"what": "model", "tokens": keep.shape[1], "batch": batch, "removed": removed(keep)}
    for name, model in ways.items():
        expected = true[not name.startswith(DENSE)]
        yield {**base, "way": name, **guarded(functools.partial(time_model, model, x, expected, scale))}


def time_attention(way: Callable[[Heads], Tensor], heads: Heads, expected: Tensor, scale: Scale) -> Row:
    grad_out = torch.randn_like(heads.q)
    first_s, out = timed_once(lambda: way(heads))
    with torch.no_grad():
        forward = clock(lambda: way(heads), scale, out.device)
    both = clock(lambda: torch.autograd.grad(way(heads), list(heads[:3]), grad_out), scale, out.device)
    return {"first_s": first_s, "forward": forward, "both": both, "error": relative(out[:2], expected)}


@torch.no_grad()
def time_model(model: nn.Module, x: Tensor, expected: Tensor, scale: Scale) -> Row:
    first_s, out = timed_once(lambda: model(x))
    forward = clock(lambda: model(x), scale, out.device)
    return {"first_s": first_s, "forward": forward, "error": relative(out[:2], expected)}


def guarded(measurement: Callable[[], Row]) -> Row:
    """What was measured, or why nothing was: one way that fails must not cost the others their turn."""
    try:
        return measurement()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def heads_of(tokens: int, batch: int, device: torch.device) -> Heads:
    torch.manual_seed(0)
    qkv = (0.5 * torch.randn(batch, tokens, 3, 3, 64)).to(device, precision(device))
    q, k, v = (x.requires_grad_() for x in qkv.permute(2, 0, 3, 1, 4).unbind(0))
    return Heads(q, k, v, None, 0.125)


def precision(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def dense(heads: Heads) -> Tensor:
    q, k, v, bias, scale, _ = heads
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def general(keep: Tensor, rows: int, device: torch.device) -> Callable[[Heads], Tensor]:
    """The general kernel with tiles of this many queries, which is not what it takes by itself."""
    tile = masked.Tile(rows, 32, {16: 1, 32: 2, 64: 4}[rows], 2)
    with tiling(tile):
        pattern = [lists.to(device) for lists in masked.make_pattern(keep)[: masked.LISTS]]

    def attend(heads: Heads) -> Tensor:
        with tiling(tile):
            return masked.attend_kept(heads, pattern)

    return attend


@contextlib.contextmanager
def tiling(tile: masked.Tile) -> Iterator[None]:
    """Inside, the general kernel has these tiles, there and back."""
    names = ("FORWARD", "FORWARD_LONG", "BACKWARD", "BACKWARD_LONG")
    before = {name: getattr(masked, name) for name in names}
    try:
        for name in names:
            setattr(masked, name, tile)
        yield
    finally:
        for name, value in before.items():
            setattr(masked, name, value)


def deit(size: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("deit_tiny_patch16_224", img_size=size, depth=depth).eval()
    return model


def removed(keep: Tensor) -> float:
    return 1 - float(keep.double().mean())


def timed_once(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """The seconds of the first call, and its result."""
    begun = time.perf_counter()
    out = call()
    if out.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun, out.detach()


def clock(call: Callable[[], Any], scale: Scale, device: torch.device) -> tuple[float, float]:
    """(events, graph) in milliseconds; on a CPU the processor's time, twice."""
    if device.type == "cuda":
        return median(call)
    (seconds,) = alternate(scale.repeats, call)
    return 1e3 * seconds, 1e3 * seconds


def note(options: argparse.Namespace, row: Row) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    if options.results is not None:
        with options.results.open("a") as file:
            file.write(f"{line}\n")


def print_table(rows: list[Row]) -> None:
    """Every way beside the dense one of its group, as a ratio of graph times."""
    times = "forward, events (graph) | dense / this | forward + backward | dense / this"
    print(f"\n| | tokens | batch | {times} | error | first, s |\n|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        if "failed" in row:
            print(f"| {row['what']}: {row['way']} | {row['tokens']} | {row['batch']} | {row['failed']} |", flush=True)
            continue
        beside = next(
            other for other in rows if other["way"] == DENSE and all(other[k] == row[k] for k in ("what", "tokens"))
        )
        cells = [f"{row['what']}: {row['way']}", str(row["tokens"]), str(row["batch"])]
        for key in ("forward", "both"):
            cells += cells_of(row.get(key), beside.get(key))
        print("| " + " | ".join([*cells, f"{row['error']:.1e}", f"{row['first_s']:.1f}"]) + " |", flush=True)


def cells_of(times: tuple[float, float] | None, dense_times: tuple[float, float] | None) -> list[str]:
    if times is None or dense_times is None:
        return ["", ""]
    return [f"{times[0]:.3f} ({times[1]:.3f})", f"{dense_times[1] / times[1]:.2f}"]


if __name__ == "__main__":
    main()
