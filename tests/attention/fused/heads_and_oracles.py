"""Heads made by hand and both attentions written out in float64: what the kernels are compared with."""

import torch

from vitruvius.heads import Heads, Site


def make_heads(N, D, dtype, *, batch=1, heads=2, bias=False, device="cpu", size=0.7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = size * torch.randn(3, batch, N, heads, D, generator=generator)
    tensors = (x.to(device, dtype).transpose(1, 2) for x in (q, k, v))  # as a projection gives them: not contiguous
    given = torch.randn(heads, N, N, generator=generator).to(device, dtype) if bias else None
    return Heads(*tensors, given, D**-0.5)


def site_of(heads):
    """A place in a ViT that these heads may come from."""
    _, H, N, D = heads.k.shape
    return Site(
        name="blocks.0.attn", family="vit", attends="tokens", num_heads=H, num_queries=N, num_keys=N, key_dim=D,
        value_dim=D, dim=H * D,
    )  # fmt: skip


def make_keep(heads, N, M=None, *, kept=0.1, seed=0):
    keep = torch.rand(heads, N, N if M is None else M, generator=torch.Generator().manual_seed(seed)) < kept
    keep[:, 0] = keep[:, :, 0] = True  # a class token
    return keep


def pursue_slowly(heads, *, iterations, sparsity, variant="released", asymmetric=False, dual_sign=-1):
    """Algorithm 1 with its dual and its shrinkage, dense, in the precision of the heads."""
    q, k, v, bias, scale, _ = heads
    H, mean = k.shape[1], k.abs().mean((-2, -1), keepdim=True)
    tau = sparsity * H / (4 * mean) if variant == "released" else 4 * sparsity * mean
    low = dual = torch.zeros_like(k)
    for _ in range(iterations):
        z = k - low + dual
        sparse = torch.sign(z) * (z.abs() - tau).clamp(min=0)
        clean = k - sparse + dual_sign * dual
        logits = (q if asymmetric else clean) @ clean.mT * scale
        low = (logits if bias is None else logits + bias).softmax(-1) @ v
        dual = dual + k - low - sparse
    return low


def attend_slowly(heads, keep):
    return (heads.q @ heads.k.mT * heads.scale).masked_fill(~keep, -torch.inf).softmax(-1) @ heads.v


def errors(attend, oracle, heads):
    """Relative errors of the output and of the gradients of q, k, v against the oracle in float64."""
    ours = [x.detach().clone().requires_grad_() for x in heads[:3]]
    true = [x.detach().double().requires_grad_() for x in heads[:3]]
    bias = None if heads.bias is None else heads.bias.double()
    out, expected = attend(Heads(*ours, *heads[3:])), oracle(Heads(*true, bias, *heads[4:]))
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    found = torch.autograd.grad(out, ours, grad_out, allow_unused=True)
    wanted = torch.autograd.grad(expected, true, grad_out.double(), allow_unused=True)
    assert [x is None for x in found] == [x is None for x in wanted]
    pairs = [(out, expected), *((a, b) for a, b in zip(found, wanted, strict=True) if b is not None)]
    return [float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs]
