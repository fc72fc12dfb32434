import pytest
import torch
from attending import assert_golden, assert_golden_gradients, make_heads, make_site, run_layer

from golden_files import read_golden
from vitruvius._errors import SurgeryError
from vitruvius.attention.base import build_core
from vitruvius.attention.softmax import attend
from vitruvius.attention.symmetric import symmetrise
from vitruvius.heads import HeadWeights


@pytest.mark.parametrize("name", ["symmetric_a", "symmetric_b"])
def test_symmetric_attention_matches_the_golden_outputs_and_gradients(name):
    tensors, metadata = read_golden(name)
    _, out, leaves = run_layer(tensors, metadata["H"], build_core(["symmetric"], make_site()))
    assert_golden(out, tensors["out"])
    assert_golden_gradients(out.square().sum(), leaves, tensors)


def test_where_queries_equal_keys_already_it_is_softmax_exactly():
    heads = make_heads()
    heads = heads._replace(q=heads.k)
    assert torch.equal(build_core(["symmetric"], make_site())(heads), attend(heads))


def random_weights(bias, seed=0, heads=2, width=3, dim=6):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    biases = (draw(heads, width), draw(heads, width), None) if bias else (None, None, None)
    return HeadWeights(
        draw(heads, width, dim), draw(heads, width, dim), draw(heads, width, dim), draw(dim, heads, width), *biases
    )


@pytest.mark.parametrize("bias", [True, False])
def test_symmetrise_keeps_the_function_of_weights_that_are_symmetric_already(bias):
    weights = random_weights(bias)
    weights.q.copy_(weights.k)
    if bias:
        weights.q_bias.copy_(weights.k_bias)
    expected = weights.k.mT @ weights.k
    symmetrise(weights)
    torch.testing.assert_close(weights.k.mT @ weights.k, expected)


def test_symmetrise_finds_the_nearest_form_no_random_change_comes_nearer():
    weights = random_weights(bias=False)
    form = weights.q.mT @ weights.k
    plain = (weights.k.mT @ weights.k - form).square().sum()
    symmetrise(weights)
    best = (weights.k.mT @ weights.k - form).square().sum()
    assert best < plain
    generator = torch.Generator().manual_seed(1)
    for size in (1e-3, 1e-1):
        for _ in range(50):
            other = weights.k + size * torch.randn(weights.k.shape, generator=generator, dtype=torch.float64)
            assert (other.mT @ other - form).square().sum() > best


def test_symmetrise_refuses_weights_that_are_not_finite_and_touches_nothing():
    weights = random_weights(bias=True)
    weights.q[0, 0, 0] = torch.nan
    before = weights.k.clone()
    with pytest.raises(SurgeryError, match="not finite"):
        symmetrise(weights)
    assert torch.equal(weights.k, before)
