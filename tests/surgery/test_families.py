"""Every family: with a softmax core the model is upstream's, and all that timm offers goes on working."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from operating import BY_NAME, ONE_EACH, Zeros, rewired

from families import Family
from vitruvius.surgery import head_weights, record, restore, rewire, survey
from vitruvius.surgery.base import Socket


@torch.no_grad()
def test_softmax_core_reproduces_upstream(family: Family) -> None:
    model, x = family.randomised()
    expected = model(x)
    torch.testing.assert_close(rewired(model, family)(x), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_another_core_changes_the_logits(family: Family) -> None:
    model, x = family.randomised()
    expected = model(x)
    assert (rewired(model, family, Zeros)(x) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("family", ONE_EACH, ids=str)
@torch.no_grad()
def test_every_site_counts(family: Family) -> None:
    model, x = family.randomised()
    expected = model(x)
    for name in survey(model, input_size=family.input_size):
        rewire(model, Zeros, where=name, input_size=family.input_size)
        assert not torch.allclose(model(x), expected, atol=1e-4), name
        restore(model)


def test_gradients_are_upstreams(family: Family) -> None:
    model, x = family.randomised()
    twin = rewired(copy.deepcopy(model), family)
    model(x).square().sum().backward()
    twin(x).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name  # DistributedDataParallel waits for every one
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@torch.no_grad()
def test_restore_is_exact(family: Family) -> None:
    model, x = family.randomised()
    expected, classes, keys = model(x), [type(m) for m in model.modules()], list(model.state_dict())
    attributes = [set(vars(m)) for m in model.modules()]
    restore(rewired(model, family))
    assert [type(m) for m in model.modules()] == classes
    assert list(model.state_dict()) == keys
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert torch.equal(model(x), expected)


@torch.no_grad()
def test_copies_and_saved_models_keep_their_cores(family: Family) -> None:
    model, x = family.randomised()
    expected = rewired(model, family)(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert sum(isinstance(m, Socket) for m in twin.modules()) == sum(isinstance(m, Socket) for m in model.modules())
        assert torch.equal(twin(x), expected)
        restore(twin)
    assert any(isinstance(m, Socket) for m in model.modules()), "the original keeps its own cores"


@torch.no_grad()
def test_forward_intermediates_are_upstreams(family: Family) -> None:
    model, x = family.randomised()
    if not hasattr(model, "forward_intermediates"):
        pytest.skip("upstream offers no intermediates here")
    expected = model.forward_intermediates(x, intermediates_only=True)
    found = rewired(model, family).forward_intermediates(x, intermediates_only=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple sequence")  # timm's resizing
def test_swin_changes_its_input_size_after_surgery() -> None:
    for name in ("swin", "swin_v2"):
        model, _ = BY_NAME[name].randomised()
        twin = copy.deepcopy(model)
        rewire(model, "softmax")
        for m in (model, twin):
            m.set_input_size(img_size=(64, 64), window_size=(8, 8))  # type: ignore[operator]
        x = torch.randn(1, 3, 64, 64)
        with torch.no_grad():
            torch.testing.assert_close(model(x), twin(x), atol=1e-5, rtol=0)
        assert next(iter(survey(model).values())).grid == (8, 8)


@torch.no_grad()
def test_attention_masks_become_the_bias() -> None:
    for name in ("vit", "vit_gated", "rope", "eva", "eva_fused"):
        model, _ = BY_NAME[name].randomised()
        bare: Any = model.blocks[0].attn  # type: ignore[index,union-attr]
        x = torch.randn(2, 17, 32)
        keep = torch.rand(2, 1, 17, 17) > 0.4
        keep[..., 0] = True
        calls = [{"attn_mask": keep}, {"attn_mask": keep.float().log()}, {"is_causal": True}, {}]
        expected = [bare(x, **call) for call in calls]
        rewire(model, "softmax")
        for call, wanted in zip(calls, expected, strict=True):
            torch.testing.assert_close(bare(x, **call), wanted, atol=1e-5, rtol=0)


@torch.no_grad()
def test_grouped_queries_reproduce_upstream() -> None:
    from timm.layers import AttentionRope

    try:
        attention = AttentionRope(32, 2, qkv_fused=False, num_kv_heads=1)
    except TypeError:
        pytest.skip("this timm has no grouped queries")
    model, x = BY_NAME["rope"].randomised()
    model.blocks[0].attn = attention  # type: ignore[index,union-attr]
    with pytest.raises(ValueError, match=r"'blocks\.0\.attn' \(rope\) .*share one key projection"):
        head_weights(model)
    expected = model.eval()(x)
    torch.testing.assert_close(rewire(model, "softmax")(x), expected, atol=1e-5, rtol=0)


def test_attention_dropout_reaches_the_core_in_training_only() -> None:
    model, x = BY_NAME["vit"].randomised()
    for module in model.modules():
        if hasattr(module, "attn_drop"):
            module.attn_drop.p = 0.25  # type: ignore[union-attr]
    with record(model) as seen:
        model(x)
        assert {h.dropout for h in seen.values()} == {0.0}
        model.train()(x)
        assert {h.dropout for h in seen.values()} == {0.25}


def test_talking_heads_with_dropout_are_refused() -> None:
    model, _ = BY_NAME["cait"].randomised()
    model.blocks[0].attn.attn_drop.p = 0.1  # type: ignore[index,union-attr]
    with pytest.raises(ValueError, match=r"'blocks\.0\.attn' cannot be rewired: attention dropout is 0\.1"):
        rewire(model, "softmax")
    assert not any(isinstance(m, Socket) for m in model.modules())
