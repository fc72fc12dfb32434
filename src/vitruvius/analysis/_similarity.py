"""How alike two sets of vectors are, X (…, N, E) and Y (…, N, E): token by token, up to order, rotation or scale.

Linear and kernel CKA: Kornblith et al. 2019, arXiv:1905.00414; its unbiased estimator: Song et al. 2012, Nguyen et al.
2021, arXiv:2010.15327. N tokens, E width.
"""

from __future__ import annotations

import math

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def cosines(x: Tensor, y: Tensor, *, tiny: float = 0.0) -> Tensor:
    """Of each token with its counterpart, (…, N); `tiny` is added to lengths."""
    return (_unit(x, tiny) * _unit(y, tiny)).sum(-1)


def matched_cosines(x: Tensor, y: Tensor, *, tiny: float = 0.0) -> Tensor:
    """Of each token with its partner in the one-to-one matching of largest sum, (…, N)."""
    table = _unit(x, tiny) @ _unit(y, tiny).mT  # (…, N, N)
    flat = table.reshape(-1, *table.shape[-2:])
    partners = [linear_sum_assignment(each, maximize=True)[1] for each in flat.cpu().numpy()]
    chosen = torch.stack([torch.from_numpy(each) for each in partners]).to(flat.device)
    return flat.gather(-1, chosen[..., None]).squeeze(-1).view(table.shape[:-1])


def pearson(x: Tensor, y: Tensor, *, tiny: float = 0.0) -> Tensor:
    """Correlation of each token with its counterpart over the width, (…, N)."""
    return cosines(x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True), tiny=tiny)


def procrustes(x: Tensor, y: Tensor) -> Tensor:
    """Cosine of the centred sets after the best rotation: ‖XᵀY‖_nuclear / (‖X‖ ‖Y‖), (…)."""
    x, y = x - x.mean(-2, keepdim=True), y - y.mean(-2, keepdim=True)
    size = torch.linalg.matrix_norm(x) * torch.linalg.matrix_norm(y)
    return torch.linalg.svdvals(x.mT @ y).sum(-1) / size


def principal_cosines(x: Tensor, y: Tensor) -> Tensor:
    """Cosines of the principal angles between the column spaces, descending, (…, min(N, E))."""
    bases = [torch.linalg.qr(each).Q for each in (x, y)]
    return torch.linalg.svdvals(bases[0].mT @ bases[1]).clamp(max=1)


def linear_gram(x: Tensor) -> Tensor:
    """X Xᵀ, (…, N, N)."""
    return x @ x.mT


def rbf_gram(x: Tensor) -> Tensor:
    """exp(−d² / 2σ²) with σ² the lower median of the squared distances that are not zero, (…, N, N)."""
    inner = x @ x.mT
    sizes = inner.diagonal(dim1=-2, dim2=-1)
    d2 = (sizes[..., :, None] + sizes[..., None, :] - 2 * inner).clamp(min=0)
    d2 = d2 * (1 - torch.eye(d2.shape[-1], dtype=d2.dtype, device=d2.device))
    rows, columns = torch.triu_indices(d2.shape[-1], d2.shape[-1], 1)
    above = d2[..., rows, columns]
    sigma2 = torch.where(above > 0, above, math.nan).nanmedian(-1).values
    return (-d2 / (2 * sigma2[..., None, None])).exp()


def cka(k: Tensor, l: Tensor, *, tiny: float = 0.0) -> Tensor:  # noqa: E741 (K and L are the papers' letters)
    """Centred kernel alignment of two Gram matrices, (…); biased upwards when there are few tokens."""
    return _aligned(_double_centred(k), _double_centred(l), tiny)


def debiased_cka(k: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    """The same from unbiased estimates: 0 on average for independent sets; may lie a little below 0."""
    return _aligned(_u_centred(k), _u_centred(l), 0.0)


def _aligned(k: Tensor, l: Tensor, tiny: float) -> Tensor:  # noqa: E741
    products = [(a * b).sum((-2, -1)) for a, b in ((k, l), (k, k), (l, l))]
    return products[0] / ((products[1] * products[2]).sqrt() + tiny)


def _double_centred(gram: Tensor) -> Tensor:
    rows = gram.mean(-1, keepdim=True)
    return gram - rows - rows.mT + rows.mean(-2, keepdim=True)


def _u_centred(gram: Tensor) -> Tensor:
    """Székely & Rizzo's U-centring: the sum of products of two such matrices is n(n−3) times an unbiased HSIC."""
    n = gram.shape[-1]
    off = 1 - torch.eye(n, dtype=gram.dtype, device=gram.device)
    gram = gram * off
    rows = gram.sum(-1, keepdim=True) / (n - 2) if n > 2 else gram.sum(-1, keepdim=True) * math.nan
    total = gram.sum((-2, -1), keepdim=True) / ((n - 1) * (n - 2)) if n > 2 else gram * math.nan
    return (gram - rows - rows.mT + total) * off


def _unit(x: Tensor, tiny: float) -> Tensor:
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + tiny)
