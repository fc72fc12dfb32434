import math

import pytest
import torch
from looking import golden, layers, make_heads, make_site, slow_gram, wave_heads

from vitruvius.analysis._kernel import key_gram
from vitruvius.analysis.eigenvalues import EigenvaluesByRank, eigenvalues, spectrum
from vitruvius.attention.symmetric import standardise


@pytest.mark.parametrize(("case", "standard"), [("std", True), ("raw", False)])
def test_released_eigenvalues_match_the_golden_ones(case, standard):
    tensors = golden("eigenvalues")
    found = torch.stack([spectrum(h, standardise=standard, variant="released") for h in layers(tensors)])
    torch.testing.assert_close(found, tensors[f"{case}.eigvals_abs"], rtol=0, atol=1e-12)
    last = layers(tensors)[-1]
    gram = key_gram(last, standardise=standard, released=True).centred
    torch.testing.assert_close(gram[-1, -1], tensors[f"{case}.K_centered_last"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("case", "standard"), [("std", True), ("raw", False)])
def test_the_published_summary_by_rank_matches_the_golden_one(case, standard):
    tensors = golden("eigenvalues")
    analysis = EigenvaluesByRank(standardise=standard)
    for heads in layers(tensors):
        analysis.see(heads, make_site(heads))
    found = analysis.result()
    for name in ("max", "min", "mean", "median"):
        torch.testing.assert_close(found[name], tensors[f"{case}.per_image_{name}"], rtol=1e-10, atol=1e-13)
    summary = [f(found[name]) for name in ("max", "min", "mean", "median") for f in (torch.mean, torch.std)]
    torch.testing.assert_close(torch.stack(summary), tensors[f"{case}.summary"], rtol=1e-9, atol=1e-13)


def test_the_closed_form_keys_of_the_specification_have_its_eigenvalues():
    standard = spectrum(wave_heads(), standardise=True, variant="released")[0, 0]
    raw = spectrum(wave_heads(), standardise=False, variant="released")[0, 0]
    expected = [0.1012103659, 0.05768508398, 0.02128319181, 0.004678320214]
    torch.testing.assert_close(standard, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=0)
    expected = [0.03212164595, 0.02683225774, 0.01130022246, 0.007224809665]
    torch.testing.assert_close(raw, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=0)
    mass = key_gram(wave_heads(), standardise=False).log_mass.exp()[0, 0]
    assert float(mass[0]) == pytest.approx(24.74917482, rel=1e-9)


def test_the_gram_matrix_is_the_one_of_the_definition():
    heads = make_heads()
    gram = key_gram(heads, standardise=False).centred
    for image, head in ((0, 0), (1, 2)):
        torch.testing.assert_close(gram[image, head], slow_gram(heads.k[image, head], heads.scale))


@pytest.mark.parametrize("size", [0.1, 1.0, 5.0])
def test_the_largest_eigenvalue_is_at_most_the_trace_and_the_trace_at_most_the_number_of_keys(size):
    heads = make_heads(tokens=30, width=8)
    heads = heads._replace(k=size * heads.k)
    trace = key_gram(heads, standardise=False).centred.diagonal(dim1=-2, dim2=-1).sum(-1)
    largest = eigenvalues(heads, standardise=False)["max"]
    assert (largest <= trace + 1e-15).all()
    assert (trace <= 30).all()


def test_standardised_keys_bound_the_trace_by_tokens_over_the_exponential_of_their_length():
    heads = make_heads(tokens=197, width=64, heads=1)
    trace = key_gram(heads, standardise=True).centred.diagonal(dim1=-2, dim2=-1).sum(-1)
    bound = 197 / math.exp(63 / 8)
    assert bound == pytest.approx(0.075, abs=1e-3)
    assert (trace <= bound).all()


def test_random_standardised_keys_have_the_spectrum_of_the_specification():
    found = eigenvalues(make_heads(batch=1, heads=3, tokens=197, width=64))
    assert float(found["max"].mean()) == pytest.approx(3.16e-4, rel=0.02)
    assert float(found["min"].mean()) == pytest.approx(3.04e-4, rel=0.02)
    assert float(found["mean"].mean()) == pytest.approx(3.08e-4, rel=0.01)


def test_the_statistics_are_those_of_the_spectrum_and_the_curve_is_the_spectrum():
    heads = make_heads(tokens=6, width=10)  # more width than tokens
    found = eigenvalues(heads)
    values = spectrum(heads, standardise=True)
    assert values.shape == (2, 3, 6)
    torch.testing.assert_close(found["spectrum"], values)
    torch.testing.assert_close(found["max"], values[..., 0])
    torch.testing.assert_close(found["first_share"], values[..., 0] / values.sum(-1))
    full = torch.linalg.eigvalsh(key_gram(heads, standardise=True).centred)
    torch.testing.assert_close(values.flip(-1), full.clamp(min=0))


def test_the_model_s_own_scale_counts_unless_keys_are_standardised():
    heads = make_heads()
    other = heads._replace(scale=1.0)
    torch.testing.assert_close(spectrum(other, standardise=True), spectrum(heads, standardise=True))
    doubled = heads._replace(k=2 * standardise(heads.k))
    assert not torch.allclose(spectrum(other, standardise=False), spectrum(heads, standardise=False))
    torch.testing.assert_close(spectrum(doubled, standardise=True), spectrum(heads, standardise=True))


@pytest.mark.parametrize("size", [1e3, 1e19, 1e38])
def test_keys_that_overflow_float32_give_finite_eigenvalues(size):
    heads = make_heads()
    heads = heads._replace(k=(heads.k.sign() * size).float(), q=heads.q.float(), v=heads.v.float())
    assert not (heads.k @ heads.k.mT * heads.scale).exp().isfinite().all()  # the direct way fails
    for name, values in eigenvalues(heads, standardise=False).items():
        if name != "first_share":  # 0 / 0 when every eigenvalue underflows: the table drops it with a remark
            assert values.isfinite().all(), name
