"""Are the gradients of PyTorch's attention right here? Every backend, type and layout against float64, as a table.

    python scripts/sdpa_gradients.py [--device cuda]

First the question that matters: does the gradient that comes from above keep one memory layout? The same q, k, v are
called twice, with gradients of two layouts, through each backend; then again through `vitruvius.attention`, which
puts every gradient into the layout of the output. cuDNN's plans are kept by the layouts of q, k and v alone
(torch 2.11), so a second layout gets the first one's plan. Then NaN: with a mask, 64 keys in the last tile of 128, and
very low scores, cuDNN's gradient of q is NaN (PyTorch issue 196678). Then every layout of q, k, v, and `rpc`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitruvius.attention import part
from vitruvius.attention.base import build_core
from vitruvius.attention.fused import use
from vitruvius.attention.softmax import attend as our_attend
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


def errors(way: Callable[..., Tensor], tensors: tuple[Tensor, ...], given: Tensor | None = None) -> list[float]:
    """Relative, of the output and of every gradient, by the gradient that is `given` or any."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    grad_out = torch.randn(exact[-1].shape, generator=torch.Generator().manual_seed(1)).to(exact[-1])
    grad_out = grad_out if given is None else given.double()
    found = way(*leaves)
    grads = torch.autograd.grad(found, leaves, grad_out.to(found) if given is None else given)
    with sdpa_kernel(SDPBackend.MATH):
        true = way(*exact)
        true_grads = torch.autograd.grad(true, exact, grad_out)
    pairs = zip((found, *grads), (true, *true_grads), strict=True)
    return [float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs]


def two_grads(dtype: torch.dtype, device: str, first: int) -> None:
    """The same q, k, v and two memory layouts of the gradient, one after the other."""
    for number, (way, name) in enumerate(((attend, "F.scaled_dot_product_attention"), (ours, "vitruvius"))):
        tokens = 101 + 2 * first + 4 * number  # plans of its own for each order and way
        heads = tuple(x.contiguous() for x in strided(8, tokens, dtype, device))
        grad_out = torch.randn_like(heads[0])
        grads = {"(B, H, N, D)": grad_out, "(B, N, H, D)": grad_out.transpose(1, 2).contiguous().transpose(1, 2)}
        for layout, given in sorted(grads.items(), reverse=bool(first)):
            found = errors(way, heads, given)
            mark = "   <— wrong" if max(found) > 0.2 else ""
            title = f"{str(dtype)[6:]}, {name}, gradient in {layout}"
            print(f"{title:68s}{'  '.join(f'{value:.1e}' for value in found)}{mark}", flush=True)


def masked_lengths(dtype: torch.dtype, device: str) -> None:
    """Numbers that are not finite in the gradients of q, k, v, under a mask that keeps all and scores about −120."""
    backends = {"default": BACKENDS, "cuDNN": [SDPBackend.CUDNN_ATTENTION], "vitruvius": BACKENDS}
    if device == "cpu":
        backends = {"default": BACKENDS, "vitruvius": BACKENDS}
    for tokens in (64, 65, 128, 192, 320):
        for name, allowed in backends.items():
            heads = low_scores(tokens, dtype, device)
            way = our_attend if name == "vitruvius" else plain_attend
            try:
                with sdpa_kernel(allowed):
                    grads = torch.autograd.grad(way(heads).float().square().sum(), heads[:3])
            except RuntimeError as error:
                said = str(error).splitlines()[0][:50]
            else:
                counts = [int((~grad.isfinite()).sum()) for grad in grads]
                said = "  ".join(map(str, counts)) + ("   <— NaN" if any(counts) else "")
            print(f"{str(dtype)[6:]}, {tokens} tokens, a mask, low scores, {name}:".ljust(68) + said, flush=True)


def low_scores(tokens: int, dtype: torch.dtype, device: str) -> Heads:
    """Heads with a mask that keeps everything, whose scores are all about −120."""
    q, k, v = strided(1, tokens, dtype, device)
    q, k = 0.2 * q, 0.2 * k
    q[..., 0], k[..., 0] = 1.0, -120 * D**0.5
    keep = torch.zeros(1, 1, tokens, tokens, dtype=dtype, device=device)
    return Heads(*(x.detach().requires_grad_() for x in (q, k, v)), keep, D**-0.5)


def plain_attend(heads: Heads) -> Tensor:
    return F.scaled_dot_product_attention(*heads[:3], attn_mask=heads.bias, scale=heads.scale)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return our_attend(Heads(q, k, v, None, D**-0.5))


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
    for first in (0, 1):
        two_grads(torch.float16, device, first)
    for dtype in (torch.bfloat16, torch.float16):
        masked_lengths(dtype, device)
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
