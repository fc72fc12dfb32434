"""The share of key entries that `rpc` clips in a trained model, and the λ of the paper's form that clips as many.

python -m experiments clipped runs/campaigns/attention_cifar_compact/rpc_all_n2 data.root=cifar10.npz
python -m experiments clipped RUN data.root=cifar10.npz --match     # prints λ alone, for a sweep's command line
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitruvius.attention.base import at_least_float32
from vitruvius.attention.rpc import RPC, clip, threshold
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads
from vitruvius.request import open_request

STEPS = 40  # halvings of the interval that holds λ


def clipped_share(part: RPC, heads: Heads, variant: str, sparsity: float) -> float:
    """Of the entries of k (B, H, N, D), over all iterations: how many exceed the threshold of `variant` at λ."""
    keys = at_least_float32(heads.k)
    tau = threshold(keys, sparsity, variant)
    low = dual = keys.new_zeros(())
    shares = []
    for remaining in reversed(range(part.iterations)):
        entries = keys - low + dual
        shares.append(0.0 if tau is None else float((entries.abs() > tau).double().mean()))
        clipped = clip(entries, tau)
        clean = (low + clipped + (part.dual_sign - 1) * dual).to(heads.k.dtype)
        query = heads.q if part.asymmetric else clean
        if remaining:
            previous, low = low, attend(heads._replace(q=query, k=clean, dropout=0.0))
            dual = clipped + previous - low
    return sum(shares) / len(shares)


@contextmanager
def seen_heads(model: nn.Module) -> Iterator[list[tuple[RPC, Heads]]]:
    """Inside, what every `rpc` of the model receives is kept."""
    seen: list[tuple[RPC, Heads]] = []
    parts = [part for part in model.modules() if isinstance(part, RPC)]
    hooks = [part.register_forward_pre_hook(lambda part, args: seen.append((part, args[0]))) for part in parts]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def shares_of(seen: Sequence[tuple[RPC, Heads]], variant: str | None = None, sparsity: float | None = None) -> Tensor:
    """One share for each layer, with the settings of the layer unless others are given."""
    found = [
        clipped_share(part, heads, variant or part.variant, part.sparsity if sparsity is None else sparsity)
        for part, heads in seen
    ]
    return torch.tensor(found, dtype=torch.float64)


def matching_sparsity(seen: Sequence[tuple[RPC, Heads]]) -> float:
    """λ of the paper's form at which it clips as many entries of these keys as the parts do with their own settings."""
    wanted = float(shares_of(seen).mean())
    low, high = 1e-3, 1e3
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        if float(shares_of(seen, "paper", middle).mean()) > wanted:  # a larger λ clips fewer
            low = middle
        else:
            high = middle
    return high


def print_clipped(target: str, overrides: Sequence[str], images: int, *, match: bool) -> None:
    with open_request(target, overrides, images=images) as request, torch.no_grad(), seen_heads(request.model) as seen:
        for x, *_ in request.loader:
            request.model(x.to(request.process.device))
        if match:
            print(f"{matching_sparsity(seen):.3g}")
            return
        layers = len({id(part) for part, _ in seen})
        shares = shares_of(seen).view(-1, layers).mean(0)
        print(" ".join(f"{100 * share:.3f}%" for share in shares), f"mean {100 * float(shares.mean()):.3f}%")
