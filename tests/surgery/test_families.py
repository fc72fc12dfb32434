"""Every family: with a softmax core the model is upstream's, and all that timm offers goes on working."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zeros import Disturbed, Zeros

from families import FAMILIES, Family
from vitruvius.surgery import Socket, head_weights, record, restore, rewire, survey

BY_NAME = {family.name: family for family in FAMILIES}
VARIANTS = {"vit_narrow", "vit_qk_norm", "vit_gated", "vit_registers", "deit_distilled", "rope_mixed", "rope_separate",
            "rope_gated", "eva_fused", "eva_gated", "dinov3", "beit_shared", "relpos_shared", "maxvit_tf"}  # fmt: skip
ONE_EACH = [family for family in FAMILIES if family.name not in VARIANTS]  # for the slower checks


def rewired(model: nn.Module, family: Family, *parts: Any) -> nn.Module:
    return rewire(model, *(parts or ("softmax",)), input_size=family.input_size)


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
        if p.grad is None or q.grad is None:
            assert q.grad is None or not q.grad.any(), name
        else:
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
        assert sum(isinstance(m, Socket) for m in twin.modules()) == len(survey(model, input_size=family.input_size))
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


CHECKPOINTED = [family for family in ONE_EACH if family.name != "crossvit"]  # upstream has none there


@pytest.mark.parametrize("family", CHECKPOINTED, ids=str)
def test_activation_checkpointing_changes_nothing(family: Family) -> None:
    model, x = family.randomised()
    rewired(model, family).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.Dropout):
            module.eval()
    plain = gradient(model, x)
    model.set_grad_checkpointing()
    torch.testing.assert_close(gradient(model, x), plain, atol=1e-6, rtol=1e-5)


def gradient(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = model(x)
    sum(o.square().sum() for o in (out if isinstance(out, tuple) else (out,))).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ONE_EACH, ids=str)
@torch.no_grad()
def test_sockets_compile_without_graph_breaks(family: Family) -> None:
    model, x = family.randomised()
    rewired(model, family)
    sockets = {type(m): m for m in model.modules() if isinstance(m, Socket)}
    calls = inputs_of(model, x, list(sockets.values()))
    torch.compiler.reset()
    for socket, (args, kwargs) in zip(sockets.values(), calls, strict=True):
        expected = socket(*args, **kwargs)
        found = torch.compile(socket, fullgraph=True, backend="eager")(*args, **kwargs)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def inputs_of(model: nn.Module, x: Tensor, modules: list[nn.Module]) -> list[tuple[Any, Any]]:
    """What each module is called with when the model runs."""
    calls: dict[nn.Module, tuple[Any, Any]] = {}
    handles = [
        m.register_forward_pre_hook(lambda m, args, kwargs: calls.update({m: (args, kwargs)}), with_kwargs=True)
        for m in modules
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return [calls[m] for m in modules]


def test_compiled_block_trains_through_aot_autograd(tiny_vit: tuple[nn.Module, Tensor]) -> None:
    block: Any = rewire(tiny_vit[0], "softmax").blocks[0]  # type: ignore[index,union-attr]
    x = torch.randn(2, 17, 32)
    expected = gradient(block, x)
    torch.compiler.reset()
    found = gradient(torch.compile(block, fullgraph=True, backend="aot_eager"), x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ONE_EACH, ids=str)
@torch.no_grad()
def test_half_precision_and_autocast_work(family: Family) -> None:
    model, x = family.randomised()
    rewired(model, family)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(x).float()
    half = copy.deepcopy(model).bfloat16()(x.bfloat16()).float()
    for found in (mixed, half):
        assert (found - expected).norm() < 0.15 * expected.norm()


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


MIXES_HEADS = {"vit_qk_norm", "vit_gated", "rope_gated", "eva_fused", "eva_gated", "cait"}  # scale norm, talking heads


@torch.no_grad()
def test_head_weights_are_views_of_the_right_head(family: Family) -> None:
    model, x = family.randomised()
    before = heads_of(model, x, family)
    kinds = {site.family: name for name, site in survey(model, input_size=family.input_size).items()}
    for name in kinds.values():
        twin = copy.deepcopy(model)
        ((site, weights),) = head_weights(twin, name, input_size=family.input_size).values()
        assert weights.q.shape[0] == weights.k.shape[0] == weights.v.shape[0] == weights.out.shape[1] == site.num_heads
        assert weights.q.shape[2] == weights.k.shape[2] == weights.v.shape[2] == site.dim
        weights.v[0].mul_(-1.7)
        after = heads_of(twin, x, family)[name].v
        old = before[name].v
        if site.family == "cait":  # every head of its softmax sees the values of all heads, one after the other
            after, old = (v[:, 0].unflatten(-1, (site.num_heads, -1)).movedim(-2, 1) for v in (after, old))
        changed = [not torch.equal(new, was) for new, was in zip(after.unbind(1), old.unbind(1), strict=True)]
        assert changed == [True] + [False] * (site.num_heads - 1)


@torch.no_grad()
def test_output_weights_are_views_of_the_right_head(family: Family) -> None:
    if family.name in MIXES_HEADS:
        pytest.skip("what one head says reaches the output by way of others too")
    model, x = family.randomised()
    for _, weights in head_weights(model, input_size=family.input_size).values():
        weights.out[:, 0] = 0
    expected = model(x)
    torch.testing.assert_close(rewired(model, family, Disturbed)(x), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["vit", "beit", "eva", "xcit", "cait", "swin", "coatnet"])
@torch.no_grad()
def test_queries_and_keys_are_made_by_the_views(name: str) -> None:
    family = BY_NAME[name]
    model, x = family.randomised()
    views = head_weights(model, input_size=family.input_size)
    for _, weights in views.values():
        for part in (weights.q, weights.q_bias, weights.v, weights.v_bias):
            if part is not None:
                part.zero_()
    seen = heads_of(model, x, family)
    assert not any(seen[n].q.any() or seen[n].v.any() for n in views)
    assert all(seen[n].k.any() for n in views)


def heads_of(model: nn.Module, x: Tensor, family: Family) -> dict[str, Any]:
    with record(model, input_size=family.input_size) as seen:
        model(x)
    return seen
