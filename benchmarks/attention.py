"""The fused kernels on a GPU against dense formulas, SDPA eager and compiled, and FlexAttention, from one run.

    python -m benchmarks attention [--quick] [--tilings] [--only rpc,mask,tokens,model] [--json FILE]

Every timing stands beside its relative error against float64, gradients included. Two clocks, medians: `events` times
a call from Python (the cache is flushed between calls), `graph` replays it from a CUDA graph, so that only the GPU
counts. bf16, heads of width 64 as DeiT-Tiny has them, strided as its projection leaves them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attention_models import train_models
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.testing import do_bench, do_bench_cudagraph

from vitruvius.attention import build_core, part
from vitruvius.attention.fused import masked, rpc, use
from vitruvius.attention.fused._launch import Tiling
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "attention" / "fused"))
from heads_and_oracles import attend_slowly, pursue_slowly

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "vitcod_deit_tiny_mask.safetensors"
LAYERS = (0, 5, 11)
Attend = Callable[[Heads], Tensor]
Row = dict[str, Any]
TILINGS = {  # name of the setting in fused/rpc.py: what to try
    "FORWARD": [Tiling(64, 64, 4, 1, 2), Tiling(64, 64, 4, 2, 2)],
    "TILED": [Tiling(64, 64, 4, 2, 1), Tiling(128, 64, 8, 2, 1)],
    "BACKWARD": [Tiling(64, 64, 4, 1, 2)],
    "TILED_BACK": [Tiling(64, 64, 4, 2, 1), Tiling(64, 32, 4, 2, 1), Tiling(64, 64, 4, 1, 1)],
}


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
    slope = torch.randn_like(heads.q)
    tensors = list(heads[:3])

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(heads), tensors, slope, allow_unused=True)

    small = [x[:few].detach().double().requires_grad_() for x in heads[:3]]
    true = oracle(Heads(*small, None, heads.scale))
    slopes = torch.autograd.grad(true, small, slope[:few].double(), allow_unused=True)
    error = relative(attend(heads)[:few], true)
    back = max(relative(a[:few], b) for a, b in zip(both(), slopes, strict=True) if b is not None)
    with torch.no_grad():
        forward = median(lambda: attend(heads))
    return {"what": name, "forward": forward, "both": median(both), "error": error, "error_back": back}


def show(title: str, rows: list[Row]) -> list[Row]:
    print(f"\n{title}\n{'':34s}forward ms (graph)    forward+backward    error: out      gradients")
    for row in rows:
        (f, fg), (b, bg) = row["forward"], row["both"]
        print(f"{row['what']:34s}{f:8.4f} ({fg:.4f}){b:11.4f} ({bg:.4f}){row['error']:12.1e}{row['error_back']:14.1e}")
    sys.stdout.flush()
    return rows


def plain(core: Attend) -> Attend:
    def run(heads: Heads) -> Tensor:
        with use("plain"):
            return core(heads)

    return run


def released(iterations: int) -> Attend:
    return lambda heads: pursue_slowly(heads, iterations=iterations, sparsity=4.0).to(heads.v.dtype)


def bench_rpc(batch: int, N: int, iterations: int, everything: bool) -> list[Row]:
    heads = make_heads(batch, N)
    core = build_core([part("rpc", iterations=iterations)], site_of(heads))
    others = {"plain SDPA (no pursuit)": (attend, lambda h: F.scaled_dot_product_attention(*h[:3], scale=h.scale))}
    ways: dict[str, Attend] = {"fused": core, "SDPA compiled": plain(torch.compile(core, fullgraph=True))}
    if everything:
        ways |= {"SDPA eager": plain(core), "released formula, dense": released(iterations)}
    rows = [measure(name, *pair, heads) for name, pair in others.items()]
    rows += [measure(name, way, released(iterations), heads) for name, way in ways.items()]
    return show(f"rpc, n = {iterations}: batch {batch}, 3 heads, {N} tokens, width 64, bf16", rows)


def local_global(side: int, radius: int) -> Tensor:
    y, x = torch.arange(side * side) // side, torch.arange(side * side) % side
    keep = torch.ones(3, side * side + 1, side * side + 1, dtype=torch.bool)
    keep[:, 1:, 1:] = ((y[:, None] - y).abs() <= radius) & ((x[:, None] - x).abs() <= radius)
    return keep


def bench_mask(title: str, batch: int, keep: Tensor, few: int) -> list[Row]:
    heads, pattern = make_heads(batch, keep.shape[1]), [t.cuda() for t in masked.make_pattern(keep)]
    keep = keep.cuda()
    bias = torch.zeros(keep.shape, device="cuda", dtype=torch.bfloat16).masked_fill(~keep, -torch.inf)
    blocks = create_block_mask(lambda _, h, i, j: keep[h, i, j], None, *keep.shape)
    flex = torch.compile(flex_attention)
    sparse: dict[str, Attend] = {
        "fused": lambda h: masked.attend_kept(h, pattern),
        "SDPA with the mask as bias": lambda h: attend(h._replace(bias=bias)),
        "FlexAttention": lambda h: flex(*h[:3], block_mask=blocks, scale=h.scale),
    }
    rows = [measure("SDPA, nothing masked", attend, attend, heads, few)]
    rows += [measure(name, way, lambda h: attend_slowly(h, keep), heads, few) for name, way in sparse.items()]
    sparsity = 1 - float(keep.float().mean())
    return show(f"{title}: batch {batch}, {keep.shape[1]} tokens, {sparsity:.1%} removed, bf16", rows)


def bench_masks() -> list[Row]:
    removed = np.unpackbits(load_file(GOLDEN)["removed_bits"].numpy())[: 36 * 197 * 197]
    keep = torch.from_numpy(removed == 0).view(12, 3, 197, 197)
    rows = [row for layer in LAYERS for row in bench_mask(f"published mask, layer {layer}", 256, keep[layer], 4)]
    return rows + bench_mask("local + global", 16, local_global(56, 6), 1)


def bench_tilings() -> list[Row]:
    """Which tiles are best on this GPU, for 256 × 3 heads of 197 tokens."""
    heads, rows = make_heads(256, 197), []
    core = build_core(["rpc"], site_of(heads))
    for which, tilings in TILINGS.items():
        rpc.WHOLE, rpc.WHOLE_BACK = 272 * (which != "TILED"), 272 * (which != "TILED_BACK")
        for tiles in tilings:
            setattr(rpc, which, tiles)
            rows.append(measure(f"{which} {tuple(tiles)[:5]}", core, released(4), heads))
        setattr(rpc, which, tilings[0])
    return show("tilings of rpc", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, no eager or dense ways of rpc")
    parser.add_argument("--tilings", action="store_true", help="also try tile sizes")
    parser.add_argument("--only", default="rpc,mask,tokens,model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    only, results = options.only.split(","), {}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, median of many")
    if "rpc" in only:
        results["rpc"] = bench_rpc(256, 197, 4, not options.quick)
    if options.tilings:
        results["tilings"] = bench_tilings()
    if "mask" in only:
        results["mask"] = bench_masks()
    if "model" in only:
        results["model"] = train_models(256)
    if "tokens" in only and not options.quick:
        shapes = [(256, 65, 4), (256, 197, 2), (64, 577, 4), (16, 1025, 4), (4, 4097, 4)]
        results["tokens"] = [row for shape in shapes for row in bench_rpc(*shape, False)]
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
