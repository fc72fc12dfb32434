import json

import pytest
import torch
from looking import GOLDEN, golden, layers, make_heads, wave_heads
from safetensors import safe_open

from vitruvius.analysis.value_vectors import RELEASED, compare, kernel_cka, linear_cka, predicted_values, value_vectors
from vitruvius.heads import Heads

OURS = {
    "mean_similarity": "cosine",
    "min_similarity": "cosine_min",
    "max_similarity": "cosine_max",
    "negative_percentage": "negative",
    "optimal_matching_similarity": "matched_cosine",
    "optimal_min_similarity": "matched_min",
    "optimal_max_similarity": "matched_max",
    "optimal_negative_percentage": "matched_negative",
    "frobenius_difference": "frobenius",
    "relative_frobenius_difference": "relative_frobenius",
    "avg_euclidean_distance": "euclidean",
    "avg_l1_distance": "l1",
    "avg_pearson_correlation": "pearson",
    "linear_cka": "linear_cka",
    "kernel_cka": "kernel_cka",
}


@pytest.mark.parametrize("theirs", OURS)
def test_every_released_metric_matches_the_golden_one_on_the_stored_prediction(theirs):
    tensors = golden("value_vectors")
    found = compare(tensors["v"], tensors["Vhat"], **RELEASED)[OURS[theirs]]
    factor = 100 if "percentage" in theirs else 1
    torch.testing.assert_close(factor * found, tensors[f"metric.{theirs}"], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("pair", [0, 1, 2])
def test_metrics_of_noisy_permuted_and_identical_pairs_match_the_golden_ones(pair):
    tensors = golden("value_vectors")
    with safe_open(GOLDEN / "kpca_value_vectors.safetensors", "pt") as file:
        order = json.loads(file.metadata()["metric_order"])
    v, w = (tensors[f"pair{pair}.{name}"][None, None] for name in "VW")
    found, expected = compare(v, w, **RELEASED), dict(zip(order, tensors[f"pair{pair}.metrics"], strict=True))
    for theirs, ours in OURS.items():
        factor = 100 if "percentage" in theirs else 1
        torch.testing.assert_close(factor * found[ours][0, 0], expected[theirs], rtol=1e-10, atol=1e-13)
    assert bool(found["allclose"]) is bool(tensors[f"pair{pair}.allclose"])


def test_the_prediction_and_both_ckas_match_the_golden_ones_end_to_end():
    tensors = golden("value_vectors")
    for layer, heads in enumerate(layers(tensors)):
        directions, log_mass = predicted_values(heads, standardise=False, released=True)
        predicted = directions * (-log_mass).exp()[..., None]
        torch.testing.assert_close(predicted.abs(), tensors["Vhat"][layer].abs(), rtol=1e-9, atol=1e-13)
        found = value_vectors(heads, variant="released")
        for name in ("linear_cka", "kernel_cka"):
            torch.testing.assert_close(found[name], tensors[f"metric.{name}"][layer], rtol=1e-9, atol=0)


def test_the_closed_form_inputs_of_the_specification_have_its_prediction_and_ckas():
    heads = wave_heads()
    directions, log_mass = predicted_values(heads, standardise=False)
    predicted = (directions * (-log_mass).exp()[..., None])[0, 0]
    assert float(predicted.norm()) == pytest.approx(0.085445970627, rel=1e-9)
    rows = [0.036139677, 0.037969103, 0.035149459, 0.041805272, 0.039624734]
    assert predicted.norm(dim=-1).tolist() == pytest.approx(rows, rel=1e-7)
    found = value_vectors(heads, variant="released")
    assert float(found["linear_cka"][0, 0]) == pytest.approx(0.502758546648, rel=1e-9)
    assert float(found["kernel_cka"][0, 0]) == pytest.approx(0.619691144783, rel=1e-9)
    v, k = heads.v[0, 0], heads.k[0, 0]
    assert float(linear_cka(v, k)[0]) == pytest.approx(0.719167561067, rel=1e-9)
    assert float(kernel_cka(v, k)[0]) == pytest.approx(0.881801880383, rel=1e-9)


@pytest.mark.parametrize("kind", ["normal", "orthonormal"])
def test_random_values_match_by_a_cosine_of_0_319_at_the_papers_sizes(kind):
    """The best published cosine, 0.32, is what chance gives with 197 tokens of width 64."""
    heads = make_heads(batch=1, heads=4, tokens=197, width=64)
    other = heads.k if kind == "normal" else torch.linalg.qr(heads.k).Q
    found = compare(heads.v, other)
    assert float(found["matched_cosine"].mean()) == pytest.approx(0.319, abs=0.003)
    assert float(found["cosine"].mean()) == pytest.approx(0, abs=0.01)
    assert 0.24 < float(found["linear_cka"].mean()) < 0.29
    assert 0.35 < float(found["kernel_cka"].mean()) < 0.41
    for name in ("linear_cka_debiased", "kernel_cka_debiased"):
        assert float(found[name].mean()) == pytest.approx(0, abs=0.01)
    assert float(found["subspace_overlap"].mean()) == pytest.approx(64 / 197, abs=0.003)


def test_random_keys_and_values_stand_where_chance_stands_in_every_debiased_measure():
    heads = make_heads(batch=1, heads=4, tokens=197, width=64)
    found = value_vectors(heads, standardise=True)
    assert float(found["linear_cka_debiased"].mean()) == pytest.approx(0, abs=0.01)
    assert float(found["subspace_overlap"].mean()) == pytest.approx(64 / 197, abs=0.005)
    assert float(found["matched_cosine"].mean()) == pytest.approx(0.313, abs=0.006)


def test_values_that_kernel_pca_predicts_are_recognised_up_to_sign_and_rotation():
    heads = make_heads(tokens=20, width=6)
    directions, log_mass = predicted_values(heads, standardise=False)
    truth = directions * (-log_mass).exp()[..., None]
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    found = value_vectors(heads._replace(v=truth @ turn))
    for name in ("linear_cka", "linear_cka_debiased", "kernel_cka", "subspace_overlap", "procrustes"):
        torch.testing.assert_close(found[name], torch.ones_like(found[name]), rtol=0, atol=1e-9)
    assert (found["principal_angle"] < 1e-4).all()
    assert (found["cosine"].abs() < 0.9).all()  # which a token by token comparison does not see
    assert value_vectors(heads._replace(v=truth))["allclose"].all()


def test_wide_values_are_compared_with_as_many_columns_as_there_are_eigenvectors():
    heads = make_heads(tokens=5, width=3, value_width=8)
    found = value_vectors(heads)
    assert found["matched_cosine"].shape == (2, 3)
    assert all(values.isfinite().all() for name, values in found.items() if "debiased" not in name)


@pytest.mark.parametrize("size", [1e3, 1e19])
def test_keys_that_overflow_float32_never_raise(size):
    heads = make_heads(tokens=12)
    heads = Heads(*(x.float() for x in heads[:3]), scale=heads.scale)
    found = value_vectors(heads._replace(k=heads.k * size))
    for name in ("matched_cosine", "relative_frobenius", "subspace_overlap"):
        assert found[name].isfinite().all(), name
