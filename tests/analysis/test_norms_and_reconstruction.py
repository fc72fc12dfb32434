import math
import statistics

import pytest
import torch
from looking import golden, layers, make_heads, slow_attention, wave_heads

from vitruvius.analysis.norms import norms, token_norms
from vitruvius.analysis.reconstruction import reconstruction
from vitruvius.heads import Heads

FIVE = ("error", "relative_to_h", "relative_to_phi", "h2", "phi2")


@pytest.mark.parametrize("case", ["norms_d64", "norms_hard8"])
def test_released_token_norms_match_the_golden_ones(case):
    tensors = golden(case)
    found = [token_norms(heads, variant="released") for heads in layers(tensors)]
    torch.testing.assert_close(torch.stack([log.exp() for log, _ in found]), tensors["phi2"], rtol=1e-10, atol=0)
    torch.testing.assert_close(torch.stack([h2 for _, h2 in found]), tensors["h2"], rtol=1e-10, atol=0)


def test_the_literal_eight_of_the_released_script_is_right_for_width_64_only():
    for case, same in (("norms_d64", True), ("norms_hard8", False)):
        heads = layers(golden(case))[0]
        agree = torch.allclose(token_norms(heads)[0], token_norms(heads, variant="released")[0])
        assert agree is same


def test_the_means_of_the_specification_s_closed_form_inputs():
    heads = wave_heads()
    assert float(norms(heads)["phi2"].mean()) == pytest.approx(0.050306877909, rel=1e-10)
    assert float(norms(heads)["h2"].mean()) == pytest.approx(1.657997450649, rel=1e-10)
    assert float(norms(heads, variant="released")["phi2"].mean()) == pytest.approx(0.048058345489, rel=1e-10)


def test_norms_are_those_of_a_plain_loop():
    heads = make_heads()
    found = norms(heads)
    image, head = 1, 2
    weights = slow_attention(heads, image, head)
    h2 = [float(((weights[i] @ heads.v[image, head]) ** 2).sum()) for i in range(9)]
    phi2 = []
    for query in heads.q[image, head]:
        mass = sum(math.exp(float(query @ key) * heads.scale) for key in heads.k[image, head])
        phi2.append(math.exp(float(query @ query) * heads.scale) / mass**2)
    pairs = list(zip(phi2, h2, strict=True))
    expected = {
        "phi2": sum(phi2) / 9,
        "h2": sum(h2) / 9,
        "phi2_median": sorted(phi2)[4],
        "log10_ratio": sum(math.log10(p / h) for p, h in pairs) / 9,
        "error": sum(abs(p - h) for p, h in pairs) / 9,
        "relative_to_h": sum(abs(p - h) / h for p, h in pairs) / 9,
        "relative_to_phi": sum(abs(p - h) / p for p, h in pairs) / 9,
    }
    for name, value in expected.items():
        assert float(found[name][image, head]) == pytest.approx(value, rel=1e-12), name
    quarters = statistics.quantiles([math.log10(p) for p in phi2], n=4, method="inclusive")
    assert found["log10_phi2_quantiles"][image, head, 1:4].tolist() == pytest.approx(quarters, rel=1e-12)


def test_released_errors_compare_means_and_exact_ones_tokens():
    heads = make_heads(width=64)
    exact, released = norms(heads), norms(heads, variant="released")
    torch.testing.assert_close(released["error"], (exact["phi2"] - exact["h2"]).abs())
    assert (exact["error"] >= released["error"] - 1e-12).all()
    assert not torch.allclose(exact["error"], released["error"])


def test_a_perfect_projection_has_ratio_one_and_no_error():
    """One key and one query that coincide: φ(q) is 1/κ(q,q), so v of that squared length is the projection."""
    q = torch.full((1, 1, 1, 4), 0.5, dtype=torch.float64)
    length = math.exp(-0.5 * float((q * q).sum()) * 0.5)
    v = torch.tensor([length, 0, 0, 0], dtype=torch.float64).view(1, 1, 1, 4)
    found = norms(Heads(q, q, v, scale=0.5))
    assert float(found["log10_ratio"]) == pytest.approx(0, abs=1e-12)
    assert float(found["error"]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("size", [1e4, 1e18])
def test_queries_too_long_for_float32_keep_a_finite_ratio(size):
    heads = make_heads()
    heads = Heads(*(x.float() for x in heads[:3]), scale=heads.scale)._replace(q=(heads.q * size).float())
    assert not (heads.q.square().sum(-1) * heads.scale).exp().isfinite().all()
    assert norms(heads)["log10_ratio"].isfinite().all()
    assert norms(heads)["h2"].isfinite().all()
    assert norms(heads, variant="released")["phi2"].isfinite().all()


def golden_layer() -> tuple[dict[str, torch.Tensor], Heads]:
    tensors = golden("reconstruction")
    x = tensors["x"]
    qkv = x @ tensors["qkv.weight"].T + tensors["qkv.bias"]
    q, k, v = qkv.view(2, 12, 3, 3, 16).permute(2, 0, 3, 1, 4)
    return tensors, Heads(q, k, v, scale=0.25)


@pytest.mark.parametrize("pass_", ["train", "test"])
def test_the_five_values_of_the_reproduction_match_the_golden_ones(pass_):
    tensors, heads = golden_layer()
    found = reconstruction(heads, standardise=True, variant="reproduction")
    means = torch.stack([found[name].mean() for name in FIVE])
    torch.testing.assert_close(means, tensors[f"R.{pass_}"], rtol=1e-10, atol=0)


def test_the_logarithm_of_the_released_error_matches_the_golden_one():
    tensors, heads = golden_layer()
    found = reconstruction(heads, standardise=True, variant="released")
    torch.testing.assert_close(found["signed_error"].mean().log(), tensors["O.train_error"], rtol=1e-10, atol=0)


def test_the_five_values_of_the_specification_s_closed_form_inputs():
    found = reconstruction(wave_heads(), standardise=True, variant="reproduction")
    means = [float(found[n].mean()) for n in FIVE]
    expected = [1.601545132861, 0.964171189996, 31.978856850769, 1.659383318464, 0.057838185603]
    assert means == pytest.approx(expected, rel=1e-10)
    assert float(reconstruction(wave_heads(), standardise=True, variant="released")["signed_error"].mean()) < 0


def test_the_exact_errors_are_those_of_norms_and_the_signed_one_is_the_paper_s():
    heads = make_heads()
    found, tokens = reconstruction(heads), norms(heads)
    for name in FIVE:
        torch.testing.assert_close(found[name], tokens[name])
    torch.testing.assert_close(found["signed_error"], tokens["phi2"] - tokens["h2"])


def test_standardised_queries_make_the_numerator_constant():
    """q·q = D − 1, so with uniform attention ‖φ(q)‖² = exp((D − 1)/√D) / N²."""
    heads = make_heads(tokens=7, width=16)
    heads = heads._replace(k=torch.ones_like(heads.k))  # standardised to zero: uniform attention
    found = reconstruction(heads, standardise=True)["phi2"]
    torch.testing.assert_close(found, torch.full_like(found, math.exp(15 / 4) / 49))
