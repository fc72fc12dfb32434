"""Every part in every precision, under autocast, on one token and on extreme inputs: finite and near float64."""

import pytest
import torch
from attending import CHAINS, make_core, make_heads, make_site

from vitruvius.attention import part
from vitruvius.attention.base import attention_map, build_core

PARTS = {
    name: chain for name, chain in CHAINS.items() if name not in ("sparse_softmax", "scaled_then_mask")
}  # any size
HALF = (torch.bfloat16, torch.float16)


def run(core, heads):
    leaves = [x.detach().clone().requires_grad_() for x in heads[:3]]
    out = core(heads._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
    found = torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True, materialize_grads=True)
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in found)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_lower_precision_stays_near_float64(name, dtype):
    expected = run(make_core(name), make_heads())
    out = run(make_core(name).to(dtype), make_heads(dtype=dtype))
    assert out.dtype == dtype
    tolerance = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}[dtype]
    assert (out.double() - expected).abs().max() < tolerance


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_autocast_with_weights_in_float32(name, dtype):
    heads = make_heads(dtype=dtype)  # what a linear layer puts out under autocast
    core = make_core(name).float()
    with torch.autocast("cpu", dtype):
        out = run(core, heads)
    expected = make_core(name)(make_heads())
    assert (out.double() - expected).abs().max() < (3e-2 if dtype == torch.float16 else 2e-1)


@pytest.mark.parametrize("name", [n for n in PARTS if n not in ("scaled", "scaled_alpha", "low_rank")])
def test_products_beyond_float16_do_not_overflow(name):
    heads = make_heads(dtype=torch.float16, width=64, tokens=7)
    large = heads._replace(q=heads.q * 60, k=heads.k * 60, scale=64**-0.5)  # q·k reaches 65504, q·k/8 does not
    assert (large.q.float() @ large.k.float().mT).abs().max() > 65504
    site = make_site(key_dim=64)
    assert build_core(PARTS[name], site)(large).isfinite().all()


def test_the_map_for_looking_scales_before_the_product():
    heads = make_heads(dtype=torch.float16, width=64)
    large = heads._replace(q=heads.q * 60, k=heads.k * 60, scale=64**-0.5)
    assert attention_map(large).isfinite().all()


@pytest.mark.parametrize("name", PARTS)
def test_one_token_and_one_head_work(name):
    heads = make_heads(tokens=1)
    assert run(make_core(name, tokens=1), heads).shape == heads.v.shape
    core = build_core([part("low_rank"), part("rpc", asymmetric=True)], make_site(heads=1, queries=1)).double()
    torch.testing.assert_close(core(make_heads(heads=1, tokens=1)), make_heads(heads=1, tokens=1).v)


@pytest.mark.parametrize("name", PARTS)
def test_all_zero_queries_and_keys_give_no_nan(name):
    heads = make_heads()
    zero = heads._replace(q=torch.zeros_like(heads.q), k=torch.zeros_like(heads.k))
    run(make_core(name), zero)
