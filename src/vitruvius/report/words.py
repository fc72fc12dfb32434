"""Numbers as a reader wants them, and what analyses and their statistics are called: headings, labels of axes."""

from __future__ import annotations

import math
from typing import Any

DASH = "–"
HEADINGS = {
    "attention_gradient": "Attention times gradient, last layer",
    "distance": "Distance of attention",
    "effective_rank": "Effective rank",
    "eigenvalues": "Eigenvalues of the kernel of the keys",
    "eigenvalues_by_rank": "Eigenvalues by rank, as published",
    "entropy": "Entropy of attention",
    "gammas": "Are values principal components? Constancy of gamma",
    "head_similarity": "Similarity of heads",
    "integrated_gradients": "Integrated gradients",
    "norms": "Norms of queries and outputs",
    "reconstruction": "Reconstruction error",
    "relevance": "Relevance",
    "rollout": "Attention rollout",
    "token_norms": "Norms of tokens, and sinks",
    "value_vectors": "Values against kernel PCA's prediction",
}
LABELS = {  # analysis → statistic → label of its axis; a name without one is written as it is
    "distance": {
        "patches": "mean distance (patches)",
        "relative": "distance / that of even attention",
        "neighbours": "weight on the 3 × 3 around (share)",
    },
    "effective_rank": dict.fromkeys(("keys", "queries", "values", "output"), "effective rank (dimensions)"),
    "eigenvalues": {
        **dict.fromkeys(("max", "min", "mean", "median", "spectrum"), "eigenvalue"),
        "first_share": "first eigenvalue / trace",
    },
    "eigenvalues_by_rank": dict.fromkeys(("max", "min", "mean", "median"), "eigenvalue"),
    "entropy": {
        "relative": "entropy / largest possible",
        "nats": "entropy (nats)",
        "effective_keys": "effective number of keys",
        "largest_weight": "largest weight (share)",
    },
    "gammas": {
        "alignment": "|cos(K a, a)|",
        "relative": "relative difference between tokens",
        "relative_std": "deviation of the relative difference",
        "absolute": "difference between tokens",
        "absolute_std": "deviation of the difference",
    },
    "head_similarity": {"maps": "cosine of attention maps", "outputs": "linear CKA of outputs"},
    "norms": {
        "log10_ratio": "log₁₀(‖φ(q)‖² / ‖h‖²)",
        "phi2": "‖φ(q)‖², mean over tokens",
        "h2": "‖h‖², mean over tokens",
        "phi2_median": "‖φ(q)‖², median over tokens",
        "h2_median": "‖h‖², median over tokens",
    },
    "reconstruction": {
        "error": "|‖φ(q)‖² − ‖h‖²|",
        "relative_to_h": "error / ‖h‖²",
        "relative_to_phi": "error / ‖φ(q)‖²",
        "signed_error": "‖φ(q)‖² − ‖h‖²",
    },
    "rollout": {
        "relative_entropy": "entropy / largest possible",
        "effective_patches": "effective number of patches",
        "largest_share": "largest share of a patch",
        "prefix": "share of the prefix tokens",
    },
    "token_norms": {
        "sink": "weight on the strongest sink (share)",
        **dict.fromkeys(("key_peak", "value_peak", "output_peak"), "largest norm / median"),
        **dict.fromkeys(("key", "value", "output"), "norm (mean over tokens)"),
        "outliers": "outlying tokens (share)",
    },
    "value_vectors": {
        "matched_cosine": "cosine after matching",
        "linear_cka": "linear CKA",
        "linear_cka_debiased": "linear CKA, debiased",
        "subspace_overlap": "overlap of subspaces (share)",
        "procrustes": "cosine after the best rotation",
        "principal_angle": "mean principal angle (degrees)",
        "cosine": "cosine",
    },
}


def number(value: Any) -> float | None:
    """A finite float, or None for anything else (missing, text, bool, NaN, infinity)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def percent(value: float | None) -> str:
    """0.973 → `97.3 %`."""
    return DASH if value is None else f"{100 * value:.1f} %"


def interval(low: float | None, high: float | None) -> str:
    """The two ends of an interval in per cent, or nothing."""
    return "" if low is None or high is None else f"{100 * low:.1f} to {100 * high:.1f}"


def count(value: float | None) -> str:
    """1234567 → `1 234 567`, with thin spaces."""
    return DASH if value is None else f"{value:,.0f}".replace(",", "\u202f")


def duration(seconds: float | None) -> str:
    """75 → `1 min 15 s`."""
    if seconds is None:
        return DASH
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def pixels(eps: float) -> str:
    """An ε in pixels of [0, 1] as one writes it: 4/255 where it is such a fraction, else decimal."""
    halves = 2 * eps * 255
    whole = abs(halves - round(halves)) < 1e-3 and (round(halves) % 2 == 0 or eps < 4 / 255)
    return f"{round(halves) / 2:g}/255" if whole and 0 < eps < 1 else f"{eps:.3g}"


def heading(analysis: str) -> str:
    """The heading of an analysis in words, with its settings: `norms:variant=released` → Norms … (variant released)."""
    name, _, settings = analysis.partition(":")
    title = HEADINGS.get(name, words(name).capitalize())
    if settings:
        title += f" ({settings.replace('=', ' ').replace(',', ', ')})"
    return title


def axis_label(analysis: str, statistic: str) -> str:
    """What stands beside the axis of `statistic` of `analysis`: the quantity and its unit."""
    labels = LABELS.get(analysis.partition(":")[0], {})
    return labels.get(statistic.removesuffix("_by_column"), words(statistic))


def words(name: str) -> str:
    """`name` for a reader: matched_cosine → matched cosine."""
    return (
        name.replace("_", " ")
        .replace("cka", "CKA")
        .replace("log10", "log₁₀")
        .replace("phi2", "‖φ(q)‖²")
        .replace("h2", "‖h‖²")
    )
