"""Softmax by plain matrix products, which a CPU takes in bfloat16: per part, the output of the fused kernel."""

import pytest
import torch
from attending import CHAINS, make_core, make_heads
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitruvius.attention import softmax as module
from vitruvius.attention.softmax import attend, by_products
from vitruvius.heads import Heads
from vitruvius.surgery import rewire

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}  # of the largest entry


def both_ways(monkeypatch, answer):
    found = []
    for taken in (False, True):
        monkeypatch.setattr(module, "products_are_faster", lambda heads, taken=taken: taken)
        found.append(answer())
    return found


def output_and_gradients(core, heads):
    leaves = [x.detach().clone().requires_grad_() for x in heads[:3]]
    out = core(heads._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
    return out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_every_part_answers_the_same_both_ways(name, dtype, monkeypatch):
    heads = make_heads(dtype=dtype)
    fused, products = both_ways(monkeypatch, lambda: output_and_gradients(make_core(name).to(dtype), heads))
    compared = 1 if dtype == torch.bfloat16 else 4  # rounding to 8 bits moves keys across thresholds of gradients
    for expected, got in list(zip(fused, products, strict=True))[:compared]:
        assert got.dtype == dtype
        largest = float(expected.detach().abs().max())
        assert (got - expected).abs().max() <= TOLERANCE[dtype] * max(1.0, largest)


def test_a_softmax_rewire_brings_a_plain_model_to_them(tiny_vit, monkeypatch):
    model, x = tiny_vit
    calls = []
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(module, "by_products", lambda heads: calls.append(heads.q.dtype) or by_products(heads))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(x)
        assert not calls  # timm's own attention
        out = rewire(model, "softmax")(x)
    assert calls == [torch.bfloat16] * 2
    torch.testing.assert_close(out.float(), model(x), atol=0.2, rtol=0.2)


def test_a_bias_hides_pairs_and_a_query_without_keys_gets_zero():
    heads = make_heads()
    hidden = torch.zeros(heads.q.shape[1], heads.q.shape[2], heads.k.shape[2], dtype=heads.q.dtype)
    hidden[0, 0], hidden[-1, :, 1] = -torch.inf, -torch.inf
    out = by_products(heads._replace(bias=hidden))
    torch.testing.assert_close(out, attend(heads._replace(bias=hidden)), atol=1e-12, rtol=1e-9)
    assert (out[:, 0, 0] == 0).all()


def test_second_gradients_and_dropout():
    heads = make_heads()
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: by_products(Heads(q, k, v)), [x[:1, :1, :3, :2].clone().requires_grad_() for x in heads[:3]]
    )
    torch.manual_seed(0)
    ones = heads._replace(v=torch.ones_like(heads.v), dropout=0.5)
    mean = torch.stack([by_products(ones) for _ in range(300)]).mean()
    assert abs(mean - 1) < 0.02  # weights that stay are doubled


@pytest.mark.skipif(not module.multiplies_bfloat16(), reason="this processor has no products in bfloat16")
def test_the_choice_is_by_device_dtype_and_length():
    heads = make_heads(dtype=torch.bfloat16)
    assert module.products_are_faster(heads)
    assert not module.products_are_faster(make_heads(dtype=torch.float32))
    assert not module.products_are_faster(make_heads(dtype=torch.float16))
    assert not module.products_are_faster(Heads(*(x.to("meta") for x in heads[:3])))
    long = torch.empty(1, 1, module.MOST_KEYS + 1, 8, dtype=torch.bfloat16)
    assert not module.products_are_faster(Heads(long, long, long))


def test_exported_programs_hold_the_fused_kernel(monkeypatch):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(Heads(q, k, v))

    monkeypatch.setattr(module, "multiplies_bfloat16", lambda: True)
    q, k, v = make_heads(dtype=torch.bfloat16)[:3]
    text = str(torch.export.export(Model(), (q, k, v)).graph)
    assert "scaled_dot_product" in text


def heads_of_a_vit(tokens=170, dtype=torch.float32, keys_ask=False):
    """Heads in the memory layout of a ViT's projection, and the gradient of their output."""
    make = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 2, tokens, 3, 8, dtype=dtype, generator=make).transpose(2, 3).unbind()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    return Heads(k if keys_ask else q, k, v, None, 0.4), grad


@pytest.fixture
def by_head(monkeypatch):
    """How often `HeadByHead` was taken, on an AMD processor of two cores."""
    calls = []
    apply = module.HeadByHead.apply
    monkeypatch.setattr(module.HeadByHead, "apply", lambda *given: calls.append(None) or apply(*given))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(module, "onednn_is_faster", lambda: True)
    return calls


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("keys_ask", [False, True])
def test_heads_get_the_output_and_gradients_of_float64_head_by_head(by_head, keys_ask):
    heads, grad = heads_of_a_vit(keys_ask=keys_ask)
    asked = heads[1:3] if keys_ask else heads[:3]
    out = attend(heads)
    found = torch.autograd.grad(out, asked, grad)
    assert len(by_head) == 1
    wide = [x.detach().double().requires_grad_() for x in asked]
    answer = by_products(Heads(wide[0], wide[-2], wide[-1], None, heads.scale))
    expected = answer, *torch.autograd.grad(answer, wide, grad.double())
    for ours, theirs in zip((out, *found), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=1e-5, atol=2e-6)


@needs_onednn
def test_keys_that_ask_have_second_gradients_where_pytorch_has_them(by_head):
    heads, grad = heads_of_a_vit(keys_ask=True)
    with sdpa_kernel(SDPBackend.MATH):
        (first,) = torch.autograd.grad(attend(heads), heads.k, grad, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), heads.k)[0].isfinite().all()
    assert not by_head


@needs_onednn
def test_the_fused_kernel_answers_where_heads_by_head_do_not_pay(by_head, monkeypatch):
    heads, _ = heads_of_a_vit(keys_ask=True)
    few, _ = heads_of_a_vit(tokens=module.SAVED_KEYS[0] - 1)
    wide, _ = heads_of_a_vit(dtype=torch.float64)
    biased = heads._replace(bias=torch.zeros(170, 170))
    for other in (few, wide, biased, heads._replace(dropout=0.1)):
        assert attend(other).requires_grad
    with torch.no_grad():
        attend(heads)
    monkeypatch.setattr(module, "MOST_SAVED_SCORES", 6 * 170 * 170 - 1)
    attend(heads)
    assert not by_head


def test_torch_func_differentiates_keys_that_ask():
    heads, _ = heads_of_a_vit(keys_ask=True)
    k, v = heads.k.detach(), heads.v.detach()
    found = torch.func.grad(lambda k: attend(Heads(k, k, v, None, 0.4)).square().sum())(k)
    (expected,) = torch.autograd.grad(attend(heads._replace(v=v)).square().sum(), heads.k)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
