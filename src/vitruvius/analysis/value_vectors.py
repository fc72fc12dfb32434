"""Value vectors: are the learnt V what kernel PCA would choose, V̂ = diag(1/g) (I − 1/N) A with eigenvectors A of the
centred Gram matrix? (arXiv:2406.13762, equation 8; arXiv:2505.07908, section 6.)

Eigenvectors have no sign and no fixed order, so `cosine` sees chance at best; Procrustes, the principal angles and
CKA do not depend on either. Linear and kernel CKA: Kornblith et al. 2019, arXiv:1905.00414; its unbiased estimator:
Song et al. 2012, Nguyen et al. 2021, arXiv:2010.15327. B batch, H heads, N tokens, E value width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from vitruvius.analysis._kernel import key_gram
from vitruvius.analysis.base import Statistics, Variant, analyses, precise
from vitruvius.heads import Heads

RELEASED: dict[str, Any] = {"tiny_length": 1e-8, "tiny_product": 1e-10}


@analyses.register("value_vectors")
def value_vectors(heads: Heads, *, standardise: bool = False, variant: Variant = "exact") -> Statistics:
    """V against the values kernel PCA predicts: directly, matched, up to rotation, and by CKA.

    standardise: z-score each key over its width first, with the papers' scale 1/√D; else the model's own scale.
    variant: exact; or released, with the small constants of the published script.
    """
    heads, released = precise(heads), variant == "released"
    directions, log_mass = predicted_values(heads, standardise=standardise, released=released)
    if released:
        return compare(heads.v, directions * (-log_mass).exp()[..., None], **RELEASED)
    lowest = log_mass.amin(-1, keepdim=True)  # a common factor: only the distances of V and V̂ feel it
    w = directions * (lowest - log_mass).exp()[..., None]
    return compare(heads.v, w, directions=directions, factor=(-lowest).exp()[..., None])


def compare(
    v: Tensor,
    w: Tensor,
    *,
    directions: Tensor | None = None,
    factor: Tensor | float = 1.0,
    tiny_length: float = 0.0,
    tiny_product: float = 0.0,
) -> Statistics:
    """Every statistic of two sets of values; the published ones add tiny numbers to denominators.

    v: (…, N, E), the learnt values.
    w: (…, N, E), those they are compared with.
    directions: w up to the lengths of its tokens, which cosines do not feel; default: w.
    factor: of w in distances, (…, 1, 1); CKA, Procrustes and angles do not feel it.
    tiny_length: added to lengths in cosines and correlations.
    tiny_product: added to products of norms in CKA.
    """
    directions = w if directions is None else directions
    direct = cosines(v, directions, tiny=tiny_length)
    matched = matched_cosines(v, directions, tiny=tiny_length)
    linear, kernel = linear_cka(v, w, tiny=tiny_product), kernel_cka(v, w, tiny=tiny_product)
    angles = principal_cosines(v, w)
    scaled = w * factor
    gap = v - scaled
    frobenius = torch.linalg.matrix_norm(gap)
    return {
        "matched_cosine": matched.mean(-1),
        "linear_cka": linear[0],
        "linear_cka_debiased": linear[1],
        "subspace_overlap": angles.square().mean(-1),
        "procrustes": procrustes(v, w),
        "cosine": direct.mean(-1),
        "kernel_cka_debiased": kernel[1],
        "kernel_cka": kernel[0],
        "principal_angle": angles.arccos().rad2deg().mean(-1),
        "cosine_min": direct.amin(-1),
        "cosine_max": direct.amax(-1),
        "negative": (direct < 0).double().mean(-1),
        "matched_min": matched.amin(-1),
        "matched_max": matched.amax(-1),
        "matched_negative": (matched < 0).double().mean(-1),
        "pearson": pearson(v, directions, tiny=tiny_length).mean(-1),
        "relative_frobenius": frobenius / torch.linalg.matrix_norm(v),
        "frobenius": frobenius,
        "euclidean": torch.linalg.vector_norm(gap, dim=-1).mean(-1),
        "l1": gap.abs().sum(-1).mean(-1),
        "allclose": (gap.abs() <= 1e-5 + 1e-3 * scaled.abs()).all(-1).all(-1).double(),
    }


def predicted_values(heads: Heads, *, standardise: bool, released: bool = False) -> tuple[Tensor, Tensor]:
    """(A − column means, log g): V̂ is the first divided by g, row by row. Columns beyond N are zero.

    heads: what enters a site; k decides, v gives the number of columns.
    standardise: z-score each key over its width first, with the papers' scale 1/√D; else the model's own scale.
    released: order by absolute eigenvalues of the published script's matrix.
    """
    gram = key_gram(heads, standardise=standardise, released=released)
    values, vectors = torch.linalg.eigh(gram.centred)
    order = (values.abs() if released else values).argsort(-1, descending=True)[..., : heads.v.shape[-1]]
    chosen = vectors.gather(-1, order[..., None, :].expand(*vectors.shape[:-1], order.shape[-1]))
    chosen = chosen - chosen.mean(-2, keepdim=True)
    return F.pad(chosen, (0, heads.v.shape[-1] - chosen.shape[-1])), gram.log_mass


def cosines(x: Tensor, y: Tensor, *, tiny: float = 0.0) -> Tensor:
    """Of each token with its counterpart, (…, N); `tiny` is added to lengths."""
    return (_unit(x, tiny) * _unit(y, tiny)).sum(-1)


def matched_cosines(x: Tensor, y: Tensor, *, tiny: float = 0.0) -> Tensor:
    """Of each token with its partner in the one-to-one matching of largest sum, (…, N)."""
    table = _unit(x, tiny) @ _unit(y, tiny).mT  # (…, N, N)
    flat = table.reshape(-1, *table.shape[-2:])
    offers = flat.nan_to_num(0.0)
    offers = offers + _prices(offers)
    partners = [linear_sum_assignment(each, maximize=True)[1] for each in offers.cpu().numpy()]
    chosen = torch.stack([torch.from_numpy(each) for each in partners]).to(flat.device)
    return flat.gather(-1, chosen[..., None]).squeeze(-1).view(table.shape[:-1])


def _prices(table: Tensor) -> Tensor:
    """A number for each column of `table` (…, N, N), (…, 1, N), that all matchings pay: the best one stays the best.

    They make partners nearly the best offer of their row, which SciPy finds in a third of the time: sixteen rounds of
    Sinkhorn's algorithm at temperature 0.01 (Cuturi 2013, arXiv:1306.0895).
    """
    shares = (table - table.amax(-1, keepdim=True)).mul_(100).float().exp_()
    prices = torch.ones_like(shares[..., :1, :])
    for _ in range(16):
        rows = (shares @ prices.mT).clamp_(min=1e-30).reciprocal_()  # (…, N, 1)
        prices = (rows.mT @ shares).clamp_(min=1e-30).reciprocal_()
    return prices.log_().to(table.dtype) / 100


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


Sums = tuple[Tensor, Tensor]  # of a Gram matrix: the sums of its rows and its diagonal, (…, N) each


def linear_cka(x: Tensor, y: Tensor, *, tiny: float = 0.0) -> tuple[Tensor, Tensor]:
    """Linear CKA, (biased, debiased), each (…); no N × N matrix is needed."""
    x, y = x - x.mean(-2, keepdim=True), y - y.mean(-2, keepdim=True)
    inner = [(a.mT @ b).square().sum((-2, -1)) for a, b in ((x, y), (x, x), (y, y))]
    return _both(inner, *(((z @ z.sum(-2)[..., None]).squeeze(-1), z.square().sum(-1)) for z in (x, y)), tiny=tiny)


def kernel_cka(x: Tensor, y: Tensor, *, tiny: float = 0.0) -> tuple[Tensor, Tensor]:
    """CKA with an RBF kernel, its width learned from each set by itself, (biased, debiased), each (…)."""
    k, l = rbf_gram(x), rbf_gram(y)  # noqa: E741 (K and L are the papers' letters)
    inner = [torch.linalg.vecdot(a.flatten(-2), b.flatten(-2)) for a, b in ((k, l), (k, k), (l, l))]
    return _both(inner, *((gram.sum(-1), gram.diagonal(dim1=-2, dim2=-1)) for gram in (k, l)), tiny=tiny)


def rbf_gram(x: Tensor) -> Tensor:
    """exp(−d² / 2σ²) with σ² the lower median of the squared distances that are not zero, (…, N, N)."""
    sizes = x.square().sum(-1)
    d2 = (sizes[..., :, None] + sizes[..., None, :]).sub_(x @ x.mT, alpha=2).clamp_(min=0)
    d2.diagonal(dim1=-2, dim2=-1).zero_()
    medians = [_median_distance(each) for each in d2.view(-1, x.shape[-2] ** 2).cpu().numpy()]
    sigma2 = d2.new_tensor(medians).view(d2.shape[:-2])
    return d2.div_(-2 * sigma2[..., None, None]).exp_()


def _median_distance(d2: np.ndarray[Any, Any]) -> float:
    """The lower median of those `d2` (N · N,) that are not zero, each of which stands twice; of none it is NaN."""
    zeros = d2.size - np.count_nonzero(d2)
    middle = zeros + (d2.size - zeros) // 2 - 1
    return float(np.partition(d2, middle)[middle]) if zeros < d2.size else math.nan


def _both(inner: Sequence[Tensor], k: Sums, l: Sums, *, tiny: float) -> tuple[Tensor, Tensor]:  # noqa: E741
    """(biased, debiased) CKA; `inner` are Σ KL, Σ KK and Σ LL."""
    pairs = list(zip(inner, ((k, l), (k, k), (l, l)), strict=True))
    n = k[0].shape[-1]
    biased = [  # Σ of the product of both matrices, doubly centred
        total - 2 / n * (a[0] * b[0]).sum(-1) + a[0].sum(-1) * b[0].sum(-1) / n**2 for total, (a, b) in pairs
    ]
    debiased = [_unbiased(total, *pair) for total, pair in pairs]
    return (
        biased[0] / ((biased[1] * biased[2]).sqrt() + tiny),
        debiased[0] / (debiased[1] * debiased[2]).sqrt(),
    )


def _unbiased(inner: Tensor, k: Sums, l: Sums) -> Tensor:  # noqa: E741
    """n (n − 3) times Song's unbiased estimate: diagonals do not count."""
    n = k[0].shape[-1]
    if n < 4:
        return torch.full_like(inner, math.nan)
    rows = [row - diagonal for row, diagonal in (k, l)]
    inner = inner - (k[1] * l[1]).sum(-1)
    totals = rows[0].sum(-1) * rows[1].sum(-1)
    return inner + totals / ((n - 1) * (n - 2)) - 2 / (n - 2) * (rows[0] * rows[1]).sum(-1)


def _unit(x: Tensor, tiny: float) -> Tensor:
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + tiny)
