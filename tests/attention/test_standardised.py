import pytest
import torch
from attending import assert_golden, make_heads, make_site, run_layer

from golden_files import read_golden
from vitruvius.attention.base import build_core
from vitruvius.attention.softmax import attend
from vitruvius.attention.symmetric import standardise


def test_the_layer_of_the_reconstruction_experiments_matches_the_golden_output_and_gradient():
    tensors, metadata = read_golden("kpca_reconstruction")
    _, out, leaves = run_layer(tensors, metadata["H"], build_core(["standardised"], make_site()))
    assert_golden(out, tensors["out"])
    (gradient,) = torch.autograd.grad(out.square().sum(), leaves["x"])
    assert_golden(gradient, tensors["grad_x"])


def test_queries_and_keys_that_are_standardised_already_give_softmax():
    heads = make_heads()
    heads = heads._replace(q=standardise(heads.q), k=standardise(heads.k))
    torch.testing.assert_close(build_core(["standardised"], make_site())(heads), attend(heads))


def test_every_token_has_mean_zero_and_squared_length_of_width_minus_one():
    z = standardise(make_heads().q)
    torch.testing.assert_close(z.mean(-1), torch.zeros_like(z.mean(-1)))
    torch.testing.assert_close(z.square().sum(-1), torch.full_like(z[..., 0], 3))


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_constant_token_becomes_zeros_and_has_no_nan_gradient(value, dtype):
    x = torch.full((1, 1, 2, 5), value, dtype=dtype)
    x[..., 1, :] = torch.arange(5)
    x.requires_grad_()
    z = standardise(x)
    assert z.dtype == dtype
    assert (z[..., 0, :] == 0).all()
    assert float(z[..., 1, :].detach().float().std()) == pytest.approx(1, rel=1e-2)
    assert torch.autograd.grad(z.float().pow(3).sum(), x)[0].isfinite().all()
