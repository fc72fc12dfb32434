"""How alike two sets of vectors are, X (…, N, E) and Y (…, N, E): token by token, up to order, rotation or scale.

Linear and kernel CKA: Kornblith et al. 2019, arXiv:1905.00414; its unbiased estimator: Song et al. 2012, Nguyen et al.
2021, arXiv:2010.15327. N tokens, E width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

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
    partners = [linear_sum_assignment(each, maximize=True)[1] for each in flat.nan_to_num(0.0).cpu().numpy()]
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


class Products(NamedTuple):
    """What CKA needs to know of two Gram matrices K and L: Σ K L, the sums of rows, the diagonals."""

    inner: Tensor  # (…)
    rows: tuple[Tensor, Tensor]  # each (…, N)
    diagonals: tuple[Tensor, Tensor]


def linear_cka(x: Tensor, y: Tensor, *, tiny: float = 0.0) -> tuple[Tensor, Tensor]:
    """Linear CKA, (biased, debiased), each (…); no N × N matrix is needed."""
    x, y = x - x.mean(-2, keepdim=True), y - y.mean(-2, keepdim=True)
    return _both([_linear_products(*pair) for pair in ((x, y), (x, x), (y, y))], tiny)


def kernel_cka(x: Tensor, y: Tensor, *, tiny: float = 0.0) -> tuple[Tensor, Tensor]:
    """CKA with an RBF kernel, its width learned from each set by itself, (biased, debiased), each (…)."""
    k, l = rbf_gram(x), rbf_gram(y)  # noqa: E741 (K and L are the papers' letters)
    return _both([_products(*pair) for pair in ((k, l), (k, k), (l, l))], tiny)


def rbf_gram(x: Tensor) -> Tensor:
    """exp(−d² / 2σ²) with σ² the lower median of the squared distances that are not zero, (…, N, N)."""
    sizes = x.square().sum(-1)
    d2 = (sizes[..., :, None] + sizes[..., None, :]).sub_(x @ x.mT, alpha=2).clamp_(min=0)
    d2.diagonal(dim1=-2, dim2=-1).zero_()
    rows, columns = torch.tril_indices(x.shape[-2], x.shape[-2], -1, device=x.device)
    below = d2.flatten(-2).index_select(-1, rows * x.shape[-2] + columns)
    if not below.shape[-1]:
        return torch.full_like(d2, math.nan)  # one token: no distance, no width
    sigma2 = below.masked_fill_(below == 0, math.nan).nanmedian(-1).values
    return d2.div_(-2 * sigma2[..., None, None]).exp_()


def _both(products: Sequence[Products], tiny: float) -> tuple[Tensor, Tensor]:
    """(biased, debiased) CKA from the products KL, KK and LL."""
    biased, debiased = [_biased(each) for each in products], [_unbiased(each) for each in products]
    return (
        biased[0] / ((biased[1] * biased[2]).sqrt() + tiny),
        debiased[0] / (debiased[1] * debiased[2]).sqrt(),
    )


def _biased(p: Products) -> Tensor:
    """Σ of the product of both matrices, doubly centred."""
    n = p.rows[0].shape[-1]
    totals = p.rows[0].sum(-1) * p.rows[1].sum(-1)
    return p.inner - 2 / n * (p.rows[0] * p.rows[1]).sum(-1) + totals / n**2


def _unbiased(p: Products) -> Tensor:
    """n (n − 3) times Song's unbiased estimate: diagonals do not count."""
    n = p.rows[0].shape[-1]
    if n < 4:
        return torch.full_like(p.inner, math.nan)
    rows = [row - diagonal for row, diagonal in zip(p.rows, p.diagonals, strict=True)]
    inner = p.inner - (p.diagonals[0] * p.diagonals[1]).sum(-1)
    totals = rows[0].sum(-1) * rows[1].sum(-1)
    return inner + totals / ((n - 1) * (n - 2)) - 2 / (n - 2) * (rows[0] * rows[1]).sum(-1)


def _linear_products(x: Tensor, y: Tensor) -> Products:
    inner = (x.mT @ y).square().sum((-2, -1))
    rows = [(each @ each.sum(-2)[..., None]).squeeze(-1) for each in (x, y)]
    diagonals = [each.square().sum(-1) for each in (x, y)]
    return Products(inner, (rows[0], rows[1]), (diagonals[0], diagonals[1]))


def _products(k: Tensor, l: Tensor) -> Products:  # noqa: E741
    inner = torch.linalg.vecdot(k.flatten(-2), l.flatten(-2))
    diagonals = k.diagonal(dim1=-2, dim2=-1), l.diagonal(dim1=-2, dim2=-1)
    return Products(inner, (k.sum(-1), l.sum(-1)), diagonals)


def _unit(x: Tensor, tiny: float) -> Tensor:
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + tiny)
