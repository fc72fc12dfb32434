"""Training DeiT-Tiny on a GPU: images per second and peak memory with robust attention, against compiled plain timm.

    python -m benchmarks attention_models [--batch 256] [--windows 5]

bf16 autocast, AdamW, cross-entropy, random images, `torch.compile` of the model; medians over windows of steps.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import timm
import torch
from torch import nn

import vitruvius
from vitruvius.attention.fused import Mode, use

GRAPHS = "reduce-overhead"
WAYS: dict[str, tuple[bool, Mode, str | None]] = {  # with rpc, kernels, mode of torch.compile
    "timm, compiled": (False, "plain", None),
    "timm, CUDA graphs": (False, "plain", GRAPHS),
    "rpc fused, compiled": (True, "fused", None),
    "rpc fused, CUDA graphs": (True, "fused", GRAPHS),
    "rpc on SDPA, compiled": (True, "plain", None),
}


def train(
    with_rpc: bool, kernels: Mode, mode: str | None, batch: int, windows: int = 5, steps: int = 10
) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = timm.create_model("deit_tiny_patch16_224").cuda().train()
    if with_rpc:
        vitruvius.rewire(model, "rpc")
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = torch.randn(batch, 3, 224, 224, device="cuda"), torch.randint(1000, (batch,), device="cuda")

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(compiled(x), y)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    with use(kernels):
        for _ in range(5):
            step()
        torch.cuda.reset_peak_memory_stats()
        rates = []
        for _ in range(windows):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(steps):
                step()
            end.record()
            end.synchronize()
            rates.append(batch * steps / start.elapsed_time(end) * 1e3)
    return {"images_per_second": statistics.median(rates), "gib": torch.cuda.max_memory_allocated() / 2**30}


def train_models(batch: int, windows: int = 5) -> dict[str, dict[str, Any]]:
    print(f"\nDeiT-Tiny training, batch {batch}, bf16\n{'':24s}images/s   of timm   peak GiB")
    results: dict[str, dict[str, Any]] = {}
    for name, way in WAYS.items():
        results[name] = found = train(*way, batch, windows)
        share = found["images_per_second"] / results["timm, compiled"]["images_per_second"]
        print(f"{name:24s}{found['images_per_second']:8.0f}{share:10.3f}{found['gib']:11.2f}", flush=True)
        torch.cuda.empty_cache()
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--windows", type=int, default=5, help="windows of ten steps whose median counts")
    options = parser.parse_args()
    train_models(options.batch, options.windows)
