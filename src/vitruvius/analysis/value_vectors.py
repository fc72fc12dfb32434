"""Value vectors: are the learnt V what kernel PCA would choose, V̂ = diag(1/g) (I − 1/N) A with eigenvectors A of the
centred Gram matrix? (arXiv:2406.13762, equation 8; arXiv:2505.07908, section 6.)

Eigenvectors have no sign and no fixed order, so `cosine` sees chance at best; Procrustes, the principal angles and
CKA do not depend on either. B batch, H heads, N tokens, E value width.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvius.analysis._kernel import key_gram
from vitruvius.analysis.base import Statistics, analyses, precise
from vitruvius.analysis.similarity import (
    cosines,
    kernel_cka,
    linear_cka,
    matched_cosines,
    pearson,
    principal_cosines,
    procrustes,
)
from vitruvius.heads import Heads

RELEASED = {"tiny_length": 1e-8, "tiny_product": 1e-10}
FIRST = ("matched_cosine", "linear_cka", "linear_cka_debiased", "subspace_overlap", "procrustes", "cosine")


@analyses.register("value_vectors")
def value_vectors(
    heads: Heads, *, standardise: bool = False, variant: Literal["exact", "released"] = "exact"
) -> Statistics:
    """V against the values kernel PCA predicts: directly, matched, up to rotation, and by CKA.

    standardise: z-score each key over its width first, with the papers' scale 1/√D; else the model's own scale.
    variant: exact; or released, with the small constants of the published script.
    """
    heads = precise(heads)
    if variant == "released":
        directions, log_mass = predicted_values(heads, standardise=standardise, released=True)
        w = directions * (-log_mass).exp()[..., None]
        return compare(heads.v, w, **RELEASED)
    directions, log_mass = predicted_values(heads, standardise=standardise)
    lowest = log_mass.amin(-1, keepdim=True)[..., None]  # a common factor: only the distances of V and V̂ feel it
    w = directions * (lowest.squeeze(-1) - log_mass).exp()[..., None]
    return _in_order(
        {
            **alignments(heads.v, w),
            **similarities(heads.v, directions),  # nor do cosines feel the length of a token
            **distances(heads.v, w * (-lowest).exp()),
        }
    )


def compare(v: Tensor, w: Tensor, *, tiny_length: float = 0.0, tiny_product: float = 0.0) -> Statistics:
    """Every statistic of two sets of values as they stand; the published ones add tiny numbers to denominators.

    v: (…, N, E), the learnt values.
    w: (…, N, E), those they are compared with.
    tiny_length: added to lengths in cosines and correlations.
    tiny_product: added to products of norms in CKA.
    """
    return _in_order(
        {
            **alignments(v, w, tiny=tiny_product),
            **similarities(v, w, tiny=tiny_length),
            **distances(v, w),
        }
    )


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


def similarities(v: Tensor, w: Tensor, *, tiny: float = 0.0) -> Statistics:
    """Cosines of tokens (…, N, E), direct and matched, and correlations; `tiny` is added to lengths."""
    direct, matched = cosines(v, w, tiny=tiny), matched_cosines(v, w, tiny=tiny)
    return {
        "cosine": direct.mean(-1),
        "cosine_min": direct.amin(-1),
        "cosine_max": direct.amax(-1),
        "negative": (direct < 0).double().mean(-1),
        "matched_cosine": matched.mean(-1),
        "matched_min": matched.amin(-1),
        "matched_max": matched.amax(-1),
        "matched_negative": (matched < 0).double().mean(-1),
        "pearson": pearson(v, w, tiny=tiny).mean(-1),
    }


def alignments(v: Tensor, w: Tensor, *, tiny: float = 0.0) -> Statistics:
    """CKA, Procrustes and principal angles: none depends on signs, order or rotation of the columns.

    `tiny` is added to products of norms.
    """
    linear, kernel = linear_cka(v, w, tiny=tiny), kernel_cka(v, w, tiny=tiny)
    angles = principal_cosines(v, w)
    return {
        "linear_cka_debiased": linear[1],
        "kernel_cka_debiased": kernel[1],
        "subspace_overlap": angles.square().mean(-1),
        "procrustes": procrustes(v, w),
        "linear_cka": linear[0],
        "kernel_cka": kernel[0],
        "principal_angle": angles.arccos().rad2deg().mean(-1),
    }


def distances(v: Tensor, w: Tensor) -> Statistics:
    """How far the learnt V and the predicted V̂ lie apart, (…, N, E) each; relative to V."""
    gap = v - w
    frobenius = torch.linalg.matrix_norm(gap)
    return {
        "relative_frobenius": frobenius / torch.linalg.matrix_norm(v),
        "frobenius": frobenius,
        "euclidean": torch.linalg.vector_norm(gap, dim=-1).mean(-1),
        "l1": gap.abs().sum(-1).mean(-1),
        "allclose": (gap.abs() <= 1e-5 + 1e-3 * w.abs()).all(-1).all(-1).double(),
    }


def _in_order(statistics: Statistics) -> Statistics:
    return {name: statistics[name] for name in dict.fromkeys((*FIRST, *statistics))}
