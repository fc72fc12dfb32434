"""Are the gradients of PyTorch's attention right here? Every backend, type and layout against float64, as a table.

    python scripts/sdpa_gradients.py [--device cuda]

The plain path of `rpc` calls SDPA with q = k (one tensor, contiguous) and v as a strided view of the qkv projection; in
one run on an H200 (torch 2.11) its bf16 gradients were off by more than their own size. This says which backend, which
layout and which tensor; `rpc` itself comes last, with every backend.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitruvius.attention import build_core, part
from vitruvius.attention.fused import use
from vitruvius.heads import Heads, Site

BACKENDS = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
H, D = 3, 64
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def strided(batch: int, tokens: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v as a qkv projection leaves them."""
    torch.manual_seed(0)
    qkv = 0.5 * torch.randn(batch, tokens, 3, H, D).to(device, dtype)
    return list(qkv.permute(2, 0, 3, 1, 4).unbind(0))


def layouts(q: Tensor, k: Tensor, v: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """(q, k, v) in the ways that attention variants hand them over; with two tensors, keys ask."""
    return {
        "all strided": (q, k, v),
        "all contiguous": (q.contiguous(), k.contiguous(), v.contiguous()),
        "k contiguous, v strided": (q.contiguous(), k.contiguous(), v),
        "q = k, strided": (k, v),
        "q = k contiguous, v strided": (k.contiguous(), v),
        "q = k, all contiguous": (k.contiguous(), v.contiguous()),
    }


def attend(*tensors: Tensor) -> Tensor:
    q, k, v = tensors if len(tensors) == 3 else (tensors[0], *tensors)
    return F.scaled_dot_product_attention(q, k, v, scale=D**-0.5)


def pursuit(tokens: int) -> Callable[..., Tensor]:
    """`rpc` on keys and values, by its plain path."""
    site = Site(
        name="here", family="vit", attends="tokens", num_heads=H, num_queries=tokens, num_keys=tokens, key_dim=D,
        value_dim=D, dim=H * D,
    )  # fmt: skip
    core = build_core([part("rpc", iterations=4)], site)

    def run(k: Tensor, v: Tensor) -> Tensor:
        with use("plain"):
            return core(Heads(k, k, v, None, D**-0.5))

    return run


def errors(way: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> list[float]:
    """Relative, of the output and of every gradient."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    exact = [x.detach().double().cpu().requires_grad_() for x in tensors]
    slope = torch.randn(exact[-1].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, true = way(*leaves), way(*exact)
    pairs = [(found, true)]
    pairs += zip(
        torch.autograd.grad(found, leaves, slope.to(found)), torch.autograd.grad(true, exact, slope), strict=True
    )
    return [float((a.detach().double().cpu() - b.detach()).norm() / b.detach().norm()) for a, b in pairs]


def show(title: str, way: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> None:
    try:
        found = errors(way, tensors)
    except RuntimeError as error:
        print(f"{title:64s}{str(error).splitlines()[0][:50]}", flush=True)
        return
    mark = "   <— wrong" if max(found) > 0.2 else ""
    print(f"{title:64s}{'  '.join(f'{value:.1e}' for value in found)}{mark}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    print(
        f"torch {torch.__version__}, {device}: relative errors of the output, then of the gradients of q, k, v or k, v"
    )
    for dtype in (torch.bfloat16, torch.float16):
        for batch, tokens in ((8, 65), (8, 197), (256, 197)):
            made = strided(batch, tokens, dtype, device)
            for backend in [None, *BACKENDS] if device == "cuda" else [None, SDPBackend.MATH]:
                with sdpa_kernel(backend) if backend else sdpa_kernel(BACKENDS):
                    name = f"{str(dtype)[6:]} {batch} × {tokens}, {backend.name.lower() if backend else 'default'}: "
                    for layout, tensors in layouts(*made).items():
                        show(name + layout, attend, tensors)
                    show(f"{name}rpc, plain", pursuit(tokens), (made[1], made[2]))
            if device == "cpu":
                break


if __name__ == "__main__":
    main()
