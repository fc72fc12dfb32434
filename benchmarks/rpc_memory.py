"""Activation memory of one training step with RPC in every layer: ours against the dense formula of the paper's code.

    python benchmarks/rpc_memory.py [--batch 64] [--iterations 4] [--json FILE]

On CUDA the peak of `torch.cuda.max_memory_allocated` over one forward and backward pass is taken, less what is
allocated before (weights, input, optimiser-free). Without CUDA the bytes that autograd saves in the forward pass are
counted instead, each storage once, weights and input left out. Both models are the same timm model with the same
weights; only the kernel differs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import vitruvius.surgery as surgery
from vitruvius.attention import Kernel, part
from vitruvius.attention.base import PartMaker
from vitruvius.heads import Heads, Site


class DenseRPC(Kernel):
    """The published loop, written plainly: every map, mask and intermediate is a tensor of its own."""

    discards = frozenset({"q"})

    def __init__(self, site: Site, *, iterations: int = 4, sparsity: float = 4.0) -> None:
        super().__init__()
        self.iterations, self.sparsity = iterations, sparsity

    def forward(self, heads: Heads) -> Tensor:
        k, v = heads.k, heads.v
        _, H, N, D = k.shape
        low = torch.zeros(k.shape, device=k.device)
        dual = torch.zeros(k.shape, device=k.device)
        mu = N * H * D / 4 / k.norm(p=1, dim=(-1, -2), keepdim=True)
        for _ in range(self.iterations):
            z = k - low + dual / mu
            tau = self.sparsity * mu
            above, below = (z >= tau).int(), (z <= -tau).int()
            sparse = (z - tau) * above + (z + tau) * below
            clean = k - sparse - dual / mu
            attention = (clean @ clean.transpose(-2, -1) * heads.scale).softmax(dim=-1)
            low = attention @ v
            dual = dual + mu * (k - low - sparse)
        return low.to(v.dtype)


def build(kernel: PartMaker, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224")
    surgery.rewire(model, kernel)
    return model.to(device).train()


def step(model: nn.Module, x: Tensor, precision: str) -> Tensor:
    autocast = torch.autocast(x.device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
    with autocast:
        return nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long, device=x.device))


def peak_on_cuda(model: nn.Module, x: Tensor, precision: str) -> int:
    step(model, x, precision).backward()  # gradients exist from here on, and are not activations
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(model, x, precision).backward()
    return torch.cuda.max_memory_allocated() - before


def saved_by_autograd(model: nn.Module, x: Tensor, precision: str) -> int:
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = step(model, x, precision)
    del loss
    return sum(sizes.values())


def measure(batch: int, iterations: int, device: torch.device) -> list[dict[str, object]]:
    weigh: Callable[[nn.Module, Tensor, str], int] = peak_on_cuda if device.type == "cuda" else saved_by_autograd
    kernels: dict[str, PartMaker] = {
        "dense": lambda site: DenseRPC(site, iterations=iterations),
        "ours": part("rpc", iterations=iterations),
        "softmax": part("softmax"),
    }
    x = torch.rand(batch, 3, 224, 224, device=device)
    rows: list[dict[str, object]] = []
    for precision in ("fp32", "bf16"):
        mib = {name: weigh(build(kernel, device), x, precision) / 2**20 for name, kernel in kernels.items()}
        rows.append({"precision": precision, "ratio": mib["ours"] / mib["dense"], **mib})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = measure(options.batch, options.iterations, device)
    how = "peak on CUDA" if device.type == "cuda" else "saved by autograd on CPU"
    print(f"DeiT-Tiny, batch {options.batch}, RPC n = {options.iterations} in all layers, activation MiB ({how})")
    print("precision   dense RPC   our RPC   softmax   ours / dense")
    for row in rows:
        print(f"{row['precision']:9s}{row['dense']:12.0f}{row['ours']:10.0f}{row['softmax']:10.0f}{row['ratio']:15.3f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
