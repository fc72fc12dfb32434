"""Sparse softmax on the CPU against dense SDPA, with nothing masked, as ratios from one run on one thread.

    python benchmarks/sparse_cpu.py [--repeats 9] [--models] [--json FILE]

Kernels: DeiT-Tiny's three heads of width 64, one image, `local_global` patterns on grids of patches, and the one mask
published with ViTCoD (197 tokens, 94.7 % removed); and whole tiles of 16 × 16 pairs, 90 % removed, of attention that
falls off with distance (`masks --tiles 16`). Models (`--models`): DeiT-Tiny at several resolutions with such tiles.
Runs of both alternate, and the median of the processor's seconds counts. Results are checked for equality with the
masked dense result first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import vitruvius
from vitruvius.attention import part
from vitruvius.attention.base import build_core
from vitruvius.compression.masks import make_masks
from vitruvius.compression.rules.local_global import LocalGlobal
from vitruvius.compression.sparse import use_sparse
from vitruvius.heads import Heads, Site

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "vitcod_deit_tiny_mask.safetensors"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    options.add_argument("--repeats", type=int, default=9)
    options.add_argument("--models", action="store_true", help="whole models too")
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, median of {chosen.repeats}, ratio = dense / sparse\n")
    print(f"{'what':<44} {'removed':>8}  {'dense':>9}  {'sparse':>9}  {'ratio':>5}")
    rows = [compare_kernels(name, site, keep, chosen.repeats) for name, site, keep in kernels()]
    rows += [compare_models(size, chosen.repeats) for size in (224, 448, 640, 896) if chosen.models]
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))


def kernels() -> list[tuple[str, Site, Tensor]]:
    bits = load_file(GOLDEN)["removed_bits"].numpy()
    removed = np.unpackbits(bits)[: 36 * 197 * 197].astype(bool).reshape(12, 3, 197, 197)
    found = [("197 tokens, published mask, layer 8", site_of(14), torch.from_numpy(~removed[8]))]
    for side, radius in ((32, 1), (32, 3), (56, 1), (56, 3), (56, 6)):
        site, rule = site_of(side), LocalGlobal(radius=radius, tokens=1)
        even = torch.full((3, site.num_keys, site.num_keys), 1 / site.num_keys)
        keep = rule.levels(even, site) < rule.limit
        found.append((f"{site.num_keys} tokens, window {2 * radius + 1}x{2 * radius + 1} + 2 global", site, keep))
    for side in (14, 28, 40):
        found.append((f"{side * side + 1} tokens, tiles of 16", site_of(side), tiles(side)))
    return found


def tiles(side: int, size: int = 16, sparsity: float = 0.9) -> Tensor:
    """(3, N, N): whole tiles of attention that falls off with distance, in every head this share removed."""
    site = site_of(side)
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()
    noise = torch.randn(3, side * side, side * side, generator=torch.Generator().manual_seed(0))
    logits = torch.zeros(3, site.num_keys, site.num_keys)
    logits[:, 1:, 1:] = 0.5 * noise - 0.7 * torch.cdist(places, places)
    maps = {site.name: logits.softmax(-1)}
    masks = make_masks(maps, "information", sparsity=sparsity, budget="head", sites={site.name: site}, tiles=size)
    return masks.keep[site.name]


def site_of(side: int) -> Site:
    tokens = side * side + 1
    return Site(
        name="blocks.0.attn", family="vit", attends="tokens", num_heads=3, num_queries=tokens, num_keys=tokens,
        key_dim=64, value_dim=64, dim=192, num_prefix_tokens=1, grid=(side, side),
    )  # fmt: skip


@torch.no_grad()
def compare_kernels(name: str, site: Site, keep: Tensor, repeats: int) -> dict[str, Any]:
    qkv = torch.randn(1, site.num_keys, 3, 3, 64)  # as one projection leaves them: token after token
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    heads = Heads(q, k, v, None, 0.125)
    sparse = build_core([part("sparse_softmax", keep=keep)], site)
    torch.testing.assert_close(sparse(heads), build_core([part("mask", keep=keep)], site)(heads), atol=1e-5, rtol=1e-4)
    times = alternate(repeats, lambda: F.scaled_dot_product_attention(q, k, v, scale=0.125), lambda: sparse(heads))
    return tell(name, 1 - float(keep.double().mean()), *times)


@torch.no_grad()
def compare_models(size: int, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    dense = timm.create_model("deit_tiny_patch16_224", img_size=size).eval()
    sparse = timm.create_model("deit_tiny_patch16_224", img_size=size).eval()
    sparse.load_state_dict(dense.state_dict())
    keep = tiles(size // 16)
    vitruvius.rewire(sparse, part("mask", keep=keep))
    x = torch.randn(1, 3, size, size)
    masked = sparse(x)
    torch.testing.assert_close(use_sparse(sparse)(x), masked, atol=1e-4, rtol=1e-3)
    times = alternate(repeats if size < 448 else max(3, repeats // 3), lambda: dense(x), lambda: sparse(x))
    return tell(f"DeiT-Tiny, {size} pixels, whole forward", 1 - float(keep.double().mean()), *times)


def alternate(repeats: int, *functions: Callable[[], object]) -> list[float]:
    """Median seconds of the processor of each, measured in turn."""
    seconds: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for mine, function in zip(seconds, functions, strict=True):
            begun = time.process_time()
            function()
            if turn:  # the first warms up
                mine.append(time.process_time() - begun)
    return [statistics.median(mine) for mine in seconds]


def tell(name: str, removed: float, dense: float, sparse: float) -> dict[str, Any]:
    print(f"{name:<44} {100 * removed:6.1f} %  {1e3 * dense:6.1f} ms  {1e3 * sparse:6.1f} ms  {dense / sparse:5.2f}")
    return {"name": name, "removed": removed, "dense_ms": 1e3 * dense, "sparse_ms": 1e3 * sparse}


if __name__ == "__main__":
    main()
