"""The fused kernels on a GPU against dense formulas, SDPA eager and compiled, and FlexAttention, from one run.

    python -m benchmarks attention [--only rpc,tokens,mask,…] [--json FILE] [--figure PNG] [--share i/n]

Every timing is shown with its relative error against float64, gradients included. Two clocks, medians: `events` times
a call from Python (the cache is flushed between calls), `graph` replays it from a CUDA graph, so that only the GPU
counts. bf16, heads of width 64 as DeiT has them, strided as its projection leaves them. `--share 1/8` runs every eighth
case once, untimed: eight such processes at once fill the compilers' caches.
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
from _measuring import Attend, Row, make_heads, measure, show, site_of, untimed
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from vitruvius.attention import part
from vitruvius.attention.base import build_core
from vitruvius.attention.fused import masked, use
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "attention" / "fused"))
from heads_and_oracles import attend_slowly, pursue_slowly

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "vitcod_deit_tiny_mask.safetensors"
STYLES = {
    "released formula, dense": ("#999999", "released code, dense"),
    "SDPA eager": ("#cc8844", "on SDPA, eager"),
    "SDPA compiled": ("#4477aa", "on SDPA, compiled"),
    "fused": ("#bb2233", "fused kernels"),
    "plain SDPA (no pursuit)": ("#111111", "plain attention"),
}
PURSUITS: dict[str, list[dict[str, Any]]] = {
    "rpc": [{"batch": 256, "N": 197}],
    "tokens": [{"batch": b, "N": n} for b, n in ((256, 65), (64, 577), (16, 1025), (2, 4097))],
    "iterations": [{"batch": 256, "N": 197, "iterations": n} for n in (1, 2)],
    "heads": [{"batch": 768 // h, "N": 197, "H": h} for h in (6,)],
    "precision": [{"batch": 64, "N": 197, "dtype": torch.float32}],
}


def plain(core: Attend) -> Attend:
    def run(heads: Heads) -> Tensor:
        with use("plain"):
            return core(heads)

    return run


def released(iterations: int) -> Attend:
    return lambda heads: pursue_slowly(heads, iterations=iterations, sparsity=4.0).to(heads.v.dtype)


def bench_rpc(*, batch: int, N: int, iterations: int = 4, H: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[Row]:
    heads = make_heads(batch, N, H=H, dtype=dtype)
    core = build_core([part("rpc", iterations=iterations)], site_of(heads))
    oracle = released(iterations)
    ways: dict[str, Attend] = {
        "fused": core,
        "SDPA compiled": plain(torch.compile(core, fullgraph=True, dynamic=False)),
    }
    if iterations == 4:
        ways["SDPA eager"] = plain(core)
    if iterations == 4 and N < 1025:
        ways["released formula, dense"] = oracle
    rows = [measure("plain SDPA (no pursuit)", attend, sdpa, heads, few=1)]
    rows += [measure(name, way, oracle, heads, few=4 if N < 1025 else 1) for name, way in ways.items()]
    return show(f"rpc, n = {iterations}: batch {batch}, {H} heads, {N} tokens, width 64, {dtype}", rows)


def sdpa(heads: Heads) -> Tensor:
    return F.scaled_dot_product_attention(*heads[:3], scale=heads.scale)


def local_global(side: int, radius: int) -> Tensor:
    y, x = torch.arange(side * side) // side, torch.arange(side * side) % side
    keep = torch.ones(3, side * side + 1, side * side + 1, dtype=torch.bool)
    keep[:, 1:, 1:] = ((y[:, None] - y).abs() <= radius) & ((x[:, None] - x).abs() <= radius)
    return keep


def bench_mask(title: str, batch: int, keep: Tensor, everything: bool) -> list[Row]:
    heads, pattern = make_heads(batch, keep.shape[1]), [t.cuda() for t in masked.make_pattern(keep)]
    keep, few = keep.cuda(), 4 if keep.shape[1] < 1025 else 1
    bias = torch.zeros(keep.shape, device="cuda", dtype=torch.bfloat16).masked_fill(~keep, -torch.inf)
    sparse: dict[str, Attend] = {
        "fused": lambda h: masked.attend_kept(h, pattern),
        "SDPA with the mask as bias": lambda h: attend(h._replace(bias=bias)),
    }
    if everything:
        blocks = create_block_mask(lambda _, h, i, j: keep[h, i, j], None, *keep.shape)
        flex = torch.compile(flex_attention, dynamic=False)
        sparse["FlexAttention"] = lambda h: flex(*h[:3], block_mask=blocks, scale=h.scale)
        sparse["dense formula"] = lambda h: attend_slowly(h, keep)
    rows = [measure("SDPA, nothing masked", attend, sdpa, heads, few)]
    rows += [measure(name, way, lambda h: attend_slowly(h, keep), heads, few) for name, way in sparse.items()]
    sparsity = 1 - float(keep.float().mean())
    return show(f"{title}: batch {batch}, {keep.shape[1]} tokens, {sparsity:.1%} removed, bf16", rows)


def bench_layers(batch: int) -> list[Row]:
    """The published mask, all layers, and their sum beside as many unmasked ones."""
    heads, few = make_heads(batch, 197), 4
    rows = [measure("SDPA, nothing masked", attend, sdpa, heads, few)]
    for i, keep in enumerate(published()):
        pattern, kept = [t.cuda() for t in masked.make_pattern(keep)], keep.cuda()
        removed = 1 - float(keep.float().mean())
        rows.append(
            measure(
                f"layer {i}, {removed:.1%} removed",
                lambda h, pattern=pattern: masked.attend_kept(h, pattern),  # type: ignore[misc]
                lambda h, kept=kept: attend_slowly(h, kept),  # type: ignore[misc]
                heads,
                few,
            )
        )
    show(f"published mask, every layer: batch {batch}, 197 tokens, bf16", rows)
    for name in ("forward", "both"):
        unmasked, masks = len(rows[1:]) * rows[0][name][1], sum(row[name][1] for row in rows[1:])
        print(
            f"{name}, all layers, graph: unmasked {unmasked:.4f}, masked {masks:.4f}: {unmasked / (masks or 1):.2f} x"
        )
    return rows


def published() -> Tensor:
    """The masks of ViTCoD's DeiT-Tiny at 95 %, (layers, H, N, N)."""
    removed = np.unpackbits(load_file(GOLDEN)["removed_bits"].numpy())[: 36 * 197 * 197]
    return torch.from_numpy(removed == 0).view(12, 3, 197, 197)


def cases(only: list[str]) -> dict[str, Callable[[], list[Row]]]:
    """What there is to measure, by name."""
    found: dict[str, Callable[[], list[Row]]] = {}
    for kind in only:
        for i, case in enumerate(PURSUITS.get(kind, [])):
            found[f"{kind} {i}"] = lambda case=case: bench_rpc(**case)  # type: ignore[misc]
    if "mask" in only:
        found["mask layers"] = lambda: bench_layers(256)
        for i in (0, 5):
            found[f"mask {i}"] = lambda i=i: bench_mask(f"published mask, layer {i}", 256, published()[i], i == 5)  # type: ignore[misc]
        found["mask long"] = lambda: bench_mask("local + global", 16, local_global(56, 6), True)
    if "sparsity" in only:
        for r in (2, 4, 10):
            found[f"sparsity {r}"] = lambda r=r: bench_mask("local + global", 32, local_global(32, r), False)  # type: ignore[misc]
    return found


def draw(results: dict[str, list[Row]], path: Path) -> None:
    """Time per image over the number of tokens, forward and with the backward pass."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for name, group in results.items() if name.split()[0] in ("rpc", "tokens") for row in group]
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
    for axis, clock, title in zip(axes, ("forward", "both"), ("forward", "forward + backward"), strict=True):
        for what, (colour, label) in STYLES.items():
            points = sorted((row["tokens"], row[clock][1] / row["batch"]) for row in rows if row["what"] == what)
            style = "--" if what.startswith("plain") else "-"
            axis.plot(*zip(*points, strict=True), style, color=colour, label=label, marker="o", markersize=3)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axis.set_xticks(sorted({row["tokens"] for row in rows}), labels=sorted({row["tokens"] for row in rows}))
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("GPU time per image (ms), 3 heads")
    axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="rpc,tokens,iterations,heads,precision,mask,sparsity")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--share", help="i/n: every n-th case from i, once and untimed")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU; `python -m benchmarks sparse_cpu` runs without.")
    todo = cases(options.only.split(","))
    if options.share:
        untimed()
        i, n = map(int, options.share.split("/"))
        todo = dict(list(todo.items())[i::n])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians")
    results: dict[str, list[Row]] = {}
    with use("fused"):
        for name, run in todo.items():
            results[name] = run()
            torch.compiler.reset()
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    if options.figure:
        draw(results, options.figure)


if __name__ == "__main__":
    main()
