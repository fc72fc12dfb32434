import pytest
import torch
from attending import make_heads, make_site

from vitruvius.attention.truncated import Truncated


def matrices(x, mode):
    return x.flatten(2) if mode == "mix_head" else x


@pytest.mark.parametrize("mode", ["single_head", "mix_head"])
def test_it_is_the_best_approximation_of_that_rank(mode):
    heads = make_heads()
    low = matrices(Truncated(make_site(), mode=mode, rank=2)(heads).q, mode)
    full = matrices(heads.q, mode)
    u, s, vt = torch.linalg.svd(full, full_matrices=False)
    torch.testing.assert_close(low, u[..., :2] * s[..., None, :2] @ vt[..., :2, :])
    assert (torch.linalg.matrix_rank(low) == 2).all()  # the published code compresses nothing, or loses the mean


def test_the_default_rank_is_half_of_the_full_one_and_three_heads_work():
    assert Truncated(make_site(), mode="mix_head").rank == 2
    assert Truncated(make_site(), mode="single_head").rank == 2
    assert Truncated(make_site(queries=1), mode="single_head").rank == 1


def test_only_the_named_tensors_are_truncated():
    heads = make_heads()
    after = Truncated(make_site(), tensors="k", rank=1)(heads)
    assert after.q is heads.q
    assert after.v is heads.v
    assert (torch.linalg.matrix_rank(after.k) == 1).all()


def test_in_training_a_share_of_the_samples_is_truncated_and_in_evaluation_all_are():
    heads = make_heads(batch=200)
    stage = Truncated(make_site(), rank=1, probability=0.25, tensors="q")
    torch.manual_seed(0)
    share = (torch.linalg.matrix_rank(stage(heads).q[:, 0]) == 1).double().mean()
    assert 0.15 < share < 0.35
    assert (torch.linalg.matrix_rank(stage.eval()(heads).q) == 1).all()


@pytest.mark.parametrize("mode", ["single_head", "mix_head"])
def test_the_exact_gradient_is_that_of_the_function(mode):
    heads = make_heads(batch=1, heads=3, tokens=4, width=3)
    stage = Truncated(make_site(key_dim=3, queries=4), mode=mode, rank=2, gradient="exact", tensors="q")
    torch.autograd.gradcheck(lambda q: stage(heads._replace(q=q)).q, heads.q.requires_grad_())


@pytest.mark.parametrize("mode", ["single_head", "mix_head"])
def test_the_projection_gradient_is_finite_where_singular_values_coincide(mode):
    q = torch.eye(4, dtype=torch.float64).expand(1, 3, 4, 4).clone().requires_grad_()
    stage = Truncated(make_site(queries=4), mode=mode, rank=2, tensors="q")
    out = stage(make_heads(batch=1, tokens=4)._replace(q=q)).q
    assert torch.autograd.grad(out.pow(3).sum(), q)[0].isfinite().all()
