"""Running sums, nulls, padding, claims: the machinery between Heads and the table."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from looking import make_heads, make_site

from vitruvius._random import Dice
from vitruvius.analysis.base import NULLS, question
from vitruvius.analysis.collecting import Collector, Moments, Sample, judge, over_windows, real_groups
from vitruvius.analysis.value_vectors import value_vectors
from vitruvius.heads import Heads


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.floats(-1e6, 1e6), st.integers(0, 100))
def test_moments_of_parts_add_up_to_the_moments_of_all(sizes, offset, seed):
    values = offset + torch.randn(sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    parts = [Moments.of(part) for part in values.split(sizes)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    torch.testing.assert_close(total.mean, values.mean(0))
    if len(values) > 1:
        torch.testing.assert_close(total.std, values.std(0), rtol=1e-5, atol=1e-9)
    else:
        assert total.std.isnan().all()


def test_values_that_are_not_finite_are_counted_and_left_out():
    values = torch.tensor([[1.0, math.nan], [3.0, math.inf], [math.nan, -math.inf]])
    found = Moments.of(values)
    assert found.count.tolist() == [2, 0]
    assert found.dropped.tolist() == [1, 3]
    assert float(found.mean[0]) == 2
    assert float(found.std[0]) == pytest.approx(math.sqrt(2))


def dice(count=4, seed=0):
    return Dice(torch.arange(count), seed, "analysis/test")


def test_the_spectrum_null_turns_to_either_side():
    """Householder's QR gives the first token one sign always; uniform directions have both."""
    heads = make_heads(batch=64, heads=1, tokens=5, width=1)
    drawn = NULLS["spectrum"](heads, Dice(torch.arange(64), 0, "null"))
    for x in drawn[:3]:
        assert 16 <= int((x[:, 0, 0, 0] > 0).sum()) <= 48


@pytest.mark.parametrize("name", NULLS)
def test_a_null_belongs_to_its_image_whatever_the_batch(name):
    heads = make_heads(batch=4)
    whole = NULLS[name](heads, dice())
    rows = torch.tensor([2])
    alone = NULLS[name](Heads(*(x[rows] for x in heads[:3]), scale=heads.scale), dice()[rows])
    for x, y in zip(whole[:3], alone[:3], strict=True):
        torch.testing.assert_close(x[rows], y)
    other = NULLS[name](heads, dice(seed=1))
    assert not torch.allclose(whole.k, other.k)


@pytest.mark.parametrize(("tokens", "width"), [(9, 4), (4, 9)])
def test_each_null_keeps_what_it_says_and_nothing_else(tokens, width):
    heads = make_heads(batch=4, tokens=tokens, width=width)
    gaussian, spectrum, permuted = (NULLS[name](heads, dice()) for name in ("gaussian", "spectrum", "permuted"))
    torch.testing.assert_close(torch.linalg.svdvals(spectrum.k), torch.linalg.svdvals(heads.k))
    torch.testing.assert_close(spectrum.v.mT @ spectrum.v, heads.v.mT @ heads.v)
    assert not torch.allclose(spectrum.k, heads.k)
    assert not torch.allclose(torch.linalg.svdvals(gaussian.k), torch.linalg.svdvals(heads.k))
    torch.testing.assert_close(permuted.k.sort(-2).values.sum(-1), heads.k.sort(-2).values.sum(-1))
    assert not torch.allclose(permuted.k @ permuted.v.mT, heads.k @ heads.v.mT)
    assert all(null.scale == heads.scale for null in (gaussian, spectrum, permuted))


def test_the_gaussian_null_has_the_size_of_the_heads():
    heads = make_heads(batch=4, tokens=100, width=32)
    heads = heads._replace(k=7 * heads.k)
    drawn = NULLS["gaussian"](heads, dice()).k
    assert float(drawn.square().mean().sqrt()) == pytest.approx(7, rel=0.02)
    assert float(drawn.mean()) == pytest.approx(0, abs=0.1)


def padded_heads(width=4):
    heads = make_heads(batch=3, tokens=6, width=width)
    bias = torch.zeros(3, 1, 1, 6, dtype=torch.float64)
    bias[1, ..., 4:] = torch.finfo(torch.float32).min
    bias[2, ..., 4:] = -torch.inf
    return heads._replace(bias=bias)


def test_padded_tokens_are_taken_out_of_queries_keys_and_values():
    heads = padded_heads()
    groups = {tuple(rows.tolist()): part for rows, part in real_groups(heads)}
    assert set(groups) == {(0,), (1, 2)}
    short = groups[1, 2]
    for x, y in zip(short[:3], heads[:3], strict=True):
        torch.testing.assert_close(x, y[1:, :, :4])
    assert short.bias is not None
    assert short.bias.shape == (2, 1, 1, 4)
    ((_, again),) = real_groups(short)
    assert again is short


def test_chance_for_sentences_of_one_length_stands_beside_sentences_of_several():
    """Of three sentences the first is longer; chance is drawn for it alone, so only chance has curves."""
    heads = padded_heads(width=8)
    collector = Collector([question("eigenvalues")], {"blocks.0.attn": make_site(heads)}, nulls=["gaussian"])
    collector.begin(torch.arange(3), with_nulls=1)
    collector.see("blocks.0.attn", heads)
    collector.end()
    assert "spectrum" not in {statistic for _, _, statistic, null in collector.sums.moments if not null}
    assert ("blocks.0.attn", "eigenvalues", "max", "gaussian") in collector.sums.apart


def test_a_mask_that_hides_no_key_from_all_is_no_padding():
    causal = torch.full((6, 6), -torch.inf).triu(1)
    for heads in (make_heads(tokens=6)._replace(bias=causal), make_heads(tokens=6)):
        ((_, part),) = real_groups(heads)
        assert part is heads


def test_images_that_are_not_finite_are_set_aside():
    heads = make_heads(batch=3)
    broken = heads.v.clone()
    broken[1, 0, 0, 0] = math.inf
    ((rows, part),) = real_groups(heads._replace(v=broken))
    assert rows.tolist() == [0, 2]
    torch.testing.assert_close(part.v, heads.v[[0, 2]])
    assert value_vectors(part)["cosine"].isfinite().all()


def test_a_claim_needs_both_tails_of_welch_at_999_of_a_thousand():
    """Of many images, 3.29 standard errors: 3.09 would be enough for one side."""
    error = math.sqrt(2 / 10_000)
    claims = [judge(Sample(far * error, 1.0, 10_000), Sample(0.0, 1.0, 10_000), apart=1.0)[1] for far in (3.2, 3.4)]
    assert claims[0] == "indistinguishable from chance"
    assert claims[1].startswith("above chance")


def test_windows_are_averaged_image_by_image():
    values = torch.arange(12.0).view(6, 2)
    torch.testing.assert_close(over_windows(values, 2), values.view(2, 3, 2).mean(1))
    torch.testing.assert_close(over_windows(values, 6), values)


def test_claims_say_what_the_numbers_say():
    def told(observed, null, apart=1.0):
        return judge(
            *(Sample(mean, std, rest[0] if rest else 50) for mean, std, *rest in (observed, null)), apart=apart
        )

    assert told((0.32, 0.01), (0.319, 0.01))[1] == "indistinguishable from chance"
    assert told((0.5, 0.1), (0.3, 0.1)) == (pytest.approx(2), "above chance by 0.2")
    assert told((0.1, 0.1), (0.3, 0.1)) == (pytest.approx(-2), "below chance by 0.2")
    assert told((0.31, 0.1, 10**6), (0.3, 0.1, 10**6))[1].endswith("negligibly")
    assert told((1, 0.1), (1, 0.1), apart=1e-9) == (None, "the same by construction")
    assert told((1, math.nan, 1), (2, 0.1)) == (None, "too few images for a claim")
    assert told((1, 0.0), (2, 0.0)) == (None, "below chance by 1")
    assert told((1e-200, 1e-200), (3e-200, 1e-200))[1].startswith(("below", "indist"))


def test_chance_is_called_chance_at_the_promised_rate():
    """Of 2000 comparisons of equal distributions about 2 may be called different at 99.9 %."""
    draws = torch.randn(2000, 2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    means, stds = draws.mean(-1), draws.std(-1)
    samples = [
        [Sample(float(m), float(s), 12) for m, s in zip(*pair, strict=True)] for pair in zip(means, stds, strict=True)
    ]
    claims = [judge(*pair, apart=1)[1] for pair in samples]
    wrong = sum(not claim.startswith("indist") for claim in claims)
    assert wrong <= 8
