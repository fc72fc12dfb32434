"""What analyses and their statistics are called for a reader: headings, and the labels of axes with their units."""

from __future__ import annotations

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


def heading(analysis: str) -> str:
    """The heading of an analysis in words, with its settings: `norms:variant=released` → Norms … (variant released).

    `analysis` is as the table calls it; one without a heading of its own is called by its name.
    """
    name, _, settings = analysis.partition(":")
    title = HEADINGS.get(name, words(name).capitalize())
    if settings:
        title += f" ({settings.replace('=', ' ').replace(',', ', ')})"
    return title


def axis_label(analysis: str, statistic: str) -> str:
    """What stands beside the axis of `statistic` of `analysis`: the quantity and its unit."""
    known = LABELS.get(analysis.partition(":")[0], {})
    return known.get(statistic.removesuffix("_by_column"), words(statistic))


def words(name: str) -> str:
    """`name` for a reader: matched_cosine → matched cosine."""
    return (
        name.replace("_", " ")
        .replace("cka", "CKA")
        .replace("log10", "log₁₀")
        .replace("phi2", "‖φ(q)‖²")
        .replace("h2", "‖h‖²")
    )
